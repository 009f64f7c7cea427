"""The caller's side of a measurement: starts the workers of a contestant, and calls methods in them."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self, TypeVar

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.files import bind_unix
from holdfast.ft.console.output import tail
from holdfast.ft.launch.guardian import descendants
from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory, private_file
from holdfast.ft.launch.run_report import LATE_SECONDS, whereabouts
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.process_group import kill_group
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote_with
from holdfast.harness.measure.worker import (
    MESSAGES,
    Message,
    MethodRaised,
    MethodReturned,
    WorkerCall,
    WorkerReady,
    say,
    stream_of,
)

T = TypeVar("T")

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
"""Seconds that a worker may take for one call."""
END_SECONDS = 10.0
GONE_SECONDS = 15.0
"""Seconds that what a program started may take to end once the program has: it frees shared memory."""


class WorkerFailed(HoldfastError):
    """A worker ended, did not answer in time, or failed where others did not: the contestant cannot go on."""


class OpFailed(HoldfastError):
    """A call raised alike in all workers that were called, which can go on with others."""


# Processes ------------------------------------------------------------------------------------------------------------


class StartedWorker(Protocol):
    """Something that was started and has workers in it."""

    pid: int

    def alive(self) -> bool: ...

    def close(self, timeout: float) -> None:
        """Wait `timeout` seconds for its end, then kill it; return when all of it is gone."""


class Place:
    """What a group's processes share: a folder with its socket, one in shared memory, an output file."""

    def __init__(self, prefix: str) -> None:
        self._folders = HeldDirectory(prefix), HeldDirectory(prefix, SHARED_MEMORY)
        self.folder, self.shared = (each.path for each in self._folders)
        self.address, self.output = self.folder / "socket", self.folder / "output"

    def close(self) -> None:
        """Remove the folders."""
        for each in self._folders:
            each.close()


def fork(
    place: Place,
    name: str,
    target: Callable[[], object],
    *,
    preload: Sequence[str] = (),
    threads: int = 1,
    environ: Mapping[str, str] | None = None,
) -> ForkedProcess:
    """Fork a process by the zygote; `target` is what it does. `preload` is imported in the zygote, once."""

    def start(channel: ProcessChannel) -> None:
        channel.close()
        target()

    environ = {"HOLDFAST_CHECK": "0", "OMP_NUM_THREADS": str(threads)} | dict(environ or {})
    return zygote_with(*preload).spawn(start, name=name, output=place.output, threads=threads, environ=environ)


class WorkerProgram:
    """A program in a session of its own, and all processes that it starts: mpirun, or one with actors."""

    def __init__(self, place: Place, command: Sequence[str], environ: Mapping[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "HOLDFAST_CHECK"}
        with private_file(place.output, "ab") as stream:
            self._process = subprocess.Popen(
                command,
                env=environment | {"OMP_NUM_THREADS": "1"} | dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, timeout: float) -> None:
        with contextlib.ExitStack() as opened:
            left = []
            for pid in descendants(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    left.append(os.pidfd_open(pid))
                    opened.callback(os.close, left[-1])
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                kill_group(self.pid)
                self._process.wait(GONE_SECONDS)
            deadline = time.monotonic() + GONE_SECONDS
            for pidfd in left:
                if not ends(pidfd, deadline - time.monotonic()):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    ends(pidfd, GONE_SECONDS)


class HeldProcess:
    """The process `pid`, which another process started, under a name. Close it after use.

    Holds a pidfd, so no signal ever hits another process with the same id.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def alive(self) -> bool:
        """False once the process has ended."""
        return self._pidfd is not None and not ends(self._pidfd, 0.0)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)

    def close(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for its end, and release the descriptor. Idempotent."""
        if self._pidfd is not None:
            ends(self._pidfd, timeout)
            os.close(self._pidfd)
            self._pidfd = None


def ends(pidfd: int, timeout: float) -> bool:
    """Whether a process ends within `timeout` seconds."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(1000 * max(0.0, timeout)))


# Workers --------------------------------------------------------------------------------------------------------------


class Worker:
    """One worker. Between calls it sleeps in a read."""

    def __init__(self, connection: socket.socket) -> None:
        """Greet the worker that dialled. Raises `WorkerFailed` if it says nothing."""
        self._connection, self._stream = connection, stream_of(connection)
        self.name = "a worker that has not said who it is"
        try:
            ready = self._receive(5.0)
            assert isinstance(ready, WorkerReady)
            self.pidfd = os.pidfd_open(ready.pid)
        except (WorkerFailed, ProcessLookupError) as error:
            self._hang_up()
            raise WorkerFailed(str(error)) from error
        self.role, self.rank, self.pid, self.cpus, self.detail = (
            ready.role, ready.rank, ready.pid, ready.cpus, ready.detail,
        )  # fmt: skip
        self.name = f"{ready.role} {ready.rank}"

    def fileno(self) -> int:
        """The descriptor, readable once there is an answer."""
        return self._connection.fileno()

    def send(self, method: str, *arguments: object) -> None:
        """Begin a call; `answer` ends it. Raises `WorkerFailed`."""
        encoded = tuple(msgspec.Raw(msgspec.json.encode(each)) for each in arguments)
        try:
            say(self._stream, WorkerCall(method, encoded))
        except OSError as error:
            raise WorkerFailed(f"{self.name} is gone: {error}") from error

    def answer(self, into: type[T], timeout: float = ANSWER_SECONDS) -> T:
        """What the method returned.

        Raises NotImplementedError if the library has no such op, `OpFailed` if the method raised, `WorkerFailed`.
        """
        return _value(self.receive(timeout), into)

    def receive(self, timeout: float) -> MethodReturned | MethodRaised:
        """The answer as it came. Raises `WorkerFailed`."""
        answer = self._receive(timeout)
        assert not isinstance(answer, WorkerReady)
        return answer

    def _receive(self, timeout: float) -> Message:
        try:
            self._connection.settimeout(max(0.001, timeout))
            line = self._stream.readline()
        except TimeoutError:
            raise WorkerFailed(f"{self.name} did not answer within {timeout:.3g} s") from None
        except OSError as error:
            raise WorkerFailed(f"{self.name} is gone: {error}") from error
        if not line.endswith(b"\n"):
            raise WorkerFailed(f"{self.name} ended")
        return MESSAGES.decode(line)

    def kill(self) -> None:
        """SIGKILL; never hits another process with the same pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def dismiss(self) -> None:
        """Let the worker end: it closes its library when nothing more can come."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._hang_up()
        os.close(self.pidfd)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


def _value(answer: MethodReturned | MethodRaised, into: type[T]) -> T:
    if isinstance(answer, MethodRaised):
        raise (NotImplementedError if answer.unmeasured else OpFailed)(answer.text)
    return msgspec.json.decode(answer.value, type=into)


def call(
    workers: Sequence[Worker], method: str, *arguments: object, into: type[T], timeout: float = ANSWER_SECONDS
) -> list[T]:
    """Call a method in several workers at once; what they returned, in their order.

    Raises NotImplementedError with the library's words if it has no such op, `OpFailed` if it raised in all of them,
    `WorkerFailed` if a worker ended, failed alone, or did not answer within `timeout` seconds.
    """
    for worker in workers:
        worker.send(method, *arguments)
    return answers(workers, method, into, timeout)


def answers(workers: Sequence[Worker], method: str, into: type[T], timeout: float = ANSWER_SECONDS) -> list[T]:
    """The results of a call that was sent to several workers; raises as `call`, once one is gone."""
    deadline, found = time.monotonic() + timeout, dict[Worker, MethodReturned | MethodRaised]()
    with selectors.DefaultSelector() as waiting:
        for worker in workers:
            waiting.register(worker, selectors.EVENT_READ, worker)
        while waiting.get_map():
            ready = waiting.select(deadline - time.monotonic())
            if not ready:
                raise WorkerFailed(f"{method}: no answer within {timeout:.3g} s")
            for key, _ in ready:
                found[key.data] = key.data.receive(5.0)
                waiting.unregister(key.fileobj)
    raised = [answer for answer in found.values() if isinstance(answer, MethodRaised)]
    if raised and len(raised) < len(workers):
        raise WorkerFailed(f"{method}: {raised[0].text}")
    return [_value(found[worker], into) for worker in workers]


# Groups ---------------------------------------------------------------------------------------------------------------


class WorkerGroup:
    """The running workers of one contestant, sorted by role and rank. A context manager that ends them.

    `start(place)` starts the processes in which `count` workers serve at `place.address`.
    """

    def __init__(
        self,
        contestant: str,
        count: int,
        start: Callable[[Place], Sequence[StartedWorker]],
        timeout: float = START_SECONDS,
    ) -> None:
        """Return when all workers are ready. Raises `WorkerFailed`, with their last words, if they do not come."""
        self.contestant = contestant
        self.workers: list[Worker] = []
        self.place = Place("holdfast-measure-")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._started: list[StartedWorker] = []
        try:
            bind_unix(self._listener, self.place.address)
            self._listener.listen(64)
            self.add(count, start, timeout)
        except BaseException:
            self.close(gently=False)
            raise

    @property
    def detail(self) -> str:
        """The library and its version."""
        return self.workers[0].detail

    def call(self, method: str, *arguments: object, into: type[T], timeout: float = ANSWER_SECONDS) -> list[T]:
        """Call a method in all workers; see `call`. A failure is told with the last words of the processes."""
        try:
            return call(self.workers, method, *arguments, into=into, timeout=timeout)
        except WorkerFailed as error:
            raise WorkerFailed(f"{self.contestant}: {error}: {self._last_words()}") from error

    def add(
        self, count: int, start: Callable[[Place], Sequence[StartedWorker]], timeout: float = START_SECONDS
    ) -> list[Worker]:
        """Start processes with `count` more workers, and return these. Raises `WorkerFailed` if they do not come."""
        deadline, late = time.monotonic() + timeout, time.monotonic() + LATE_SECONDS
        started = list(start(self.place))
        self._started += started
        come: list[Worker] = []
        self._listener.settimeout(0.1)
        while len(come) < count:
            if time.monotonic() > late:
                late = float("inf")
                self._name_missing(count, come, started)
            if not all(each.alive() for each in started):
                raise WorkerFailed(f"{self.contestant} ended while starting: {self._last_words()}")
            if time.monotonic() > deadline:
                raise WorkerFailed(f"{self.contestant} did not start in time: {self._last_words()}")
            with contextlib.suppress(TimeoutError, WorkerFailed):  # one that died right after dialling: see `alive`
                come.append(Worker(self._listener.accept()[0]))
                self.workers = sorted([*self.workers, come[-1]], key=lambda worker: (worker.role, worker.rank))
        return come

    def replace(self, worker: Worker, start: Callable[[Place], Sequence[StartedWorker]]) -> Worker:
        """Kill a worker and start another one in its place."""
        worker.kill()
        worker.close()
        self.workers.remove(worker)
        for each in [each for each in self._started if each.pid == worker.pid]:
            each.close(0.0)
            self._started.remove(each)
        (new,) = self.add(1, start)
        return new

    def close(self, gently: bool = True) -> None:
        """End all workers: let them end first if `gently`, then SIGKILL those that still run. Idempotent."""
        for worker in self.workers:
            worker.dismiss() if gently else worker.kill()
        deadline = time.monotonic() + (END_SECONDS if gently else 0.0)
        for worker in self.workers:
            if not ends(worker.pidfd, deadline - time.monotonic()):
                worker.kill()
            worker.close()
        for each in self._started:
            each.close(max(0.0, deadline - time.monotonic()))
        self.workers, self._started = [], []
        self._listener.close()
        self.place.close()

    def _name_missing(self, count: int, come: Sequence[Worker], started: Sequence[StartedWorker]) -> None:
        """Print to stderr how many workers have not come after a while, and what the processes do."""
        there = [worker.pid for worker in come]
        lines = [
            f"{self.contestant}: after {LATE_SECONDS:.0f} s {len(come)} of {count} workers have come; "
            f"{self._last_words()}"
        ]
        pids = [pid for each in started for pid in (each.pid, *descendants(each.pid)) if pid not in there]
        sys.stderr.write("\n".join([*lines, *(f"  pid {pid} {whereabouts(pid)}" for pid in pids)]) + "\n")

    def _last_words(self) -> str:
        text = tail(self.place.output)
        return text.splitlines()[-1] if text else "it said nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        self.close(gently=error is None)
