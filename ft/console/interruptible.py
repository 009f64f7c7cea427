"""Runs a coroutine as the whole of a command, and ends it in order when a signal comes."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but SIGTERM and SIGHUP cancel `work` as SIGINT does, and then exit with 128 + the signal.

    An exception that is raised out of a signal handler would end the loop between two callbacks, and leave what its
    tasks have opened. Signals that are ignored stay so, and threads other than the main one get none.
    """
    received: list[int] = []

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            if not received:
                received.append(number)
                task.cancel()

        for number in handled:
            loop.add_signal_handler(number, end, number)
        return await work

    main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if main_thread}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in handled:
            signal.signal(number, before[number])
