"""Helpers of the checks: wait for files, run two ranks of which one dies, count descriptors, threads and maps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.comms import Communicator, HoldfastError
from holdfast.harness import LocalCluster


def outlived(backend: str, body: Callable[[Communicator], None], done: Path, timeout: float = 20.0) -> None:
    """Run `body` on two ranks; one is killed, so the run fails, and the survivor creates the file `done` last."""
    with LocalCluster(2, backend, timeout=timeout) as cluster, pytest.raises(HoldfastError):
        cluster.run(body)
    assert done.exists()


def held(memory: str) -> tuple[int, int, int]:
    """Count this process's descriptors, threads, and maps with `memory` in their names."""
    maps = Path("/proc/self/maps").read_text()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count(memory)


def growth(start: tuple[int, int, int], memory: str) -> tuple[int, int, int]:
    """How much more `held` counts now than at `start`.

    Waits up to 5 s until the growth is below two of each, for threads and connections that still end.
    """
    deadline = time.monotonic() + 5.0
    while True:
        descriptors, threads, maps = (now - then for then, now in zip(start, held(memory), strict=True))
        if max(descriptors, threads, maps) <= 1 or time.monotonic() >= deadline:
            return descriptors, threads, maps
        time.sleep(0.02)


def wait_for_files(*paths: Path, seconds: float = 10.0) -> None:
    """Return once all files are there, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.01)
