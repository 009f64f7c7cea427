"""Actors in processes of their own: endpoints, the handle of one, its host, the engine in use, and `LocalEngine`.

A request is a packed recipe (the first one, which makes the actor), a packed call, or empty: a ping. What carries it is
the engine's. The end of the process is seen beside that, and ends all calls in flight.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import os
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import start_time, this_host
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.detectors.process_watch import ProcessWatch, fatal_signal, oldest_threads
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.launcher import StartFailed, how_it_ended
from holdfast.ft.membership.view import Member
from holdfast.ft.processes.channel import ChannelClosed, FramedSocket, ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, ExecutedProcess, spawned
from holdfast.ft.processes.remote_calls import (
    CallResult,
    MethodCall,
    ObjectRecipe,
    pack,
    pack_error,
    unpack,
    unpack_error,
)
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.rl.actors.errors import (
    ActorDied,
    ActorProcessLost,
    ActorStartFailed,
    EndpointFailed,
    EndpointTimeout,
    NoEngine,
    NoSuchEndpoint,
)

F = TypeVar("F", bound=Callable[..., Any])
OnExit = Callable[[str], None]
"""Called in the event loop with how a process ended, in words; `STOPPED` if `stop` ended it."""

STOPPED = "was stopped"
START_SECONDS = 600.0
"""Seconds in which an actor must be made; its constructor may load a model: as long as vLLM gives its own engine."""

_ATTRIBUTE = "__holdfast_endpoint__"
_PING = "(ping)"
_REAP_SECONDS = 15.0


def endpoint(*, idempotent: bool = False) -> Callable[[F], F]:
    """Declare a method: an `idempotent` call may be done twice, so it is tried elsewhere when its process ends."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, idempotent)
        return method

    return mark


_known: dict[tuple[type[Any], str], bool] = {}


def is_idempotent(kind: type[Any], name: str) -> bool:
    """Whether an endpoint, a public method of an actor's class, was declared so. Raises `NoSuchEndpoint`."""
    if (kind, name) not in _known:
        if not _is_endpoint(kind, name):
            raise NoSuchEndpoint(kind.__name__, name, tuple(each for each in dir(kind) if _is_endpoint(kind, each)))
        _known[kind, name] = getattr(getattr(kind, name), _ATTRIBUTE, False)
    return _known[kind, name]


def _is_endpoint(kind: type[Any], name: str) -> bool:
    return not name.startswith("_") and inspect.isfunction(inspect.getattr_static(kind, name, None))


@dataclass(frozen=True, slots=True)
class ActorOrder:
    """An actor to be started; see `Engine.start`. `forget` is called when nothing is left of its process."""

    name: str
    kind: type[Any]
    on_exit: OnExit | None
    environ: Mapping[str, str]
    python: str | None
    host: str
    forget: Callable[[ActorProcess], None]


class ActorProcess(ABC):
    """A process with an actor in it.

    An actor's class may have a static method `remove_left`, which removes the files of processes of it that have ended.
    """

    def __init__(self, order: ActorOrder, pid: int) -> None:
        self.name, self.pid = order.name, pid
        self.host = order.host
        """The address of its host; empty for this one."""
        self._kind, self._on_exit, self._forget = order.kind, order.on_exit, order.forget
        self._calls: dict[asyncio.Future[bytes], str] = {}
        self._how = ""
        self._made = self._stopping = False
        self._released = asyncio.Event()
        self._releasing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """False once its end was seen."""
        return not self._how

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a public method of the actor. Sync methods run one at a time, async ones beside each other.

        Raises `ActorDied` as soon as the process has ended, `EndpointTimeout` after `timeout` seconds,
        `EndpointFailed` if the method raised, `NoSuchEndpoint`.
        """
        is_idempotent(self._kind, method)  # it exists
        return self._value(method, await self._ask(method, pack(MethodCall(method, args, kwargs)), timeout))

    async def ping(self, timeout: float) -> tuple[int, int]:
        """The process and its start time, whatever its methods do. Raises `ActorDied`, `EndpointTimeout`."""
        pid, started = map(int, (await self._ask(_PING, b"", timeout)).split())
        return pid, started

    async def stop(self, timeout: float = 10.0) -> None:
        """Call the actor's method `close` once, if it has one; after `timeout` seconds kill. Idempotent."""
        deadline = time.monotonic() + timeout
        first, self._stopping = not self._stopping, True
        if first:  # another stop waits for this one: the process must not leave in the middle of a second `close`
            try:
                if self.alive and self._made and callable(getattr(self._kind, "close", None)):
                    with contextlib.suppress(ActorProcessLost, EndpointFailed):  # whatever comes of it, it ends next
                        await self.call("close", timeout=timeout)
            finally:
                self._leave()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._released.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(_REAP_SECONDS):
                await self._released.wait()

    async def make(self, recipe: bytes) -> None:
        """Make the actor from its packed `ObjectRecipe`. Raises `ActorStartFailed`."""
        try:
            self._value("__init__", await self._ask("__init__", recipe, START_SECONDS))
        except EndpointTimeout:
            raise ActorStartFailed(self.name, f"it is not made after {START_SECONDS:.3g} s") from None
        except EndpointFailed as error:
            raise ActorStartFailed(self.name, f"{error.summary}\n\n{error.trace}") from error.__cause__
        except ActorDied:
            pass  # the next line says how
        if self._how:
            raise ActorStartFailed(self.name, self._how)
        self._made = True

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL; no effect if the process is gone."""

    @abstractmethod
    def _send(self, request: bytes, answer: asyncio.Future[bytes]) -> None:
        """Send a request, and have `answer` be done with what the process says."""

    def _leave(self) -> None:
        """Have the process end, as it has nothing left to do."""
        self.kill()

    @abstractmethod
    async def _release(self) -> None:
        """Release what is held for the process, which has ended."""

    async def _ask(self, method: str, request: bytes, timeout: float | None) -> bytes:
        if self._how:
            raise ActorDied(self.name, self.pid, self._how, method)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[answer] = method
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                self._send(request, answer)
                return await answer
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EndpointTimeout(self.name, self.pid, method, timeout or 0.0) from None
        finally:
            del self._calls[answer]

    def _value(self, method: str, answer: bytes) -> Any:
        found: CallResult = unpack(answer)
        if found.error is None:
            return found.value
        error = EndpointFailed(self.name, method, found.error.summary, found.error.trace)
        raise error from unpack_error(found.error)

    def _died(self, how: str) -> None:
        """Record the end of the process: fail all calls, tell it once, release what is left."""
        if self._how:
            return
        self._how = STOPPED if self._stopping else how
        for answer, method in self._calls.items():
            if not answer.done():
                answer.set_exception(ActorDied(self.name, self.pid, self._how, method))
        if self._made and self._on_exit is not None:
            self._on_exit(self._how)
        self._releasing = asyncio.create_task(self._end())

    async def _end(self) -> None:
        try:
            await self._release()
            if not self.host and (remove_left := getattr(self._kind, "remove_left", None)) is not None:
                await asyncio.to_thread(remove_left)
        finally:
            self._released.set()
            self._forget(self)


class Engine(ABC):
    """Starts actors in processes of their own. Used in one event loop; a context manager that ends them all.

    Processes write to `logs`, by name; the default is a directory that `close` removes. `preload` names modules to
    import in the zygote.
    """

    def __init__(self, logs: Path | None = None, preload: tuple[str, ...] = ()) -> None:
        self._own: HeldDirectory | None = None
        if logs is None:
            self._own = HeldDirectory("holdfast-actors-")
            logs = self._own.path
        self._logs = logs
        self._preload = preload
        self._processes: set[ActorProcess] = set()
        self._on_host_away: list[Callable[[str], None]] = []
        self._token: Token[Engine] | None = None

    async def start(
        self,
        name: str,
        actor: type[Any],
        /,
        *args: Any,
        on_exit: OnExit | None = None,
        environ: Mapping[str, str] | None = None,
        python: str | None = None,
        host: str | None = None,
        **kwargs: Any,
    ) -> ActorProcess:
        """Make `actor(*args, **kwargs)` in a process of its own, with `environ` on top of this one's environment.

        `python` is another interpreter to run it, which must have holdfast; `host` the address of another host.
        `on_exit` is called once, however the process ends. Raises `ActorStartFailed`.
        """
        recipe = pack(ObjectRecipe(actor, args, kwargs))
        order = ActorOrder(name, actor, on_exit, environ or {}, python, host or "", self._processes.discard)
        try:
            found = await self._process(order)
        except StartFailed as error:
            raise ActorStartFailed(name, str(error)) from error
        self._processes.add(found)
        try:
            await found.make(recipe)
        except BaseException:
            found.kill()
            await asyncio.shield(found.stop(0.0))
            raise
        return found

    @abstractmethod
    async def _process(self, order: ActorOrder) -> ActorProcess:
        """A new process without its actor. Raises `StartFailed`, `ActorStartFailed`."""

    def on_host_away(self, told: Callable[[str], None]) -> None:
        """Call `told` in the event loop with a host, as `this_host` is there, that is away from now on."""
        self._on_host_away.append(told)

    def host_identity(self, host: str) -> str:
        """What `this_host` is on the host with this address; empty if it was never reached."""
        return "" if host else this_host()

    async def close(self) -> None:
        """End all processes. Idempotent."""
        await asyncio.gather(*[each.stop() for each in tuple(self._processes)])
        if self._own is not None:
            self._own.close()

    def _spawn(
        self, order: ActorOrder, body: Callable[[ProcessChannel], None], program: str, environ: Mapping[str, str]
    ) -> ChildProcess:
        """A fork that runs `body`, or the order's own interpreter with the module `program`. Raises `StartFailed`."""
        output = self._logs / f"{order.name}.log"
        if order.python is None:
            source = zygote_with(body.__module__, *self._preload)
            return source.spawn(body, name=order.name, output=output, environ=environ)
        return ExecutedProcess([order.python, "-P", "-m", program], name=order.name, output=output, environ=environ)

    async def __aenter__(self) -> Self:
        self._token = _current.set(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        await self.close()


_current: ContextVar[Engine] = ContextVar("engine")


def current_engine() -> Engine:
    """The engine of the innermost `async with`. Raises `NoEngine`."""
    try:
        return _current.get()
    except LookupError:
        raise NoEngine("none is in use here: name one (engine=...), or work in `async with engine:`") from None


def process_of(pid: int, *, threads: bool = False) -> Member:
    """A process of this host as `ProcessWatch` follows it; with `threads`, once it has those that stay.

    The kernel reports the threads of a killed process at once, and the process itself only when its memory is freed,
    up to 190 ms later.
    """
    started = 0  # of one that is gone: the watch says so
    with contextlib.suppress(OSError):
        started = start_time(pid)
    return Member(str(threads), "", Peer(this_host(), pid, started), oldest_threads(pid) if threads else ())


def how_killed(pid: int) -> str:
    """By which signal a process is ending; "" if by none."""
    number = fatal_signal(pid)
    return f"process {pid} {how_it_ended(-number)}" if number else ""


class Child:
    """A process that this one spawned; `died` says how it ends, before it is reaped.

    `ended` gets its exit code then, negative for a signal.
    """

    def __init__(self, process: ChildProcess, ended: Callable[[int], None] = lambda code: None) -> None:
        self.pid, self.kill = process.pid, process.kill
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reaped = asyncio.Event()
        self._process, self._ended = process, ended
        self._reaping: asyncio.Task[None] | None = None
        self._watch = ProcessWatch(self._died)
        self._watch.follow([process_of(self.pid)])

    def follow_threads(self) -> None:
        """See its end at the first thread that ends, from now on."""
        self._watch.follow([process_of(self.pid, threads=True)])

    def _died(self, deaths: object) -> None:
        if self._reaping is None:
            # Of one whose memory is still being freed. One that has ended is reaped at once, and its output says more.
            if self._process.alive() and (how := how_killed(self.pid)):
                self.died.set_result(how)
            self._reaping = asyncio.create_task(self._reap())

    async def _reap(self) -> None:
        code = None
        while code is None:  # the kernel may take 100 ms more to free its memory, or long for that of a device
            with contextlib.suppress(TimeoutError):
                code = await asyncio.to_thread(self._exit_code)
        self._watch.close()
        if not self.died.done():
            self.died.set_result(self._process.epitaph())
        self._ended(code)
        self.reaped.set()

    def _exit_code(self) -> int:
        status = self._process.wait(_REAP_SECONDS).status
        self._process.close()
        return 1 if status is None else os.waitstatus_to_exitcode(status)


class OwnProcess(ActorProcess):
    """A child of this process."""

    def __init__(self, order: ActorOrder, child: Child) -> None:
        super().__init__(order, child.pid)
        self._child = child

    async def make(self, recipe: bytes) -> None:
        """See `ActorProcess.make`."""
        self._child.died.add_done_callback(lambda died: self._died(died.result()))
        await super().make(recipe)
        self._child.follow_threads()

    def kill(self) -> None:
        """See `ActorProcess.kill`."""
        self._child.kill()

    async def _release(self) -> None:
        await self._child.reaped.wait()


class ActorHost:
    """Runs an actor in its process. Async methods run in an event loop, sync ones one at a time in a thread.

    Every failure is an answer.
    """

    def __init__(self) -> None:
        self._loop = LoopThread("actor-loop")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "actor")
        self._identity = f"{os.getpid()} {start_time(os.getpid())}".encode()
        self._asked = False
        self._actor: Any = None

    def answer(self, request: bytes | memoryview) -> concurrent.futures.Future[bytes]:
        """The answer to a request, when there is one. It never has an exception."""
        if not request:
            return _done(self._identity)
        if not self._asked:
            self._asked = True
            return self._thread.submit(_packed, partial(self._make, bytes(request)))
        try:
            call: MethodCall = unpack(request)
            method = getattr(self._actor, call.method)
        except BaseException as error:
            return _done(pack(CallResult(error=pack_error(error))))
        do = partial(method, *call.args, **(call.kwargs or {}))
        if inspect.iscoroutinefunction(method):
            return asyncio.run_coroutine_threadsafe(_packed_async(do), self._loop.loop)
        return self._thread.submit(_packed, do)

    def _make(self, recipe: bytes) -> None:
        found: ObjectRecipe = unpack(recipe)
        self._actor = found.make()


def _packed(do: Callable[[], Any]) -> bytes:
    try:
        return pack(CallResult(do()))
    except BaseException as error:
        return pack(CallResult(error=pack_error(error)))


async def _packed_async(do: Callable[[], Any]) -> bytes:
    try:
        return pack(CallResult(await do()))
    except BaseException as error:
        return pack(CallResult(error=pack_error(error)))


def _done(answer: bytes) -> concurrent.futures.Future[bytes]:
    done: concurrent.futures.Future[bytes] = concurrent.futures.Future()
    done.set_result(answer)
    return done


_NUMBER = struct.Struct("<Q")
"""The length of a frame, and the number of a call, which its request and its answer begin with."""

_SEND_SECONDS = 600.0


class LocalProcess(OwnProcess):
    """A child of this process, on a socket pair."""

    def __init__(
        self, order: ActorOrder, child: Child, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        super().__init__(order, child)
        reader, self._writer = streams
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self._reading = asyncio.create_task(self._read(reader))

    def _send(self, request: bytes, answer: asyncio.Future[bytes]) -> None:
        number = next(self._numbers)
        self._answers[number] = answer
        answer.add_done_callback(lambda _: self._answers.pop(number))
        self._writer.writelines((_NUMBER.pack(_NUMBER.size + len(request)), _NUMBER.pack(number), request))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # it is ending: the watch will say how
            while True:
                (length,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
                (number,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
                found = await reader.readexactly(length - _NUMBER.size)
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(found)

    def _leave(self) -> None:
        self._writer.close()  # it ends once it has run its exit functions

    async def _release(self) -> None:
        self._writer.transport.abort()
        self._reading.cancel()
        await super()._release()


class LocalEngine(Engine):
    """Starts actors in processes of this host; see `Engine`."""

    async def _process(self, order: ActorOrder) -> LocalProcess:
        if order.host:
            raise StartFailed(f"the local engine reaches no host {order.host!r}: use the Monarch engine")
        process = await spawned(partial(self._spawn, order, serve_actor, __name__, order.environ))
        child = Child(process)
        try:
            streams = await asyncio.open_unix_connection(sock=process.channel.detach())
        except BaseException:
            child.kill()
            await asyncio.shield(child.reaped.wait())
            raise
        return LocalProcess(order, child, streams)


def serve_actor(channel: ProcessChannel) -> None:
    """Answer the numbered requests of the parent until it closes its end: the body of a child of `LocalEngine`."""
    frames, host = FramedSocket(channel.detach()), ActorHost()
    with contextlib.suppress(ChannelClosed):
        while True:
            frame = memoryview(frames.receive())
            number, request = bytes(frame[: _NUMBER.size]), frame[_NUMBER.size :]
            host.answer(request).add_done_callback(partial(_answer, frames, number))


def _answer(frames: FramedSocket, number: bytes, answer: Future[bytes]) -> None:
    try:
        frames.send(number + answer.result(), _SEND_SECONDS)
    except ChannelClosed:
        pass
    except TimeoutError:  # part of it may be sent: no later answer could be read
        os._exit(1)


if __name__ == "__main__":
    serve_actor(ProcessChannel(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)
