"""Forks a zygote from a process that is a fork of a zygote itself, and so has torch imported."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from holdfast.comms.system.forks import replace_by_dev_null
from holdfast.ft.processes.zygote import Zygote, other_threads
from holdfast.ft.processes.zygote_start import StartedZygote

_log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.5
"""Seconds that joined threads have to be gone."""


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
