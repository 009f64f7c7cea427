"""The limits of a run, how it ended, and the errors of the sandbox itself. What the code does is a result, no error."""

from __future__ import annotations

from typing import Literal

import msgspec

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


MEBIBYTE = 1 << 20

Reason = Literal["ok", "error", "timeout", "memory", "output", "refused", "killed", "lost"]
"""Why a run ended.

ok: exit status 0. error: any other. timeout: processor or wall time was used up. memory, output: so was that. refused:
it made a system call that only an attack makes. killed: by another signal. lost: the sandbox's own process was killed,
so nothing is known of the code.
"""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one run may use. The memory is on top of the bare interpreter's; the output is that of all streams."""

    cpu_seconds: float = 5.0
    wall_seconds: float = 10.0
    memory_bytes: int = 256 * MEBIBYTE
    processes: int = 8
    output_bytes: int = MEBIBYTE
    disk_bytes: int = 16 * MEBIBYTE
    open_files: int = 64

    def __post_init__(self) -> None:
        least = {"memory_bytes": MEBIBYTE, "disk_bytes": 65536, "open_files": 8, "processes": 1, "output_bytes": 1}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value >= least.get(name, 0.001) or value > 1 << 40:
                raise SandboxError(
                    f"the limit {name}={value!r} of a run in the sandbox is out of range: "
                    f"give at least {least.get(name, 0.001)} and at most 2**40"
                )


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, and what it wrote, up to the limit. Nothing in it is to be trusted."""

    reason: Reason
    stdout: str = ""
    stderr: str = ""
    status: int | None = None
    signal: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    value: bytes = b""
    """What the code wrote on descriptor 3: see `run_tests`."""
