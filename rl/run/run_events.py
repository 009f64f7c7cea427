"""The events of a run: one frozen type a kind, in the order in which the driver saw them.

`time` is in seconds since the run began, on the driver's clock. A resumed run goes on where the last event stood.
"""

from __future__ import annotations

import msgspec


class RunEvent(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True, forbid_unknown_fields=True):
    """An event at time `time`."""

    time: float


class ProcessStarted(RunEvent, frozen=True, tag="process_started"):
    """A process can do its work, `seconds` after its start. `replaces` names the dead process whose work it took over.

    `host` is the address of its host; empty for the driver's. Process `pid` is another one on each host.
    `clock` and `wall` are what the host's monotonic clock and its wall clock showed at `time`; only the driver says it.
    """

    name: str
    role: str
    pid: int
    host: str = ""
    replaces: str = ""
    seconds: float = 0.0
    clock: float = 0.0
    wall: float = 0.0


class ProcessLost(RunEvent, frozen=True, tag="process_lost"):
    """A process that the run needed has ended; `how` says how, in words. `host` is as in its `ProcessStarted`."""

    name: str
    role: str
    pid: int
    how: str
    host: str = ""


class StepTrained(RunEvent, frozen=True, tag="step_trained"):
    """A batch is trained: its `updates` steps are committed, of which `step` is the first.

    `reward` is the mean over the batch's episodes, `tokens` the number that the policy drew, `staleness` the number of
    versions by which each group was behind at the update that trained it, `prompts` the numbers of their prompts,
    `epoch` and `size` those of the trainers.
    """

    step: int
    reward: float
    loss: float
    gradient_norm: float
    tokens: int
    staleness: tuple[int, ...]
    epoch: int
    size: int
    prompts: tuple[int, ...] = ()
    updates: int = 1

    @property
    def version(self) -> int:
        """That of the weights after it: the number of steps that are committed then."""
        return self.step + self.updates


class WeightsServed(RunEvent, frozen=True, tag="weights_served"):
    """A generator serves a version, `seconds` after it was published."""

    version: int
    process: str
    seconds: float


class CallTakenOver(RunEvent, frozen=True, tag="call_taken_over"):
    """A process answered a call that the process `lost` had before it died; the call took `seconds` in all."""

    process: str
    lost: str
    seconds: float


class CopiesRestored(RunEvent, frozen=True, tag="copies_restored"):
    """After the loss of a holder, each of the `versions` in the store has all of its copies again."""

    versions: int


class Evaluated(RunEvent, frozen=True, tag="evaluated"):
    """The mean reward of a version on the held-out episodes that were judged; `best` if no version before was better.

    `judged` is their number, `failed` that of the others. The reward is None if none could be judged.
    """

    version: int
    reward: float | None
    best: bool
    judged: int = 0
    failed: int = 0


class EpisodeFailed(RunEvent, frozen=True, tag="episode_failed"):
    """An episode failed, and was left out of its group: an environment died, or a reward was not finite.

    With `again`, another environment goes on with it instead: nothing is left out.
    """

    prompt: int
    reason: str
    again: bool = False


class Activity(RunEvent, frozen=True, tag="activity"):
    """A process did something from `time` on, for `seconds`; `number` is the step, the version or the group.

    `cpu` are the processor seconds of the thread that did it, where they are known.
    """

    process: str
    role: str
    what: str
    number: int
    seconds: float
    cpu: float = 0.0


class ProcessorTime(RunEvent, frozen=True, tag="processor_time"):
    """The processor seconds that a process has used since it was started, in all its threads."""

    process: str
    role: str
    seconds: float


class RunResumed(RunEvent, frozen=True, tag="run_resumed"):
    """A new driver goes on after `step` committed steps; later events of the one before are void."""

    step: int


Event = (
    ProcessStarted
    | ProcessLost
    | StepTrained
    | WeightsServed
    | CallTakenOver
    | CopiesRestored
    | Evaluated
    | EpisodeFailed
    | Activity
    | ProcessorTime
    | RunResumed
)
