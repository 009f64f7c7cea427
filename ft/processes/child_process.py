"""Handles of child processes: those that the zygote forks, and programs in interpreters of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.plugins.spec import require
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.ft.console.output import tail
from holdfast.ft.launch.held_directory import private_file
from holdfast.ft.launch.launcher import StartFailed, how_it_ended
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.process_group import end_group, kill_group


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. `status` is the wait status; None if it was lost with the zygote, which kills."""

    status: int | None

    @property
    def signal(self) -> int | None:
        """The signal that ended it, or None."""
        if self.status is None:
            return signal.SIGKILL
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None

    def __str__(self) -> str:
        return how_it_ended(-signal.SIGKILL if self.status is None else os.waitstatus_to_exitcode(self.status))


class ChildProcess(ABC):
    """A child with a channel to this process. Safe to use from several threads, but for its `channel`."""

    def __init__(self, name: str, pid: int, pidfd: int, channel: ProcessChannel, output: Path) -> None:
        self.name, self.pid, self.pidfd, self.channel, self.output = name, pid, OwnedDescriptor(pidfd), channel, output
        self._exit: Exit | None = None
        self._closing = threading.Lock()
        self._closed = False

    def alive(self) -> bool:
        """False once the process has ended."""
        return self._exit is None and not self._gone(0.0)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended. Never hits another process with the same pid."""
        with self._closing:
            if not self._closed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)

    def wait(self, timeout: float) -> Exit:
        """How the process ended. Raises `TimeoutError` if it has not after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if self._exit is None and not self._gone(timeout):
            raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout:.3g} s")
        while self._exit is None:
            self._reap(deadline + 5.0)
        return self._exit

    def ended(self, exit_: Exit) -> None:
        """Record how the process ended."""
        self._exit = exit_

    def epitaph(self) -> str:
        """How the process ended, and the end of its output."""
        text = f"process {self.pid} {self.wait(5.0)}"
        if last := tail(self.output):
            text += f"; the end of its output:\n{last}"
        return text

    def close(self, timeout: float = 0.0) -> None:
        """Kill the process if it still runs after `timeout` seconds, and close its descriptors. Idempotent."""
        if self._closed:
            return
        if timeout:
            self._gone(timeout)
        self.kill()
        self.wait(10.0)
        with self._closing:
            if not self._closed:
                self._closed = True
                self.pidfd.close()
                self.channel.close()

    @abstractmethod
    def _reap(self, deadline: float) -> None:
        """Call `ended` for the process, which has ended. Raises `TimeoutError`."""

    def _gone(self, timeout: float) -> bool:
        if self._closed:
            return True
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(timeout * 1000))


class ExecutedProcess(ChildProcess):
    """A program that gets a channel to this process as the inherited descriptor that its last argument names."""

    def __init__(self, command: Sequence[str], *, name: str, output: Path, environ: Mapping[str, str]) -> None:
        require(f"the start of {name}", "pidfd_open", "pidfd_send_signal")
        channel, theirs = ProcessChannel.pair()
        try:
            with theirs, private_file(output, "ab") as log:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environ},
                    start_new_session=True,
                )
        except OSError as error:
            channel.close()
            raise StartFailed(f"{name} did not start: {error}") from error
        super().__init__(name, self._process.pid, os.pidfd_open(self._process.pid), channel, output)

    def kill(self) -> None:
        """SIGKILL, to its whole process group but Python's resource trackers, which then clean up and end."""
        if self._process.returncode is None:
            kill_group(self.pid)

    def _reap(self, deadline: float) -> None:
        """Its group ends with it."""
        reaped = self._process.returncode is not None  # then its number may be another group's
        code = self._process.wait(max(0.0, deadline - time.monotonic()))
        if not reaped:
            end_group(self.pid)
        self.ended(Exit(-code if code < 0 else code << 8))


async def spawned(spawn: Callable[[], ChildProcess]) -> ChildProcess:
    """The process that `spawn` gives, which runs in a thread. Raises `StartFailed`.

    A caller that is cancelled meanwhile leaves no process behind.
    """
    spawning = asyncio.ensure_future(asyncio.to_thread(spawn))
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        with contextlib.suppress(StartFailed):
            await asyncio.to_thread((await spawning).close)
        raise
