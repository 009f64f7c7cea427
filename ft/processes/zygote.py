"""The process that imports torch and holdfast once, then forks processes in milliseconds.

`python -m holdfast.ft.processes.zygote FD`: its parent talks to it over the inherited sequenced-packet socket FD
(see `holdfast.ft.processes.zygote_client`). It stays single-threaded and runs no torch op, so that a fork of it is
as good as a fresh interpreter. A fork of a zygote can fork one from itself (`fork_zygote`). Nothing is left behind:

- if the parent ends, in whatever way, the zygote sees it by pidfd or socket, kills all children and ends;
- if the zygote ends, in whatever way, the kernel kills the children;
- if a child ends, the zygote kills the rest of its process group, reaps it, and tells the parent how it ended.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import cloudpickle
import msgspec
import torch

from holdfast.comms.system.forks import replace_by_dev_null
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.process_group import end_group
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
    die_with_parent,
)

_BOOT_TIMEOUT = 60.0

_log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.5
"""Seconds that joined threads have to be gone."""


def other_threads() -> list[str]:
    """The names that the kernel has for the threads of this process beside the main one."""
    names = []
    for each in Path("/proc/self/task").iterdir():
        if each.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                names.append((each / "comm").read_text().strip())
    return names


class Zygote:
    """The loop: requests in, forks and exit reports out."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.epoll()
        self._children: dict[int, int] = {}  # pidfd -> pid
        credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        parent: int = struct.unpack("3i", credentials)[0]
        self._parent = os.pidfd_open(parent)
        if os.getppid() != parent:
            raise SystemExit("the parent is gone")
        self._poll.register(control, select.EPOLLIN)
        self._poll.register(self._parent, select.EPOLLIN)

    def run(self) -> None:
        """Serve until the parent is gone or has closed its end; then leave no child behind."""
        try:
            while self._step():
                pass
        finally:
            for pidfd in tuple(self._children):
                self._end(pidfd)

    def preload(self, modules: tuple[str, ...], number: int = 0) -> None:
        """Import `modules` and answer; refuse to go on if that started threads, which a fork would lose."""
        gc.disable()  # imports make little garbage, and looking for it takes a part of their time
        try:
            if (refused := self._imported(modules, number)) is not None:
                self._report(refused)
                return
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()
        self._report(Ready(number=number))

    def _imported(self, modules: tuple[str, ...], number: int) -> RequestRefused | None:
        """Import modules; the answer that says why this stopped, if it did."""
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception:
                return RequestRefused(f"importing {module}:\n{traceback.format_exc()[-8000:]}", number=number)
            if names := other_threads():
                return RequestRefused(f"importing {module} started threads: {', '.join(names)}", module, number)
        return None

    def _step(self) -> bool:
        for fd, _ in self._poll.poll():
            if fd == self._parent:
                return False
            if fd in self._children:
                self._report(self._end(fd))
            elif not self._request():
                return False
        return True

    def _request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, PACKET, 2)
        if not data:
            return False
        request: Spawn | Preload = msgspec.msgpack.decode(data, type=Spawn | Preload)
        if isinstance(request, Preload):
            self.preload(request.modules, request.number)
            return True
        try:
            if len(fds) == 2:
                self._spawn(request, *fds)
            else:  # the kernel drops those for which there is no room
                self._report(RequestRefused(f"it has no more file descriptors ({ULIMIT})", number=request.number))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _spawn(self, request: Spawn, channel: int, output: int) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(RequestRefused(f"cannot fork: {error}", number=request.number))
            return
        if pid == 0:
            self._become(request, channel, output, zygote)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._report(RequestRefused(f"cannot watch what it forked: {error}", number=request.number))
            return
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.EPOLLIN)
        self._report(Ready(pid, request.number), pidfd)

    def _become(self, request: Spawn, channel: int, output: int, zygote: int) -> NoReturn:
        """Run the child, from the fork to its end."""
        status = 1
        try:
            os.setpgid(0, 0)
            die_with_parent(zygote)
            for fd in (*self._children, self._parent):
                os.close(fd)
            self._poll.close()
            self._control.close()
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.enable(all_threads=False)
            _live(ProcessChannel(socket.socket(fileno=channel)), request.threads)
            status = 0
        except ChannelClosed:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _end(self, pidfd: int) -> Exited:
        """Kill the child and what is left of its process group, and reap it."""
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        end_group(pid)
        os.close(pidfd)
        return Exited(pid, status)

    def _report(self, report: Ready | RequestRefused | Exited, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._control.sendmsg([msgspec.msgpack.encode(report)], rights)
        except (BrokenPipeError, ConnectionResetError):
            pass


def _live(channel: ProcessChannel, threads: int) -> None:
    """Set up the process as the first message says, and run its target."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    boot: Boot = channel.recv(_BOOT_TIMEOUT)
    os.environ.clear()
    os.environ.update(boot.environ)
    os.chdir(boot.directory)
    sys.path[:] = boot.path
    sys.argv[:] = boot.argv
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    torch.set_num_threads(threads)
    try:
        cloudpickle.loads(boot.target)(channel)
    finally:
        atexit._run_exitfuncs()


def main(fd: int) -> None:
    """Import the modules that every process needs, answer, serve."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    zygote = Zygote(control)
    zygote.preload(("torch.distributed", "holdfast.comms.communicator"))
    zygote.run()
    os._exit(0)


class ForkedZygote:
    """The zygote as its parent sees it. Safe to use from several threads."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._reaping = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        with self._reaping:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def wait(self, timeout: float) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired` if it still runs after `timeout` seconds."""
        if (code := self.poll()) is not None:
            return code
        pidfd = os.pidfd_open(self.pid)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(timeout * 1000)
        finally:
            os.close(pidfd)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("the zygote", timeout)
        return code

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with self._reaping:
            if self._code is None:
                os.kill(self.pid, 9)


def fork_zygote() -> StartedZygote | None:
    """Fork a zygote; None if this process has several threads. It has nothing open of what this process has."""
    if names := _settled_threads():
        _log.info("no zygote is forked from process %d: it has the threads %s", os.getpid(), ", ".join(names))
        return None
    log = tempfile.TemporaryFile()  # noqa: SIM115
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        _serve(theirs, log.fileno())
    theirs.close()
    return StartedZygote(ForkedZygote(pid), control, log)


def _settled_threads() -> list[str]:
    """The threads beside the main one. One that was joined is listed for a moment more."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (names := other_threads()) and time.monotonic() <= deadline:
        time.sleep(0.001)
    return names


def _serve(control: socket.socket, log: int) -> NoReturn:
    """Be the zygote, from the fork to the end."""
    status = 1
    try:
        os.setsid()
        for standard in (1, 2):
            os.dup2(log, standard)
        listed = list(Path("/proc/self/fd").iterdir())  # with the descriptor of the listing, which is closed now
        inherited = [int(each.name) for each in listed if each.is_symlink()]
        replace_by_dev_null(number for number in inherited if number not in (1, 2, control.fileno()))
        zygote = Zygote(control)
        zygote.preload(())
        zygote.run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
