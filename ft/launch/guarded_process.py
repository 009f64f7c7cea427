"""A child process with a guardian, which ends all its descendants when it or this process ends."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, BinaryIO

from holdfast.comms.plugins.kernel_calls import require
from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.ft.launch import guardian
from holdfast.ft.launch.held_directory import private_file

END_SECONDS = 10.0


class GuardedProcess:
    """Runs `command` with the environment `environ`; `output` reads its stdout and stderr.

    With a `log`, its output goes to that file, `output` is None, and it outlives this process. `pidfd` becomes readable
    once the command and all its descendants have ended; then call `reap`.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path | None = None) -> None:
        with contextlib.ExitStack() as files:
            into = subprocess.PIPE if log is None else files.enter_context(private_file(log, "ab"))
            self._start(command, environ, into, "tied" if log is None else "detached")

    def _start(self, command: Sequence[str], environ: Mapping[str, str], into: int | BinaryIO, how: str) -> None:
        require("the start of a process", "pidfd_open")
        status, said = os.pipe()
        self._status = OwnedDescriptor(status)
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(said), how, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=into,
                stderr=subprocess.STDOUT,
                bufsize=0,
                process_group=0,
                pass_fds=(said,),
            )
        except BaseException:
            self._status.close()
            raise
        finally:
            os.close(said)
        self.output: IO[bytes] | None = self._guardian.stdout
        self.began = time.monotonic()
        self.pidfd = OwnedDescriptor(os.pidfd_open(self._guardian.pid))
        self.returncode: int | None = None
        """The return code as in `subprocess`; None while the command runs."""

    @cached_property
    def pid(self) -> int:
        """The command's process id; the guardian's if it died before it could report that."""
        return int(self._line() or self._guardian.pid)

    @property
    def started(self) -> bool:
        """Whether the guardian has started the command, so that `pid` does not wait for it."""
        return "pid" in self.__dict__ or bool(select.select([self._status], [], [], 0)[0])

    def signal(self, number: int) -> None:
        """Send a signal (one of `guardian.FORWARDED`) to the command's process group."""
        if self.returncode is None:
            self._guardian.send_signal(number)

    def reap(self) -> int:
        """End the command, if it runs, and all its descendants; returns its return code. Idempotent."""
        if self.returncode is None:
            pid = self.pid
            self._guardian.send_signal(guardian.END)
            try:
                code = self._guardian.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._guardian.kill()
                code = self._guardian.wait()
            status = self._line()
            self._status.close()
            self.returncode = os.waitstatus_to_exitcode(int(status)) if status and pid else code
        return self.returncode

    def _line(self) -> str:
        """The next line that the guardian writes; "" at its end."""
        line = b""
        while not line.endswith(b"\n") and (more := os.read(self._status, 1)):
            line += more
        return line.decode().strip()
