"""The limits of a run, and the watch from outside that reads what it writes, and ends it.

What the code does is a result, no error; the errors are those of the sandbox itself.

Stops: floods of output, endless loops and sleeps, and many processes that share out what one may not take.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.rl.environments.sandbox.inside.template import STARTED


class SandboxError(HoldfastError):
    """The sandbox was used in a way that cannot work."""


class SandboxUnavailable(SandboxError):
    """This machine does not allow the walls of the sandbox; nothing was executed."""

    def __init__(self, missing: str, hint: str) -> None:
        self.missing, self.hint = missing, hint
        super().__init__(f"the sandbox cannot run on this machine: {missing}; {hint}")


_SWITCHES = (
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def unavailable(step: str, number: int) -> SandboxUnavailable:
    """The error for a step of the set-up that failed, with what would allow it."""
    missing = f"{step} failed: {os.strerror(number)}"
    if number == errno.ENOSYS:
        return SandboxUnavailable(missing, "it needs Linux 5.14 or later")
    for path, off, command in _SWITCHES:
        with suppress(OSError):
            if Path(path).read_text().strip() == off:
                return SandboxUnavailable(missing, f"as root, allow user namespaces: {command}")
    return SandboxUnavailable(
        missing,
        "in a container, allow user namespaces and mounts (docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --cap-add SYS_ADMIN), or run it outside of the container",
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
    """What the code wrote on descriptor 3."""


@dataclass(frozen=True, slots=True)
class ForkedRun:
    """A run that has begun: its first process."""

    pid: int
    pidfd: OwnedDescriptor


SETUP_TIMEOUT = 30.0
"""Seconds until the run's walls must stand; its own time begins then."""

END_TIMEOUT = 30.0
"""Seconds that the kernel may take to end killed processes."""

_LOOK_EVERY = 0.02
_AT_ONCE = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of all processes; memory of those that live."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0


def usage(first: int, spent: dict[tuple[int, str], int]) -> Usage:
    """The sum over a run's first process and its descendants.

    `spent` has the ticks of each process at the last look. They stay there once it has ended: of a child whose end the
    code ignores the kernel keeps no time. The memory leaves out what each process has from the template: as much as the
    first process, which only waits.
    """
    ticks, sizes = 0, list[int]()
    todo = [first]
    while todo:
        pid = todo.pop()
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent[pid, fields[19]] = sum(map(int, fields[11:13]))
            ticks += sum(map(int, fields[11:15]))
            sizes.append(_memory(pid))
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
    base = sizes[0] if sizes else 0
    ticks = max(ticks, sum(spent.values()))
    return Usage(ticks / _TICKS, sum(max(0, size - base) for size in sizes))


def _memory(pid: int) -> int:
    """Anonymous and shared memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024


@dataclass(slots=True)
class Streams:
    """The reading ends of a run's pipes."""

    stdout: int
    stderr: int
    value: int
    report: int


@dataclass(slots=True)
class RunWatch:
    """Reads and limits one run until all of its processes are gone."""

    run: ForkedRun
    limits: Limits
    streams: Streams
    texts: dict[int, bytearray] = field(default_factory=dict)
    used: Usage = field(default_factory=Usage)
    spent: dict[tuple[int, str], int] = field(default_factory=dict)
    room: int = 0
    flooded: bool = False
    ended_by: Reason | None = None
    started: float | None = None

    def result(self) -> SandboxResult:
        """Wait for the end. Raises SandboxUnavailable if the inner walls could not be put up."""
        began = time.monotonic()
        self._follow(began)
        seconds = time.monotonic() - (self.started or began)
        report = self._report()
        if "failed" in report:
            raise unavailable(str(report["failed"]), int(report["errno"]))
        status = report.get("status")
        code = None if status is None else os.waitstatus_to_exitcode(status)
        cpu = max(self.used.cpu_seconds, float(report.get("cpu_seconds", 0.0)))
        stderr = self._text(self.streams.stderr)
        return SandboxResult(
            reason=self.ended_by or self._reason(code, cpu, stderr),
            stdout=self._text(self.streams.stdout),
            stderr=stderr,
            status=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            seconds=float(report.get("seconds", seconds)),
            cpu_seconds=cpu,
            value=bytes(self.texts[self.streams.value]),
        )

    def _follow(self, began: float) -> None:
        """Read all pipes until the first process is gone; kill the run at a limit.

        The ends of the pipes prove nothing: another thread of the job may have forked a child that holds copies.
        """
        self.room = self.limits.output_bytes
        streams = self.streams
        poll = select.poll()
        poll.register(self.run.pidfd, select.POLLIN)
        for fd in (streams.stdout, streams.stderr, streams.value, streams.report):
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
            self.texts[fd] = bytearray()
        look, deadline = began + _LOOK_EVERY, began + SETUP_TIMEOUT
        while True:
            now = time.monotonic()
            ready = [fd for fd, _ in poll.poll(max(0.0, min(look, deadline) - now) * 1000.0 + 1.0)]
            if self.run.pidfd in ready:
                self._read_the_rest()
                return
            for fd in ready:
                if self._read(fd) == b"":
                    poll.unregister(fd)
            now = time.monotonic()
            if self.started is None and self.texts[streams.report].startswith(STARTED):
                self.started, deadline = now, now + self.limits.wall_seconds
            if self.ended_by is not None:
                if now >= deadline:
                    return
                continue
            if now >= look:
                look = now + _LOOK_EVERY
                self.used = usage(self.run.pid, self.spent) if self.started is not None else self.used
            if reason := self._limit_reached(now >= deadline):
                self._kill(reason)
                look = deadline = now + END_TIMEOUT

    def _read_the_rest(self) -> None:
        for fd in self.texts:
            while self._read(fd):
                pass
        if self.flooded and self.ended_by is None:
            self.ended_by = "output"

    def _limit_reached(self, late: bool) -> Reason | None:
        if late:
            return "timeout" if self.started is not None else "lost"
        if self.flooded:
            return "output"
        if self.used.cpu_seconds > self.limits.cpu_seconds:
            return "timeout"
        if self.used.memory_bytes > self.limits.memory_bytes:
            return "memory"
        return None

    def _kill(self, reason: Reason) -> None:
        self.ended_by = reason
        self.used = usage(self.run.pid, self.spent)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.run.pidfd, signal.SIGKILL)

    def _read(self, fd: int) -> bytes | None:
        """Read what is there, and keep what there is room for. Empty at the end of the stream, None if nothing came."""
        try:
            part = os.read(fd, _AT_ONCE)
        except BlockingIOError:
            return None
        if fd == self.streams.report:
            self.texts[fd] += part
        elif self.ended_by is None:
            self.flooded |= len(part) > self.room
            self.texts[fd] += part[: self.room]
            self.room -= min(self.room, len(part))
        return part

    def _report(self) -> dict[str, Any]:
        """What the run's first process said at its end; nothing if it was killed before."""
        text = bytes(self.texts[self.streams.report]).removeprefix(STARTED)
        with suppress(ValueError, RecursionError):
            return dict(json.loads(text))
        return {}

    def _text(self, fd: int) -> str:
        return self.texts[fd].decode(errors="replace")

    def _reason(self, code: int | None, cpu: float, stderr: str) -> Reason:
        if code is None:  # the first process is ours, and the code cannot reach it
            return "lost"
        if code == -signal.SIGSYS:
            return "refused"
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= 0.9 * self.limits.cpu_seconds):
            return "timeout"
        if code < 0:
            return "killed"
        if code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            return "memory"
        return "error" if code else "ok"
