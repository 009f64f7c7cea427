"""The settings of a trainer: equal on all trainers of a run, and all that their weights depend on."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from holdfast.comms.quantities import integer_in
from holdfast.rl.config.run_config import Objective
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.trainers.titan.settings import TitanSettings

Layout = Literal["fsdp2", "replicated"]


class RateSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """The learning rate by update: a linear warm-up over `warmup` updates, then a linear decay.

    The decay ends after `decay` updates (0: there is none) at the share `floor` of `rate`.
    """

    rate: float = 1e-5
    warmup: int = 0
    decay: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        for name in ("warmup", "decay"):
            integer_in(getattr(self, name), name, 0)
        if not self.rate > 0 or not 0 <= self.floor <= 1:
            raise ValueError(f"rate={self.rate} must be above 0, floor={self.floor} from 0 to 1")

    def at(self, update: int) -> float:
        """The learning rate of update `update`, counted from 0."""
        warm = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        gone = min(1.0, update / self.decay) if self.decay else 0.0
        return self.rate * warm * (1.0 - (1.0 - self.floor) * gone)


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters of `rank`, scaled by `alpha / rank`, of all linear layers or of the `targets` by name."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        integer_in(self.rank, "rank", 1)


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainers of a run update the policy `source` under an objective, for `batches` batches.

    A batch is divided into `shards` parts, the same whatever the number of trainers, and each of them into forwards of
    at most `micro_batch` episodes (0: one). It makes `updates` updates, each with other groups. Gradients are clipped
    to `max_norm` (0: not). Log-probs are taken at `temperature`, that of the generators.

    In layout "fsdp2" the trainers share the state, and `copies` neighbours keep a copy of each part; "replicated" has
    all of it on each. With `titan`, the model is TorchTitan's, and shared in its ways. With a `checkpoint` folder, all
    state is saved every `checkpoint_every` batches.
    """

    source: ModelSource
    batches: int
    objective: Objective = Objective()
    layout: Layout = "fsdp2"
    titan: TitanSettings | None = None
    shards: int = 4
    micro_batch: int = 0
    updates: int = 1
    schedule: RateSchedule = RateSchedule()
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_norm: float = 1.0
    temperature: float = 1.0
    lora: LoraSettings | None = None
    copies: int = 1
    checkpoint: str = ""
    checkpoint_every: int = 10
    threads: int = 1
    batch_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout={self.layout!r} is unknown: give one of {', '.join(get_args(Layout))}")
        for name, least in (
            ("batches", 0),
            ("shards", 1),
            ("micro_batch", 0),
            ("updates", 1),
            ("copies", 0),
            ("checkpoint_every", 1),
            ("threads", 1),
        ):
            integer_in(getattr(self, name), name, least)
        for name in ("temperature", "batch_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.titan is not None and (self.layout != "fsdp2" or self.lora is not None):
            raise ValueError("TorchTitan's models are sharded, without adapters: layout='fsdp2', lora=None")
        if self.max_norm < 0 or self.weight_decay < 0:
            raise ValueError("max_norm and weight_decay must not be negative")

    @property
    def steps(self) -> int:
        """The number of updates of all batches, which is the last version."""
        return self.batches * self.updates

    @property
    def checkpoint_steps(self) -> int:
        """The number of updates from one checkpoint to the next."""
        return self.checkpoint_every * self.updates

    def saved_after(self, step: int) -> bool:
        """Whether a checkpoint is written after the batch that begins with update `step`."""
        done = step + self.updates
        return bool(self.checkpoint) and (done % self.checkpoint_steps == 0 or done == self.steps)
