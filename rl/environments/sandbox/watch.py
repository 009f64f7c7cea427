"""Watch one run from outside: read what it writes, within bounds, and end it at its limits.

Stops: floods of output, endless loops and sleeps, and many processes that share out what one may not take.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.rl.environments.sandbox.inside.run import STARTED
from holdfast.rl.environments.sandbox.limits import Limits, Reason, SandboxResult
from holdfast.rl.environments.sandbox.template_process import ForkedRun, unavailable

SETUP_TIMEOUT = 30.0
"""Seconds until the run's walls must stand; its own time begins then."""

END_TIMEOUT = 30.0
"""Seconds that the kernel may take to end killed processes."""

_LOOK_EVERY = 0.02
_AT_ONCE = 1 << 16


_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of all processes that live or were waited for; memory of those that live."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0


def usage(first: int) -> Usage:
    """The sum over a run's first process and its descendants; those that end meanwhile count for nothing.

    The memory leaves out what each process has from the template: as much as the first process, which only waits.
    """
    ticks, sizes = 0, list[int]()
    todo = [first]
    while todo:
        pid = todo.pop()
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            sizes.append(_memory(pid))
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
    base = sizes[0] if sizes else 0
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
                self.used = usage(self.run.pid) if self.started is not None else self.used
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
        self.used = usage(self.run.pid)
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
        with suppress(ValueError):
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
