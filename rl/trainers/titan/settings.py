"""The settings of a trainer with TorchTitan's models, under the names of TorchTitan's own configuration."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from holdfast.comms.quantities import integer_in

Precision = Literal["float32", "bfloat16"]
Reshard = Literal["default", "always", "never"]
Recompute = Literal["none", "selective", "full"]

FAMILIES = ("llama", "qwen3")
"""The types of transformers' configurations for models that TorchTitan defines too."""


class TitanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How TorchTitan shares a model among the trainers. Its shard degree is what is left of them.

    `config` is a function of its config registries, `module:name`: the parallelism, precision, activation checkpointing
    and compilation of the `Trainer.Config` that it returns are taken as they are. Without one, the other fields count.
    """

    config: str = ""
    tensor_parallel_degree: int = 1
    data_parallel_replicate_degree: int = 1
    fsdp_reshard_after_forward: Reshard = "default"
    mixed_precision_param: Precision = "float32"
    activation_checkpoint: Recompute = "none"

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_degree", "data_parallel_replicate_degree"):
            integer_in(getattr(self, name), name, 1)
        for name, kind in (
            ("fsdp_reshard_after_forward", Reshard),
            ("mixed_precision_param", Precision),
            ("activation_checkpoint", Recompute),
        ):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: give one of {known}")


def mesh_of(size: int, replicate: int, tensor: int) -> dict[str, int]:
    """The mesh of `size` trainers, by TorchTitan's names. A degree that does not fit becomes 1."""
    tensor = tensor if size % tensor == 0 else 1
    replicate = replicate if size // tensor % replicate == 0 else 1
    return {"dp_replicate": replicate, "fsdp": size // tensor // replicate, "tp": tensor}
