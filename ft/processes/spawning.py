"""Waits for a process to be spawned in a thread; a caller that is cancelled meanwhile leaves none behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.executed_process import ExecutedProcess
from holdfast.ft.processes.zygote_client import ForkedProcess

ChildProcess = ForkedProcess | ExecutedProcess


async def spawned(spawn: Callable[[], ChildProcess]) -> ChildProcess:
    """The process that `spawn` gives, which runs in a thread. Raises `StartFailed`."""
    spawning = asyncio.ensure_future(asyncio.to_thread(spawn))
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        try:
            await asyncio.to_thread((await spawning).close)
        except StartFailed:
            pass
        raise
