"""Run Python that is not to be trusted: every run behind walls of its own, forked from one warm template.

Stops: a run that changes the program or the input of another one, since both are sealed.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from types import TracebackType
from typing import Self

import msgspec

from holdfast.comms.system.file_io import write_all
from holdfast.rl.environments.sandbox.inside.execute import encode
from holdfast.rl.environments.sandbox.limits import Limits, SandboxError, SandboxResult
from holdfast.rl.environments.sandbox.template_process import ForkedRun, TemplateDied, TemplateProcess
from holdfast.rl.environments.sandbox.watch import RunWatch, Streams

_SEALED = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def program_of(code: str, function: str = "", arguments: tuple[object, ...] = ()) -> str:
    """What a run executes: code, and perhaps the call of a function. Its value is encoded on descriptor 3."""
    module = "solution" if function else "__main__"
    return json.dumps({"code": code, "module": module, "function": function, "arguments": encode(arguments)})


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
        """Execute `code` as a program. Returns how it ended, whatever it did."""
        return self.run_program(program_of(code), stdin, limits or Limits())

    def run_program(self, program: str, stdin: str, limits: Limits) -> SandboxResult:
        """Execute a program. If the template dies while it runs the reason is "lost"; the next run has a new one."""
        ours, theirs = list[int](), list[int]()
        try:
            for text in (program, stdin):
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


def run_python(
    code: str, stdin: str = "", limits: Limits | None = None, *, sandbox: Sandbox | None = None
) -> SandboxResult:
    """Execute code in a sandbox; without one, in a new one that costs its start."""
    if sandbox is not None:
        return sandbox.run(code, stdin, limits)
    with Sandbox() as new:
        return new.run(code, stdin, limits)
