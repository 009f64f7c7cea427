"""Tasks that end together, with the first error of any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def running(work: Callable[[], Awaitable[None]], tasks: int) -> AsyncIterator[None]:
    """Run `tasks` copies of `work` until the block ends; the first error of any ends all, and is raised."""
    first: list[BaseException] = []

    async def noted() -> None:
        try:
            await work()
        except BaseException as error:
            if not first:
                first.append(error)
            raise

    try:
        async with asyncio.TaskGroup() as group:
            begun = [group.create_task(noted()) for _ in range(tasks)]
            try:
                yield
            except BaseException as error:
                if not first:
                    first.append(error)
                raise
            for each in begun:
                each.cancel()
        return
    except BaseExceptionGroup:
        failure = first.pop()
    raise failure


async def together(work: Callable[[], Awaitable[None]], tasks: int) -> None:
    """Run `tasks` copies of `work` to their ends; the first error of any ends all, and is raised."""
    left = tasks
    done = asyncio.Event()

    async def counted() -> None:
        nonlocal left
        await work()
        left -= 1
        if left == 0:
            done.set()

    async with running(counted, tasks):
        await done.wait()
