"""Calls of an actor by Monarch's messages, whatever sees the end of its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Awaitable
from typing import Any

from holdfast.ft.processes.spawning import ChildProcess
from holdfast.rl.engine.calls_in_flight import MADE, CallsInFlight
from holdfast.rl.engine.engine import OnExit

_log = logging.getLogger(__name__)
_STOP_SECONDS = 5.0
_REAP_SECONDS = 15.0


class MonarchCalls(CallsInFlight):
    """Base of handles of actors in Monarch procs of one process."""

    def __init__(self, name: str, kind: type[Any], pid: int, host: str, on_exit: OnExit | None, procs: Any) -> None:
        super().__init__(name, kind, pid, host, on_exit)
        self._procs = procs
        self._body: Any = None
        self._gone = asyncio.Event()
        self._carrying: set[asyncio.Task[None]] = set()

    async def stop(self, timeout: float = 10.0) -> None:
        """See `ActorProcess.stop`. Monarch takes 20 s to stop a process that does not answer, so kill it first."""
        await self._close_actor(timeout)
        self.kill()
        async with asyncio.timeout(_REAP_SECONDS):
            await self._gone.wait()

    async def _make(self, recipe: bytes, timeout: float) -> None:
        from holdfast.rl.engine.monarch_actor import MonarchBody

        made = self._waiting[MADE] = asyncio.get_running_loop().create_future()
        self._body = self._procs.spawn(plain_name(self.name), MonarchBody, recipe)
        self._carry(MADE, self._body.make.call_one())
        await self._until_made(made, timeout)

    def _send(self, number: int, request: bytes) -> None:
        self._carry(number, self._body.call.call_one(request) if request else self._body.ping.call_one())

    def _carry(self, number: int, answer: Awaitable[bytes]) -> None:
        task = asyncio.create_task(self._take(number, answer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _take(self, number: int, answer: Awaitable[bytes]) -> None:
        try:
            self._answered(number, await answer)
        except Exception as error:
            if self.alive:
                _log.debug("Monarch cannot reach %s, so it is killed: %s", self.name, error)
                self.kill()

    async def _let_go(self) -> None:
        """Release what Monarch and this process hold for a process that is gone."""
        for task in tuple(self._carrying):
            task.cancel()
        await stop_procs(self._procs)
        self._gone.set()


async def stop_procs(procs: Any, seconds: float = _STOP_SECONDS) -> None:
    """Have Monarch forget procs, bounded: it has its own words for one that is gone already.

    Monarch stops them in a task of the loop that awaits it, and cancelling the wait does not end that task. So the loop
    is another one, which cancels all of its tasks when it ends.
    """

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await procs.stop()

    with contextlib.suppress(Exception):
        await asyncio.to_thread(asyncio.run, bounded())


def plain_name(name: str) -> str:
    """A name that Monarch accepts."""
    return re.sub(r"\W", "_", name)


def exit_code(process: ChildProcess) -> int:
    """Release a process; its exit code, negative for a signal."""
    process.close()
    status = process.wait(_REAP_SECONDS).status
    return 1 if status is None else os.waitstatus_to_exitcode(status)
