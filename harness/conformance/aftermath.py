"""What checks ask afterwards: of a run in which a rank died, and of a process that has had many communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.comms import Communicator, HoldfastError
from holdfast.harness import LocalCluster


def outlived(backend: str, body: Callable[[Communicator], None], done: Path, timeout: float = 20.0) -> None:
    """Run `body` on two ranks, one of which is killed, so that the run fails; the other writes `done` at its end."""
    with LocalCluster(2, backend, timeout=timeout) as cluster, pytest.raises(HoldfastError):
        cluster.run(body)
    assert done.exists()


def held(memory: str) -> tuple[int, int, int]:
    """This process's descriptors, threads, and maps with `memory` in their names."""
    maps = Path("/proc/self/maps").read_text()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count(memory)
