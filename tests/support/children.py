"""Child processes for tests that kill or stop them: forked from the test, with a pipe to talk over."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from holdfast.ft.processes.remote_calls import unpack_error
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.rank_worker import STACK_SIGNAL
from support.waiting import PROGRAM_SECONDS, becomes_true


@contextmanager
def register_lock(url: str) -> Iterator[None]:
    """Hold the write lock of the register at a sqlite:// URL."""
    other = sqlite3.connect(url.removeprefix("sqlite://"), timeout=PROGRAM_SECONDS, isolation_level=None)
    with closing(other):
        other.execute("BEGIN IMMEDIATE")
        yield


class Child:
    """A process running `body(connection, *args)`. It dies with the test."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = Pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _live(body, theirs, args)
        theirs.close()
        self._gone, self._killing = False, threading.Lock()

    def tell(self, message: Any) -> None:
        self.pipe.send(message)

    def hear(self) -> Any:
        """The next message from the child; fails the test if none comes, with what the child does instead on stderr."""
        if not self.pipe.poll(PROGRAM_SECONDS):
            os.kill(self.pid, STACK_SIGNAL)
            assert self.pipe.poll(1.0), f"child {self.pid} said nothing for {PROGRAM_SECONDS:g} s"
        return self.pipe.recv()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Any thread may call it."""
        with self._killing:
            if not self._gone:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self._gone = True

    def stop(self, register: str = "") -> None:
        """SIGSTOP, and wait until the process has stopped: not amid a change of this register, which it would lock."""
        with register_lock(register) if register else nullcontext():
            os.kill(self.pid, signal.SIGSTOP)
            os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Wait for the body to return; fails the test if it does not, or raised."""
        pidfd = os.pidfd_open(self.pid)
        ended = select.select([pidfd], [], [], PROGRAM_SECONDS)[0]
        os.close(pidfd)
        assert ended, f"child {self.pid} does not end"
        status = os.waitpid(self.pid, 0)[1]
        self._gone = True
        assert status == 0, f"child {self.pid} failed: wait status {status}"


def _live(body: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    status = 1
    try:
        faulthandler.register(STACK_SIGNAL)
        torch.set_num_threads(1)
        body(pipe, *args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


Start = Callable[..., Child]
"""What the fixture `start` is: it starts a child with a body and its arguments."""


@contextmanager
def children() -> Iterator[Start]:
    """A function that starts children, all of them killed on leaving."""
    started: list[Child] = []

    def start(body: Callable[..., None], *args: Any) -> Child:
        started.append(Child(body, *args))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.kill()
            child.pipe.close()


def errors_of(job: Job, processes: Sequence[Any], seconds: float = 30.0) -> list[BaseException | None]:
    """Wait until these processes have ended; the error of each, None for one without an error."""

    def ended() -> bool:
        job._collect(0.05)
        return all(map(job.ended, processes))

    becomes_true(ended, seconds)
    ends = [job._ended.get(process.pid) for process in processes]
    return [None if end is None or end.error is None else unpack_error(end.error) for end in ends]
