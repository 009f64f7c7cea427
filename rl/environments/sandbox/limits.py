"""The limits of a run, and how it ended."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.rl.environments.sandbox.errors import SandboxError

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
