"""Communicators that tests connect by hand, of ranks that are threads or one alone; and deadlines of their calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast import comms
from holdfast.comms import Communicator

T = TypeVar("T")


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Call `body(rank)` in a thread each; results or exceptions by rank."""

    def run(rank: int) -> Any:
        try:
            return body(rank)
        except Exception as error:
            return error

    return run_in_threads(size, run, None)


def run_in_threads(size: int, body: Callable[[int], T], timeout: float | None) -> list[T]:
    """Call `body(rank)` in a thread for each rank; the results by rank. Raises the first error, or `TimeoutError`."""
    threads = ThreadPoolExecutor(size, "rank")
    try:
        return list(threads.map(body, range(size), timeout=timeout))
    finally:
        threads.shutdown(wait=False)


def soon(seconds: float = 20.0) -> float:
    """A deadline, as the calls of a transport take it."""
    return time.monotonic() + seconds


def total(comm: comms.Communicator) -> float:
    tensor = torch.tensor([float(comm.rank + 1)])
    with comm:
        comm.all_reduce(tensor)
    return tensor.item()


def alone(path: Path, backend: str = "shm", **named: Any) -> Communicator:
    """A communicator of this process as its only rank, which meets in the folder `path`."""
    return comms.connect(backend, rank=0, size=1, rendezvous=f"file://{path}/meeting", **named)


@contextmanager
def registered(plugin: object) -> Iterator[None]:
    """Within it, this process has the plugin."""
    comms.register(plugin)
    try:
        yield
    finally:
        comms.unregister(plugin)
