"""The event loop of a test, a wait in it, and Monarch, which opens sockets at its first use that stay open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from support.leaks import Snapshot, exempt_descriptors_since
from support.waiting import PROGRAM_SECONDS

T = TypeVar("T")


def run(body: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
    """Run a test's coroutine; fails if it takes too long, or leaves tasks behind."""

    async def whole() -> T:
        async with asyncio.timeout(seconds):
            result = await body
        for _ in range(500):
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if not left:
                return result
            await asyncio.sleep(0.01)
        raise AssertionError(f"left behind: {left}")

    return asyncio.run(whole())


async def until(holds: Callable[[], Any]) -> None:
    """Return once `holds()`; fails the test if that takes longer than `PROGRAM_SECONDS`."""
    async with asyncio.timeout(PROGRAM_SECONDS):
        while not holds():
            await asyncio.sleep(0.005)


_started = False


def start_monarch_once() -> Callable[..., Any]:
    """The class `MonarchEngine`; the first time, Monarch is started, and what it keeps open is no leak."""
    global _started
    before = Snapshot.take()
    pytest.importorskip("monarch", reason="needs Monarch: pip install 'holdfast[rl]'")
    from holdfast.rl.actors.monarch import MonarchEngine
    from support.samples.actors import Counter

    if not _started:

        async def once() -> None:
            async with MonarchEngine() as engine:
                for name in ("first", "second", "third"):
                    await (await engine.start(name, Counter)).stop()

        asyncio.run(once())
        exempt_descriptors_since(before)
        _started = True
    return MonarchEngine
