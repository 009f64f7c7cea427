"""The bodies of the processes of a cluster, and how functions and results travel to and from them.

A rank under `LocalCluster.run` connects for each call, calls the function, closes and reports. The main thread runs the
functions. A second thread reads the channel, so that an abort gets through while a function is blocked in an op. A
process of a `Job` runs one function under an `ft.Session` that joins by the environment.

Functions of scripts, notebooks and test modules are pickled by value. cloudpickle sends `__main__` by value anyway, and
any other module by name, so that must be importable there: here are found the modules that are not, or that should not
be imported again (test modules).

"""

from __future__ import annotations

import faulthandler
import functools
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle

from holdfast import comms
from holdfast.comms.communicator import Communicator
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.remote_calls import pack_error
from holdfast.harness.cluster.cluster_ranks import Ended

_lock = threading.Lock()


def pickle_by_value(value: Any) -> bytes:
    """Pickle a value for a child process or its parent, with the modules of its contents by value where needed."""
    with _by_value(set(_modules(value))):
        data: bytes = cloudpickle.dumps(value)
    return data


def pickle_result(value: Any) -> bytes:
    """As `pickle_by_value`, for the result of a function. Raises TypeError, saying so, if it cannot be pickled."""
    try:
        return pickle_by_value(value)
    except Exception as error:
        raise TypeError(f"a result must be picklable, this {type(value).__name__} is not: {error}") from error


def _modules(value: Any, depth: int = 3) -> Iterator[str]:
    """The modules that define `value`, its type, and its contents down to `depth`."""
    for thing in (value, type(value)):
        if isinstance(name := getattr(thing, "__module__", None), str):
            yield name
    held: tuple[Any, ...] = ()
    if isinstance(value, functools.partial):
        held = (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        held = tuple(value.values())
    elif isinstance(value, tuple | list | set | frozenset):
        held = tuple(value)
    elif (wrapped := getattr(value, "__wrapped__", None)) is not None:
        held = (wrapped,)
    if depth > 0:
        for item in held:
            yield from _modules(item, depth - 1)


@contextmanager
def _by_value(names: set[str]) -> Iterator[None]:
    modules = [sys.modules[name] for name in names if name in sys.modules and not _importable(sys.modules[name])]
    with _lock:
        new = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in new:
                cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    """Whether a process with our `sys.path` would find this very module, and may import it again."""
    name = module.__name__
    if name == "__main__":
        return True
    leaf = name.rpartition(".")[2]
    if leaf.startswith("test_") or leaf.endswith("_test") or leaf == "conftest":
        return False
    return _found(name, getattr(module, "__file__", None))


@functools.cache
def _found(name: str, file: str | None) -> bool:
    if file is None:
        return True
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path, None)
        if spec is not None:
            return spec.origin == file
    return False


# Ranks ----------------------------------------------------------------------------------------------------------------


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
            return Ended(time.monotonic(), pickle_result(value), number=call.number)
        except BaseException as error:
            return Ended(running.failed_at or time.monotonic(), error=pack_error(error), number=call.number)


def rank_target(rank: int) -> Callable[[ProcessChannel], None]:
    """The target of the process of rank `rank`."""

    def target(channel: ProcessChannel) -> None:
        threading.current_thread().name = f"rank-{rank}"
        RankWorker(channel).run()

    return target


Prepare = Callable[[], Mapping[str, Any] | None]
"""A call that a process makes before its session, while it has no other thread.

It may return options of this process's session. It is pickled.
"""


def session_target(
    body: bytes, options: Mapping[str, Any], prepare: Sequence[Prepare] = ()
) -> Callable[[ProcessChannel], None]:
    """The target of a process: `body` is the pickled (fn, args, kwargs), `options` are those of its `ft.Session`.

    It makes the calls of `prepare` first.
    """

    def target(channel: ProcessChannel) -> None:
        faulthandler.register(STACK_SIGNAL, all_threads=False)
        try:
            own = dict(options)
            for step in prepare:
                own.update(step() or {})
            ended = Ended(time.monotonic(), pickle_result(_in_session(body, own)))
        except BaseException as error:
            ended = Ended(time.monotonic(), error=pack_error(error))
        channel.send(ended, timeout=600.0)

    return target


def _in_session(body: bytes, options: Mapping[str, Any]) -> Any:
    from holdfast.ft import Session

    fn, args, kwargs = cloudpickle.loads(body)
    with Session(**options) as session:
        return fn(session, *args, **kwargs)
