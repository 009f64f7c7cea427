"""Runs several ranks within this process, each in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_threads(size: int, body: Callable[[int], T], timeout: float) -> list[T]:
    """Call `body(rank)` in a thread for each rank; returns the results in rank order. Raises the first error.

    Raises RunTimeout if ranks without an error are not done after `timeout` seconds: their threads stay behind.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"holdfast-rank-{rank}", daemon=True) for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    late = [rank for rank in range(size) if rank not in results]
    if late:
        from holdfast.harness.cluster.errors import RunTimeout  # no sooner: it would count in measurements of memory

        raise RunTimeout(late, timeout, "")
    return [results[rank] for rank in range(size)]
