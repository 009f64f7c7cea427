"""What can go wrong with an environment. An `EnvironmentFailed` costs one episode."""

from __future__ import annotations

from typing import ClassVar, Literal

from holdfast.comms.errors import HoldfastError

FailureKind = Literal["died", "hung", "lied", "refused", "busy"]
"""How an environment failed, in one word."""


class EnvironmentFailed(HoldfastError):
    """An environment failed and the episode is lost. `kind` says how, `environment` which, `call` what it was doing.

    A session that raised it is never used again, but for one of a pool, which may be reset: that begins anew elsewhere.
    """

    kind: ClassVar[FailureKind]

    def __init__(self, environment: str, call: str, why: str) -> None:
        self.environment, self.call, self.why = environment, call, why
        super().__init__(f"{call} of environment {environment}: {why}")


class EnvironmentDied(EnvironmentFailed):
    """It raised, its process ended, or the connection to it broke."""

    kind = "died"


class EnvironmentHung(EnvironmentFailed):
    """It did not answer in time. It may still be at work: its late answer is dropped."""

    kind = "hung"


class EnvironmentLied(EnvironmentFailed):
    """Its answer is none that an environment may give: a reward that is no number, another type, too many bytes."""

    kind = "lied"


class EnvironmentRefused(EnvironmentFailed):
    """It does not take the request, or the session has failed before."""

    kind = "refused"


class EnvironmentBusy(EnvironmentFailed):
    """It has no free session."""

    kind = "busy"


class EpisodeOver(HoldfastError):
    """A step without a running episode. Call `reset` first; after `done` too."""

    def __init__(self, environment: str, why: str) -> None:
        self.environment = environment
        super().__init__(f"step of environment {environment}: {why}; call reset() first")


class UnknownEnvironment(HoldfastError, LookupError):
    """A name that is no environment, needs a package that is not installed, or has options that do not fit."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"environment {name!r}: {why}")
