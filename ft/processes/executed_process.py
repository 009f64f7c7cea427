"""A child in an interpreter of its own, with the same handle as one that the zygote forked; either of them, spawned."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.comms.plugins.kernel_calls import require
from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.ft.launch.held_directory import private_file
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.process_group import end_group, kill_group
from holdfast.ft.processes.zygote_client import Exit, ForkedProcess, epitaph_of


class ExecutedProcess:
    """A program that gets a channel to this process as the inherited descriptor that its last argument names."""

    def __init__(self, command: Sequence[str], *, name: str, output: Path, environ: Mapping[str, str]) -> None:
        require(f"the start of {name}", "pidfd_open", "pidfd_send_signal")
        self.name, self.output = name, output
        self.channel, theirs = ProcessChannel.pair()
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
            self.channel.close()
            raise StartFailed(f"{name} did not start: {error}") from error
        self.pid = self._process.pid
        self.pidfd = OwnedDescriptor(os.pidfd_open(self.pid))
        self._closed = False

    def kill(self) -> None:
        """SIGKILL, to its whole process group but Python's resource trackers, which then clean up and end."""
        if self._process.returncode is None:
            kill_group(self.pid)

    def wait(self, timeout: float) -> Exit:
        """How the process ended; its group ends with it. Raises `TimeoutError` if it lives after `timeout` seconds."""
        poller = select.poll()
        if not self._closed:
            poller.register(self.pidfd, select.POLLIN)
            if not poller.poll(timeout * 1000):
                raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout:.3g} s")
        reaped = self._process.returncode is not None  # then its number may be another group's
        code = self._process.wait(timeout)
        if not reaped:
            end_group(self.pid)
        return Exit(-code if code < 0 else code << 8)

    def epitaph(self) -> str:
        """How the process ended, and the end of its output."""
        return epitaph_of(self.pid, self.wait(5.0), self.output)

    def close(self) -> None:
        """Kill the process if it still runs, and close its descriptors. Idempotent."""
        if self._closed:
            return
        self.kill()
        self.wait(10.0)
        self._closed = True
        self.pidfd.close()
        self.channel.close()


ChildProcess = ForkedProcess | ExecutedProcess


async def spawned(spawn: Callable[[], ChildProcess]) -> ChildProcess:
    """The process that `spawn` gives, which runs in a thread. Raises `StartFailed`."""
    spawning = asyncio.ensure_future(asyncio.to_thread(spawn))
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        try:
            await asyncio.to_thread((await spawning).close)
        except StartFailed:
            pass
        raise
