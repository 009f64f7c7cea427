"""Ranks that are threads of a test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_threads(size: int, body: Callable[[int], T], timeout: float) -> list[T]:
    """Call `body(rank)` in a thread for each rank; the results by rank. Raises the first error, or `TimeoutError`."""
    threads = ThreadPoolExecutor(size, "rank")
    try:
        return list(threads.map(body, range(size), timeout=timeout))
    finally:
        threads.shutdown(wait=False)
