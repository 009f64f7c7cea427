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
