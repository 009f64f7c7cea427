"""The parent's side of the zygote: starts, signals and ends processes.

    process = zygote().spawn(target, name="rank 0", output=path)    # target(channel) runs after a few milliseconds
    process.kill()
    process.wait(5.0)                                               # an Exit: "was ended by SIGKILL"

All processes of this interpreter come from one zygote, started at first use and ended with this process, however
that ends.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import cloudpickle
import msgspec

from holdfast.comms.plugins.spec import require
from holdfast.comms.system import forks
from holdfast.comms.transport.liveness import is_stopped
from holdfast.ft.launch.held_directory import private_file
from holdfast.ft.launch.launcher import StartFailed, how_it_ended
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, Exit
from holdfast.ft.processes.remote_calls import CallResult, pack_error, unpack_error
from holdfast.ft.processes.zygote_start import (
    PACKET,
    ULIMIT,
    Boot,
    Exited,
    Preload,
    Ready,
    RequestRefused,
    Spawn,
    StartedZygote,
    early_pid,
    end_untaken,
    start_zygote,
    take_early,
)

_START_TIMEOUT = 180.0
"""Seconds for the first import of torch, which is slow on a cold disk."""

_TAIL = 4000

T = TypeVar("T")
_log = logging.getLogger("holdfast.processes")


class StartedThreads(StartFailed):
    """Importing `module` in the zygote started threads, which a fork would lose."""

    def __init__(self, why: str, module: str) -> None:
        self.module = module
        super().__init__(why)


class ForkedProcess(ChildProcess):
    """A process that the zygote forked."""

    def __init__(
        self, zygote: ZygoteClient, name: str, pid: int, pidfd: int, channel: ProcessChannel, output: Path
    ) -> None:
        super().__init__(name, pid, pidfd, channel, output)
        self._zygote = zygote

    def wait_stopped(self, timeout: float) -> None:
        """Return once the process is stopped (after SIGSTOP) or has ended. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        while self.alive():
            if is_stopped(self.pid):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} (pid {self.pid}) has not stopped after {timeout:.3g} s")
            time.sleep(0.001)

    def _reap(self, deadline: float) -> None:
        self._zygote.hear_of(self, deadline)


class ZygoteClient:
    """A running zygote. One per interpreter: see `zygote()`."""

    def __init__(self, started: StartedZygote) -> None:
        self._lock = threading.RLock()
        self._running: dict[int, ForkedProcess] = {}
        self._asked = 0
        """The number of the last request; what a zygote does unasked at its start has 0."""
        self.has_threads = False
        """Whether an import started threads there: it must fork no more processes."""
        self._preloaded = set(started.modules)
        self._process, self._control, self._log = started.process, started.control, started.log
        try:
            for _ in range(2 if started.modules else 1):
                self._answer(0, time.monotonic() + _START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return self._process.pid

    @property
    def forked(self) -> bool:
        """Whether processes of it may live: it has not reported their ends."""
        return bool(self._running)

    def alive(self) -> bool:
        """False once the zygote has ended and can start no process."""
        return self._process.poll() is None

    def preload(self, *modules: str) -> None:
        """Import modules once, in the zygote, for all processes started from now on.

        Raises `StartFailed` if that fails, `StartedThreads` if a module starts threads on import: `zygote()` is then a
        new one, since a fork loses threads.
        """
        with self._lock:
            new = tuple(module for module in modules if module not in self._preloaded)
            if new:
                self._asked += 1
                self._send(Preload(new, self._asked))
                self._answer(self._asked, time.monotonic() + _START_TIMEOUT)
                self._preloaded.update(new)

    def spawn(
        self,
        target: Callable[[ProcessChannel], None],
        *,
        name: str,
        output: Path,
        threads: int = 1,
        environ: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        """Fork a process that runs `target(channel)`.

        It has this process's directory, `sys.path` and environment (plus `environ`), `threads` torch threads, and
        writes its output to the file `output`. `target` goes over by cloudpickle. Raises `StartFailed`.
        """
        environment = {**os.environ, **(environ or {})}
        boot = Boot(environment, list(sys.path), list(sys.argv), str(Path.cwd()), cloudpickle.dumps(target))
        channel, theirs = ProcessChannel.pair()
        try:
            with theirs, private_file(output, "ab") as log, self._lock:
                self._asked += 1
                self._send(Spawn(threads, self._asked), theirs.fileno(), log.fileno())
                answer, pidfds = self._answer(self._asked, time.monotonic() + 30.0)
                if not pidfds:  # the kernel had no room for it; the process ends, since its channel is closed
                    raise StartFailed(f"{name} cannot be watched: this process has no more file descriptors ({ULIMIT})")
                process = ForkedProcess(self, name, answer.pid, pidfds[0], channel, output)
                self._running[answer.pid] = process
        except BaseException:
            channel.close()
            raise
        try:
            channel.send(boot)
        except (EOFError, TimeoutError) as error:
            failure = StartFailed(f"{name} did not start: {process.epitaph()}")
            process.close()
            raise failure from error
        return process

    def hear_of(self, process: ForkedProcess, deadline: float) -> None:
        """Read reports up to that of the end of `process`, which has ended. Raises `TimeoutError`."""
        with self._lock:
            while self._running.get(process.pid) is process:
                try:
                    report, fds = self._receive(deadline)
                    if not isinstance(report, Exited):
                        self._drop(report, fds)
                except StartFailed:
                    self._running.pop(process.pid).ended(Exit(None))

    def close(self) -> None:
        """End the zygote and all its processes. Idempotent."""
        with self._lock:
            self._control.close()
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10.0)
            self._log.close()

    def forget(self) -> None:
        """Release the zygote of the process that this one was forked from."""
        self._control.close()

    def _send(self, request: Spawn | Preload, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._control.sendmsg([msgspec.msgpack.encode(request)], rights)
        except OSError:
            raise self._lost() from None

    def _answer(self, number: int, deadline: float) -> tuple[Ready, list[int]]:
        """The answer to the request of this number. Answers to earlier ones are there if an exception cut those short.

        Raises `StartFailed`, `StartedThreads`.
        """
        while True:
            try:
                report, fds = self._receive(deadline)
            except TimeoutError:
                self._process.kill()
                raise StartFailed(f"the zygote (pid {self.pid}) did not answer in time") from None
            if isinstance(report, Exited):
                continue
            if report.number != number:
                self._drop(report, fds)
            elif isinstance(report, RequestRefused):
                refused = f"the zygote (pid {self.pid}) refused: {report.reason}"
                if report.threads:
                    self.has_threads = True
                    raise StartedThreads(refused, report.threads)
                raise StartFailed(refused)
            else:
                return report, fds

    def _drop(self, report: Ready | RequestRefused, fds: Sequence[int]) -> None:
        """Deal with an answer that nobody waits for any more: end the process that it may be about."""
        self.has_threads |= isinstance(report, RequestRefused) and bool(report.threads)
        for pidfd in fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    def _receive(self, deadline: float) -> tuple[Ready | RequestRefused | Exited, list[int]]:
        self._control.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data, fds, _, _ = socket.recv_fds(self._control, PACKET, 1)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        if not data:
            raise self._lost()
        report: Ready | RequestRefused | Exited = msgspec.msgpack.decode(data, type=Ready | RequestRefused | Exited)
        if isinstance(report, Exited):
            ended = self._running.pop(report.pid, None)  # a process whose start was cut short is nobody's
            if ended is not None:
                ended.ended(Exit(report.status))
        return report, fds

    def _lost(self) -> StartFailed:
        if self._control.fileno() == -1:
            return StartFailed("the zygote is closed")
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return StartFailed(f"the zygote (pid {self.pid}) hung up")
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()[-_TAIL:]
        return StartFailed(f"the zygote (pid {self.pid}) {how_it_ended(code)}" + (f":\n{text}" * bool(text)))


_shared: ZygoteClient | None = None
_shared_lock = threading.Lock()
_preloading = threading.RLock()
"""Held from the choice of a zygote until it has imported: another thread's import must not be blamed on a module."""
_retired: list[ZygoteClient] = []
"""Zygotes that fork no more processes; those that they have forked may live."""
_imported_by_each: set[str] = set()
"""Modules that start threads on import."""


def zygote() -> ZygoteClient:
    """This interpreter's zygote; a new one if there is none, it has died, or has threads. Raises `StartFailed`."""
    global _shared
    with _shared_lock:
        if _shared is not None and _shared.has_threads:
            _retire(_shared)
            _shared = None
        if _shared is None or not _shared.alive():
            if _shared is not None:
                _shared.close()
            require("the start of a process", "pidfd_open", "pidfd_send_signal")
            _shared = ZygoteClient(take_early() or start_zygote())
        return _shared


def _retire(old: ZygoteClient) -> None:
    """End a zygote that forks no more processes, or keep it while processes of it may live."""
    if old.forked:
        _retired.append(old)
    else:
        old.close()


def zygote_with(*modules: str) -> ZygoteClient:
    """This interpreter's zygote, with the modules imported that start no threads on import. Raises `StartFailed`.

    Each process imports the others itself, which takes it longer; a warning names them once.
    """
    with _preloading:
        while True:
            try:
                source = zygote()  # one that was started early may be refused now
                source.preload(*(module for module in modules if module not in _imported_by_each))
            except StartedThreads as error:
                _imported_by_each.add(error.module)
                _log.warning("%s; each process imports %s itself, and starts later", error, error.module)
            else:
                return source


def inherit_zygote() -> bool:
    """Fork this process's zygote from it, unless it has one. For a fork of a zygote, before it starts threads.

    That takes milliseconds: a zygote in a new interpreter would import again what this process has imported.
    Returns False if there are threads already: a fork would miss what they hold, and `zygote()` starts an interpreter.
    """
    global _shared
    from holdfast.ft.processes.zygote import fork_zygote

    with _shared_lock:
        if _shared is None and (started := fork_zygote()) is not None:
            _shared = ZygoteClient(started)
        return _shared is not None


def zygote_pid() -> int | None:
    """The process id of the zygote; None if there is none."""
    current = _shared
    return early_pid() if current is None else current.pid


def shut_down() -> None:
    """End this interpreter's zygote and every process that came from it. Called at exit; a later use starts anew."""
    global _shared
    with _shared_lock:
        for each in (*_retired, *filter(None, [_shared])):
            each.close()
        _retired.clear()
        _shared = None
    end_untaken()


@forks.run_in_children
def _forget() -> None:
    global _shared, _shared_lock, _preloading
    _shared_lock, _preloading = threading.Lock(), threading.RLock()
    for each in (*_retired, *filter(None, [_shared])):
        each.forget()
    _retired.clear()
    _shared = None
    if (parents := take_early()) is not None:
        parents.control.close()


def call_in_fork(
    function: Callable[[], T], *, name: str, output: Path, timeout: float, preload: Sequence[str] = ()
) -> T:
    """What `function` returns; its process writes its output to the file `output`. It goes over by cloudpickle.

    The zygote imports the modules `preload` first. Raises what `function` raises, `StartFailed` if its process ends
    without an answer, and `TimeoutError`.
    """
    process = zygote_with(*preload).spawn(partial(_answer, function), name=name, output=output)
    try:
        result: CallResult = process.channel.recv(timeout)
    except ChannelClosed as error:
        raise StartFailed(f"{name} ended without an answer: {process.epitaph()}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{name} (pid {process.pid}) did not answer within {timeout:.3g} s") from error
    finally:
        process.close()
    if result.error is not None:
        raise unpack_error(result.error)
    value: T = result.value
    return value


def _answer(function: Callable[[], object], channel: ProcessChannel) -> None:
    try:
        result = CallResult(value=function())
    except Exception as error:
        result = CallResult(error=pack_error(error))
    channel.send(result)


atexit.register(shut_down)
