"""A child process whose guardian ends all its descendants when it or this process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import IO

from holdfast.ft.launch import guardian

END_SECONDS = 10.0


class GuardedProcess:
    """Runs `command` with the environment `environ`; `output` reads its stdout and stderr.

    `pidfd` becomes readable once the command and all its descendants have ended; then call `reap`.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._status, said = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(said), *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                process_group=0,
                pass_fds=(said,),
            )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(said)
        assert self._guardian.stdout is not None
        self.output: IO[bytes] = self._guardian.stdout
        self.pidfd = os.pidfd_open(self._guardian.pid)
        self.returncode: int | None = None
        """The return code as in `subprocess`; None while the command runs."""

    @cached_property
    def pid(self) -> int:
        """The command's process id; the guardian's if it died before it could report that."""
        return int(self._line() or self._guardian.pid)

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
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(int(status)) if status and pid else code
        return self.returncode

    def _line(self) -> str:
        """The next line that the guardian writes; "" at its end."""
        line = b""
        while not line.endswith(b"\n") and (more := os.read(self._status, 1)):
            line += more
        return line.decode().strip()
