"""The errors of the sandbox itself. What the code in it does is a result, never an error."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError


class SandboxError(HoldfastError):
    """The sandbox was used in a way that cannot work."""


class SandboxUnavailable(SandboxError):
    """This machine does not allow the walls of the sandbox; nothing was executed."""

    def __init__(self, missing: str, hint: str) -> None:
        self.missing, self.hint = missing, hint
        super().__init__(f"the sandbox cannot run on this machine: {missing}; {hint}")


class SandboxLost(SandboxError):
    """The sandbox's own process was killed, again and again, while code was judged: nothing is known of that code."""

    def __init__(self, tries: int) -> None:
        self.tries = tries
        super().__init__(
            f"the sandbox's own process was killed in each of {tries} tries to run a test: the code has no score; look "
            "for what kills it, such as the kernel's OOM killer"
        )
