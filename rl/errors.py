"""Errors of reinforcement learning: configurations, prompts and episodes, rewards, environments, and runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.console.units import counted

Key = tuple[str | int, ...]
"""The path of a value: names of tables and keys, and numbers of an array's elements."""


def dotted(key: Key) -> str:
    """A path as it is written: `reward[0].weight`. A name that TOML writes in quotation marks has them."""
    text = ""
    for part in key:
        name = part if isinstance(part, int) or re.fullmatch(r"[\w-]+", part) else json.dumps(part, ensure_ascii=False)
        text += f"[{part}]" if isinstance(part, int) else f".{name}" if text else str(name)
    return text


def key_of(name: str) -> Key:
    """The path that `reward[0].weight` or `reward.0.weight` means."""
    return tuple(int(part) if part.isdecimal() else part for part in name.replace("[", ".").replace("]", "").split("."))


class ConfigProblem(msgspec.Struct, frozen=True):
    """One thing that is wrong: `place` is a file with a line, or an override."""

    place: str
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.reason}" if self.key else f"{self.place}: {self.reason}"


class BadConfig(HoldfastError):
    """A configuration cannot be used. `problems` has everything that is wrong with it."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class ConfigChanged(HoldfastError):
    """A run would be resumed with a configuration that gives other weights. `differences` names the fields."""

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        super().__init__(
            "the run was begun with another configuration: " + "; ".join(self.differences) + "; resume with the old "
            "values, or begin a new run in another directory"
        )


class InvalidEpisode(HoldfastError):
    """A prompt, completion, episode, group or request contradicts itself.

    `kind` is its type, `number` that of its prompt, None if it has none.
    """

    def __init__(self, kind: str, number: int | None, reason: str) -> None:
        self.kind, self.number, self.reason = kind, number, reason
        of = "" if number is None else f" of prompt {number}"
        super().__init__(f"{kind}{of}: {reason}; correct what made it: nothing of it was used")


class StalenessUnreachable(HoldfastError):
    """No schedule fills a batch under this staleness bound."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"a batch can never fill: {reason}")


class StaleGroup(HoldfastError):
    """A group has a token older than its permit allows; it was not added. Draw it again with newer weights."""

    def __init__(self, number: int, version: int, permitted: int) -> None:
        self.number, self.version, self.permitted = number, version, permitted
        super().__init__(
            f"the group of prompt {number} has a token of version {version}, and its permit is for {permitted} or "
            "later: bring the generator to that version before it serves, and draw the group again"
        )


class OtherVersion(HoldfastError):
    """Held-out episodes of one version have tokens that others drew: their rewards say nothing about it."""

    def __init__(self, version: int, others: Sequence[int]) -> None:
        self.version, self.others = version, tuple(others)
        super().__init__(
            f"the held-out episodes of version {version} have tokens of {', '.join(map(str, others))}: a generator did "
            "not keep to the version that the request names; nothing was recorded"
        )


class OutOfOrder(HoldfastError):
    """A call to the replay buffer that no order of events allows; nothing was changed."""


class BufferStalled(HoldfastError, TimeoutError):
    """Nothing was added to or trained from the replay buffer for too long while a caller waited."""

    def __init__(self, waiting: str, seconds: float, state: str) -> None:
        self.waiting = waiting
        super().__init__(
            f"{waiting}: nothing was added, trained or served for {seconds:.3g} s; {state}; look whether the "
            "generators run, or raise the buffer's `patience`"
        )


class BadDataset(HoldfastError):
    """A file of prompts cannot be used. `source` names it, `line` (from 1) is the first bad one."""

    def __init__(self, source: str, line: int | None, reason: str) -> None:
        self.source, self.line, self.reason = source, line, reason
        super().__init__(f"{source}{'' if line is None else f':{line}'}: {reason}")


class RewardFailed(HoldfastError):
    """A reward gave no usable score for an answer; that episode is not trained on. `number` is that of the prompt."""

    def __init__(self, reward: str, number: int, reason: str) -> None:
        self.reward, self.number, self.reason = reward, number, reason
        super().__init__(
            f"reward {reward!r} failed for an answer to prompt {number}: {reason}; the episode is left out and counted"
        )


class EnvironmentFailed(HoldfastError):
    """An environment failed and the episode is lost. `environment` says which, `call` what it was doing.

    A session that raised it is never used again, but for one of a pool, which may be reset: that begins anew elsewhere.
    """

    def __init__(self, environment: str, call: str, why: str) -> None:
        self.environment, self.call, self.why = environment, call, why
        super().__init__(f"{call} of environment {environment}: {why}")


class EnvironmentDied(EnvironmentFailed):
    """It raised, its process ended, or the connection to it broke."""


class EnvironmentHung(EnvironmentFailed):
    """It did not answer in time. It may still be at work: its late answer is dropped."""


class EnvironmentLied(EnvironmentFailed):
    """Its answer is none that an environment may give: a reward that is no number, another type, too many bytes."""


class EnvironmentRefused(EnvironmentFailed):
    """It does not take the request, or the session has failed before."""


class EnvironmentBusy(EnvironmentFailed):
    """It has no free session."""


class EpisodeOver(HoldfastError):
    """A step without a running episode. Call `reset` first; after `done` too."""

    def __init__(self, environment: str, why: str) -> None:
        self.environment = environment
        super().__init__(f"step of environment {environment}: {why}; call reset() first")


class UnknownEnvironment(HoldfastError, LookupError):
    """A name that is no environment or needs what is not there, options that do not fit, or one that cannot begin."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"environment {name!r}: {why}")


class StepsDone(HoldfastError):
    """A run has been trained for more steps than it shall have: `done` of `steps`."""

    def __init__(self, done: int, steps: int) -> None:
        self.done, self.steps = done, steps
        super().__init__(
            f"the run has {counted(done, 'step')} already, and steps = {steps}: raise it to go on, or begin a new run "
            "in another directory"
        )


class RunFailed(HoldfastError):
    """The run cannot go on; what it has committed is kept, and a new driver may resume it."""
