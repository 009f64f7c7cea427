"""The bodies of the processes of a cluster: a rank under `LocalCluster.run`, and a process of a `Job`.

A rank connects for each call, calls the function, closes and reports. The main thread runs the functions. A second
thread reads the channel, so that an abort gets through while a function is blocked in an op. A process of a job runs
one function under an `ft.Session` that joins by the environment.
"""

from __future__ import annotations

import faulthandler
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from holdfast import comms
from holdfast.comms.communicator import Communicator
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.remote_calls import pack_error
from holdfast.harness.cluster import pickling
from holdfast.harness.cluster.cluster_ranks import Ended

STACK_SIGNAL = signal.SIGUSR2
"""The signal on which a process writes the stack of its main thread to its output."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """The request to call `fn(comm, *args, **kwargs)`; `body` is the pickled (fn, args, kwargs).

    `link` has the arguments of `holdfast.comms.connect`.
    """

    number: int
    link: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class Abort:
    """The request to abort the communicator of call `number`."""

    number: int
    reason: str


class Running:
    """A running call, and its communicator once connected."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.failed_at: float | None = None
        self._lock = threading.Lock()
        self._comm: Communicator | None = None
        self._reason: str | None = None

    def connected(self, comm: Communicator) -> None:
        with self._lock:
            self._comm = comm
            if self._reason is not None:
                comm.abort(self._reason)

    def abort(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            if self._comm is not None:
                self._comm.abort(reason)


def call_connected(
    link: Mapping[str, Any], running: Running, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Connect, call `fn`, close. Records the time of a failure before closing, which other ranks notice."""
    with comms.connect(**link) as comm:
        running.connected(comm)
        try:
            return fn(comm, *args, **kwargs)
        except BaseException:
            running.failed_at = time.monotonic()
            raise


class RankWorker:
    """One rank: serves calls until the parent closes the channel."""

    def __init__(self, channel: ProcessChannel) -> None:
        self._channel = channel
        self._calls: queue.SimpleQueue[CallRequest | None] = queue.SimpleQueue()
        self._running = Running(-1)

    def run(self) -> None:
        threading.Thread(target=self._listen, name="holdfast-rank-control", daemon=True).start()
        while (call := self._calls.get()) is not None:
            self._running = Running(call.number)
            self._channel.send(self._answer(call, self._running), timeout=600.0)

    def _listen(self) -> None:
        try:
            while True:
                message: CallRequest | Abort = self._channel.recv()
                if isinstance(message, CallRequest):
                    self._calls.put(message)
                elif message.number == self._running.number:
                    self._running.abort(message.reason)
        except ChannelClosed:
            self._calls.put(None)

    def _answer(self, call: CallRequest, running: Running) -> Ended:
        try:
            fn, args, kwargs = cloudpickle.loads(call.body)
            value = call_connected(call.link, running, fn, args, kwargs)
            return Ended(time.monotonic(), pickling.dumps_result(value), number=call.number)
        except BaseException as error:
            return Ended(running.failed_at or time.monotonic(), error=pack_error(error), number=call.number)


def rank_target(rank: int) -> Callable[[ProcessChannel], None]:
    """The target of the process of rank `rank`."""

    def target(channel: ProcessChannel) -> None:
        threading.current_thread().name = f"rank-{rank}"
        RankWorker(channel).run()

    return target


def session_target(
    body: bytes, options: Mapping[str, Any], prepare: Callable[[], Mapping[str, Any] | None] | None = None
) -> Callable[[ProcessChannel], None]:
    """The target of a process: `body` is the pickled (fn, args, kwargs), `options` are those of its `ft.Session`.

    It calls `prepare` first, while it has no other thread; that may return further options, of this process alone.
    """

    def target(channel: ProcessChannel) -> None:
        faulthandler.register(STACK_SIGNAL, all_threads=False)
        try:
            own = prepare() if prepare is not None else None
            ended = Ended(time.monotonic(), pickling.dumps_result(_in_session(body, {**options, **(own or {})})))
        except BaseException as error:
            ended = Ended(time.monotonic(), error=pack_error(error))
        channel.send(ended, timeout=600.0)

    return target


def _in_session(body: bytes, options: Mapping[str, Any]) -> Any:
    from holdfast.ft import Session

    fn, args, kwargs = cloudpickle.loads(body)
    with Session(**options) as session:
        return fn(session, *args, **kwargs)
