"""`python -m holdfast.rl.actors.monarch_host tcp://10.0.0.2:26600`: offers this host to `MonarchEngine`s elsewhere.

Under `srun` the word `slurm` stands for the address of this node.

It has a zygote that Monarch's procs are forked from. At the address engines are told the port of Monarch's host, which
is another one after each start: Monarch reaches no second process where a first one has ended. Any client that reaches
it may run code here: Monarch does not authenticate, so bind it to a trusted network only.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from holdfast.comms.errors import HoldfastError
from holdfast.ft.control.event_loop import BoundedListener, Departure, LoopThread
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.launch.process_proxies import ProcessProxy, ProxyServer
from holdfast.ft.launch.proxy_program import VARIABLE
from holdfast.ft.listen_address import address_of, local_addresses
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, spawned
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.ft.schedulers import WORD, own_slurm_host
from holdfast.rl.actors.engine import Child

PRELOAD = "HOLDFAST_ACTOR_PRELOAD"
"""The variable with the modules, separated by commas, that the zygote of a host imports before it forks an actor."""

GREETING = "holdfast-monarch-host 1 "
_LONGEST = 512


Spawn = Callable[[ProcessProxy], ChildProcess]
"""Starts the process of a proxy, in a thread. Raises `StartFailed`."""


class Forks:
    """Forks a process for each proxy that Monarch starts on this host, and ends the two together.

    `spawn` is for proxies that nothing expects; without it they are refused.
    """

    def __init__(self, spawn: Spawn | None = None) -> None:
        self._spawn = spawn
        self._expected: dict[str, tuple[Spawn, asyncio.Future[Child]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = ProxyServer(self._arrived)
        self.path = self._server.path

    def expect(self, token: str, spawn: Spawn) -> asyncio.Future[Child]:
        """The process of the proxy with this token, or its `StartFailed`; cancel it to refuse the proxy."""
        expected: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._expected[token] = spawn, expected
        expected.add_done_callback(lambda _: self._expected.pop(token))
        return expected

    async def start(self) -> None:
        """Listen for proxies."""
        await self._server.start()

    async def close(self) -> None:
        """Listen no more; proxies that still wait end."""
        await self._server.close()
        await asyncio.gather(*self._tasks)

    def _arrived(self, proxy: ProcessProxy) -> None:
        task = asyncio.create_task(self._serve(proxy))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, proxy: ProcessProxy) -> None:
        spawn, expected = self._expected.get(proxy.token, (self._spawn, None))
        if spawn is None:
            proxy.end(1)
            return
        try:
            child = Child(await spawned(partial(spawn, proxy)), proxy.end)
        except StartFailed as error:
            proxy.end(1)
            if expected is not None and not expected.done():
                expected.set_exception(error)
            return
        if expected is not None and expected.done():
            child.kill()
        elif expected is not None:
            expected.set_result(child)
        await proxy.gone.wait()  # Monarch killed it, or it was told to end together with the process
        child.kill()


def become_proc(channel: ProcessChannel) -> None:
    """Turn a fork of the zygote into a Monarch proc, as Monarch's own bootstrap command does.

    Its environment says which. The zygote itself never imports Monarch, which starts threads.
    """
    channel.close()
    sys.argv[:] = ["bootstrap_main"]
    bootstrap = import_module("monarch._src.actor.bootstrap_main")
    with contextlib.suppress(ImportError):
        # Made under "forkserver", this lock is a named semaphore, which outlives a process that is killed.
        import_module("tqdm").tqdm.get_lock()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        bootstrap.invoke_main()
    except SystemExit as ended:
        if ended.code:
            raise


def listen_on(address: str) -> None:
    """Have what Monarch serves in this process listen on an address of this host, at ports that the kernel picks."""
    import_module("monarch.actor").enable_transport(f"tcp://{address}:0")


def environment_of(address: str) -> dict[str, str]:
    """The variables by which the processes of this host listen on it. Raises `NoSuchInterface`, ValueError."""
    available = local_addresses()
    own = address_of(urlsplit(address).hostname or "", available)
    interface = next(each.interface for each in available if str(each.address) == own)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {"HOLDFAST_INTERFACE": own, **{name: os.environ.get(name, interface) for name in names}}


def main(address: str, serving: Callable[[str], object] = lambda line: print(line, flush=True)) -> None:
    """Serve until this process is ended. `serving` is called once it does. Raises `NotUnderSlurm`, `HoldfastError`."""
    if WORD.fullmatch(address):
        address = own_slurm_host(address)
    os.environ.update(environment_of(address))
    place = urlsplit(address)
    zygote_with(__name__)
    folder = HeldDirectory("holdfast-host-")
    forks, loop = Forks(partial(_fork, folder.path / "actors.log")), LoopThread("holdfast-host-forks")
    loop.run(forks.start(), 30.0)
    os.environ[VARIABLE] = forks.path
    os.environ.setdefault("MONARCH_FILE_LOG", "error")
    listen_on(os.environ["HOLDFAST_INTERFACE"])
    with ReservedPort(os.environ["HOLDFAST_INTERFACE"]) as free:  # Monarch binds it beside this socket
        at = f"tcp://{place.netloc.rpartition(':')[0]}:{free.number}"
        hosting = import_module("monarch.actor").start_worker_loop_forever(ca="trust_all_connections", address=at)
        listener = BoundedListener(lambda: _Greeter(f"{GREETING}{at}\n", listener), most=256, seconds=10.0)
        try:
            loop.run(listener.start(place.hostname or "", place.port or 0), 30.0)
        except OSError as error:
            why = f"host {address} cannot be served: {error}; end what listens there, or choose another port"
            raise HoldfastError(why) from error
        serving(f"serving {address}")
        hosting.get()


def _fork(output: Path, proxy: ProcessProxy) -> ChildProcess:
    source = zygote_with(*filter(None, proxy.environ.get(PRELOAD, "").split(",")))
    try:
        return source.spawn(become_proc, name=proxy.token, output=output, environ=proxy.environ)
    except StartFailed as error:
        print(f"cannot fork: {error}", file=sys.stderr, flush=True)
        raise


class _Greeter(asyncio.Protocol):
    """Tells one client a text, and closes the connection."""

    def __init__(self, text: str, listener: BoundedListener) -> None:
        self._text, self._listener = text, listener
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._text.encode())
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.admit(self)

    def turn_away(self, why: Departure) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()


async def whereabouts(address: str) -> str:
    """The address of Monarch's host, as `address` tells it. Raises OSError, ValueError for another program's answer."""
    place = urlsplit(address)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=_LONGEST)
    try:
        said = (await reader.readline()).decode(errors="replace")
    finally:
        writer.close()
    if not said:
        raise ConnectionError(f"{address} closed the connection")
    if not said.startswith(GREETING) or not re.fullmatch(r"tcp://\S+:\d+", at := said.removeprefix(GREETING).strip()):
        raise ValueError(f"{address} is no monarch_host of holdfast: it says {said[:80]!r}")
    return at


if __name__ == "__main__":  # by its name, as what is pickled here is of that module
    import_module("holdfast.rl.actors.monarch_host").main(sys.argv[1])
