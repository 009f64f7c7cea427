"""The settings of a vLLM generator."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from holdfast.comms.quantities import integer_in

OnUpdate = Literal["keep", "wait", "abort"]
"""What an update does with running completions: go on with new weights after it, end before it, or cut them off."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a vLLM generator runs.

    Up to `slots` samples are drawn together. A sample has at most `length` tokens with its prompt (0: as many as the
    model can). `tensor_parallel` processes share the weights. `cache` is the memory of keys and values, in GiB.
    `threads` are those of each process on a CPU. `timeout` is the limit of each call, in seconds.
    """

    on_update: OnUpdate = "keep"
    slots: int = 32
    length: int = 0
    tensor_parallel: int = 1
    cache: float = 1.0
    threads: int = 1
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.on_update not in get_args(OnUpdate):
            raise ValueError(f"on_update={self.on_update!r} is unknown: give one of {', '.join(get_args(OnUpdate))}")
        for name, least in (("slots", 1), ("length", 0), ("tensor_parallel", 1), ("threads", 1)):
            integer_in(getattr(self, name), name, least)
        for name in ("cache", "timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0")
