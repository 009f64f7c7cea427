"""`python -m holdfast.rl.engine.monarch_host tcp://10.0.0.2:26600`: offers this host to `MonarchEngine`s elsewhere.

Monarch's host, and a zygote of this host that its procs are forked from. Any client that reaches the address may run
code here: Monarch does not authenticate, so bind it to a trusted network only.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from importlib import import_module

from holdfast.ft.control.loop import LoopThread
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.fork_shim import SOCKET, ForkRequest, ShimServer
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.rl.engine.monarch_calls import exit_code
from holdfast.rl.engine.monarch_worker import become_proc


class HostForks:
    """Forks a process for each shim that Monarch's host starts, and ends the two together."""

    def __init__(self) -> None:
        self._folder = HeldDirectory("holdfast-host-")
        self._processes: dict[str, ForkedProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = ShimServer(self._arrived, self._left)
        self.path = self._server.path

    async def start(self) -> None:
        """Listen for shims."""
        await self._server.start()

    def _arrived(self, request: ForkRequest) -> None:
        task = asyncio.create_task(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: ForkRequest) -> None:
        try:
            spawn = partial(zygote().spawn, become_proc, name=request.token, output=self._folder.path / "actors.log")
            process = await asyncio.to_thread(spawn, environ=request.environ)
        except StartFailed as error:
            print(f"cannot fork: {error}", file=sys.stderr, flush=True)
            request.end(1)
            return
        self._processes[request.token] = process
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(process.pidfd, ended.set)
        await ended.wait()
        loop.remove_reader(process.pidfd)
        request.end(await asyncio.to_thread(exit_code, process))

    def _left(self, token: str) -> None:
        if (process := self._processes.pop(token, None)) is not None:
            process.kill()


def main(address: str) -> None:
    """Serve until this process is ended."""
    zygote().preload("holdfast.rl.engine.actor_host")
    forks, loop = HostForks(), LoopThread("holdfast-host-forks")
    loop.run(forks.start(), 30.0)
    os.environ[SOCKET] = forks.path
    os.environ.setdefault("MONARCH_FILE_LOG", "error")
    actor = import_module("monarch.actor")
    serving = actor.start_worker_loop_forever(ca="trust_all_connections", address=address)
    print(f"serving {address}", flush=True)
    serving.get()


if __name__ == "__main__":
    main(sys.argv[1])
