"""Run Python that is not to be trusted, each run behind walls of its own, forked from one warm template.

The template is started once, asked for runs, and replaced when it is gone.

Stops: a run that changes the program or the input of another one, since both are sealed.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from holdfast.comms.system.files import OwnedDescriptor, write_all
from holdfast.rl.environments.sandbox.inside import seccomp
from holdfast.rl.environments.sandbox.limits import (
    ForkedRun,
    Limits,
    RunWatch,
    SandboxError,
    SandboxResult,
    SandboxUnavailable,
    Streams,
    unavailable,
)

START_TIMEOUT: Final = 60.0
FORK_TIMEOUT: Final = 30.0
"""Seconds that the template may take to fork a run, on a machine that is busy."""

_FOLDER = Path(__file__).resolve().parent
_BOOTSTRAP = """
import sys, types
for name in ("holdfast", "holdfast.rl", "holdfast.rl.environments", sys.argv[1]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[2]]
from holdfast.rl.environments.sandbox.inside.template import main
main(int(sys.argv[3]), int(sys.argv[4]))
"""
"""Imports the modules of `inside` by their names, without the packages above them, which load torch."""


class TemplateDied(Exception):
    """The template process is gone, or does not answer."""


class TemplateProcess:
    """A running template. One thread at a time may use it. Raises SandboxUnavailable if the walls cannot stand."""

    def __init__(self) -> None:
        if sys.platform != "linux" or os.uname().machine not in seccomp.AUDIT:
            raise SandboxUnavailable(
                f"it is built of Linux namespaces on {' and '.join(seccomp.AUDIT)}", "run it on such a machine"
            )
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = os.pidfd_open(os.getpid())
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _BOOTSTRAP),
                    *(__package__, str(_FOLDER), str(theirs.fileno()), str(job)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
                cwd="/",
                pass_fds=(theirs.fileno(), job),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(job)
        self.pid = self._process.pid
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        self._channel.settimeout(START_TIMEOUT)
        try:
            answer = self._channel.recv(4096)
        except OSError as error:
            raise SandboxUnavailable(
                f"its template process did not start ({error})", "look for a machine without memory or processors left"
            ) from error
        if not answer:
            raise SandboxUnavailable(
                f"its template process ended with status {self._process.wait()}",
                f"see what `{sys.executable} -S -c 'import json'` says",
            )
        if found := json.loads(answer):
            raise unavailable(str(found["failed"]), int(found["errno"]))

    def fork(self, limits: dict[str, float], fds: Sequence[int]) -> ForkedRun:
        """Begin a run that owns copies of the descriptors. Raises TemplateDied."""
        self._channel.settimeout(FORK_TIMEOUT)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        received = array.array("i")
        try:
            self._channel.sendmsg([json.dumps(limits).encode()], rights)
            answer, ancillary, _, _ = self._channel.recvmsg(256, socket.CMSG_SPACE(4))
            for _, _, packed in ancillary:
                received.frombytes(packed)
            return ForkedRun(int(answer), OwnedDescriptor(received[0]))
        except (OSError, ValueError, IndexError) as error:
            raise TemplateDied(str(error) or "it closed its socket") from error

    def close(self) -> None:
        """Kill the template; the kernel kills all of its runs."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


_SEALED = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Sandbox:
    """A template process and its runs. Any number of threads may run code at once; `close` ends everything.

    Raises SandboxUnavailable where the machine does not allow the walls. There is no weaker way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._template: TemplateProcess | None = TemplateProcess()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The template process; None while it is being replaced."""
        template = self._template
        return template.pid if template else None

    def close(self) -> None:
        """End the template and all runs."""
        with self._lock:
            self._closed = True
            if self._template is not None:
                self._template.close()
                self._template = None

    def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
        """Execute `code` as a program. Returns how it ended, whatever it did.

        If the template dies while it runs the reason is "lost"; the next run has a new one.
        """
        limits = limits or Limits()
        ours, theirs = list[int](), list[int]()
        try:
            for text in (code, stdin):
                theirs.append(_sealed_file(text))
            for _ in Streams.__slots__:
                reading, writing = os.pipe()
                ours.append(reading)
                theirs.append(writing)
            try:
                run = self._fork(limits, theirs)
            except TemplateDied:
                return SandboxResult(reason="lost", stderr="the template process of the sandbox died")
            try:
                while theirs:
                    os.close(theirs.pop())
                return RunWatch(run, limits, Streams(*ours)).result()
            finally:
                run.pidfd.close()
        finally:
            for fd in (*ours, *theirs):
                os.close(fd)

    def _fork(self, limits: Limits, fds: list[int]) -> ForkedRun:
        with self._lock:
            if self._closed:
                raise SandboxError("this Sandbox is closed: make a new one")
            if self._template is None:
                self._template = TemplateProcess()
            try:
                return self._template.fork(msgspec.structs.asdict(limits), fds)
            except TemplateDied:
                self._template.close()
                self._template = None
                raise


def _sealed_file(text: str) -> int:
    """A file in memory that no process can change."""
    fd = os.memfd_create("holdfast-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(fd, text.encode(errors="replace"))
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALED)
    return fd
