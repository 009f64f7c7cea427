"""The event loop of a test, and a wait in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from support.waiting import PATIENCE

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


async def until(holds: Callable[[], Any], seconds: float = 2 * PATIENCE) -> None:
    """Return once `holds()`; fails the test if that takes longer than `seconds`."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)
