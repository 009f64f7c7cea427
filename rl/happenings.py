"""The events of a run, which the driver sends to its observer: one frozen type for each kind.

`time` is `time.monotonic()` seconds, which all processes of a host share.
"""

from __future__ import annotations

import msgspec

from holdfast.rl.units import Unit


class Happening(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True):
    """An event at time `time`."""

    time: float


class WorkerStarted(Happening, frozen=True, tag="worker_started"):
    """A process was started; `role` is trainer, generator or holder. `replaces` names the dead process it replaces."""

    name: str
    role: str
    pid: int
    replaces: str = ""


class WorkerLost(Happening, frozen=True, tag="worker_lost"):
    """A process ended although it was needed; the units it had leased are `requeued`."""

    name: str
    role: str
    pid: int
    how: str
    requeued: tuple[Unit, ...] = ()


class WarmedUp(Happening, frozen=True, tag="warmed_up"):
    """The supervised warm-up is done: held-out exact match before it, and its last loss in nats."""

    untrained: float
    loss: float


class Published(Happening, frozen=True, tag="published"):
    """The weights after `version` committed steps are in the store."""

    version: int


class StepCommitted(Happening, frozen=True, tag="step_committed"):
    """A step is known to be committed. `reward` is the mean over its samples, `tokens` the number generated."""

    step: int
    reward: float
    tokens: int
    epoch: int
    size: int


class UnitDone(Happening, frozen=True, tag="unit_done"):
    """The first result of a unit arrived."""

    unit: Unit
    worker: str


class Evaluated(Happening, frozen=True, tag="evaluated"):
    """The held-out exact match of a version, and the digest of its weights as read from the store."""

    version: int
    exact_match: float
    digest: str


class PointReached(Happening, frozen=True, tag="point_reached"):
    """A worker is at a point where a fault is planned."""

    worker: str
    point: str
    step: int


class TrainerFinished(Happening, frozen=True, tag="trainer_finished"):
    """A trainer has committed all steps."""

    worker: str
    digest: str
    epoch: int
