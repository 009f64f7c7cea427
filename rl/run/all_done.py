"""Waits for several coroutines; if one fails, none of the others goes on behind its caller's back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_done(first: Awaitable[T], *others: Awaitable[object]) -> T:
    """The result of `first` once all are done. If one raises, the others are cancelled, and its error raised."""
    wanted = asyncio.ensure_future(first)
    tasks: list[asyncio.Future[Any]] = [wanted, *(asyncio.ensure_future(each) for each in others)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return wanted.result()
