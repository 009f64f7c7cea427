"""Errors of generators and of the models that they and the trainers build."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.comms.errors import HoldfastError


class BadRequest(HoldfastError):
    """A sampling request that this generator's model cannot serve; nothing was generated."""

    def __init__(self, why: str, hint: str) -> None:
        self.why = why
        super().__init__(f"the sampling request cannot be served: {why}; {hint}")


class GeneratorNotReady(HoldfastError):
    """The generator has no weights that it may serve: none came yet, or its last update failed."""

    retryable = True

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the generator is not ready: {why}; ask another one, or call update()")


class GeneratorClosed(HoldfastError):
    """The generator was closed; `cause` says why if that was an error of its own."""

    retryable = True

    def __init__(self, cause: str = "") -> None:
        self.cause = cause
        super().__init__(f"the generator is closed{f': {cause}' if cause else ''}; start another one")


class VersionGone(HoldfastError):
    """A version that is older than the one which the generator serves, or that the store has not any more."""

    def __init__(self, version: int, there: Sequence[int]) -> None:
        self.version, self.there = version, tuple(there)
        has = ", ".join(map(str, there)) or "none"
        super().__init__(
            f"version {version} of the weights is gone: a newer one is served, or the store has let it go; there are "
            f"{has}: ask for one of these"
        )


class UpdateFailed(HoldfastError):
    """A version could not be brought into a generator, which serves nothing until another update worked."""

    retryable = True

    def __init__(self, version: int, why: str) -> None:
        self.version, self.why = version, why
        super().__init__(f"version {version} could not be loaded: {why}; update the generator again, or replace it")


class GenerationTimeout(HoldfastError):
    """The completions of a request were not drawn in time; the request was given up."""

    retryable = True

    def __init__(self, seconds: float, samples: int) -> None:
        self.seconds, self.samples = seconds, samples
        super().__init__(
            f"{samples} samples were not drawn within {seconds:.3g} s; ask for fewer at a time, or raise `timeout`"
        )
