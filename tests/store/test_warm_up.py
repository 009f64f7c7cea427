"""A process's first publish and get find code and memory ready: opening the store has done both once."""

from __future__ import annotations

import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from holdfast.comms.errors import Unsupported
from holdfast.comms.memory_plane import MemoryPlane, Region, memory
from holdfast.store import WeightStore, weight_store
from support.children import Child


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def a_first_publish_and_get(pipe: Connection, url: str, warmed: bool) -> None:
    if not warmed:
        weight_store._publish_and_get = lambda plane: None
    state = {f"layers.{number}.weight": torch.ones(1024) for number in range(300)}
    into = {name: torch.zeros_like(each) for name, each in state.items()}
    with WeightStore(url, replicas=1, reserve=4 << 20) as store:
        taken = []
        for version in (1, 2, 3, 4):
            before = faults()
            store.publish(version, state)
            store.get(version, into)
            taken.append(faults() - before)
        pipe.send(taken)


def test_first_calls_take_fewer_page_faults(start: Callable[..., Child], url: str) -> None:
    cold, warm = (start(a_first_publish_and_get, f"{url}-{warmed}", warmed) for warmed in (False, True))
    assert warm.hear()[0] < 0.7 * cold.hear()[0]
    for child in (cold, warm):
        child.end()


def test_what_fails_is_left_to_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plane: MemoryPlane, tensor: torch.Tensor, writable: bool = False) -> Region:
        raise Unsupported("exposing memory", "use another plane")

    monkeypatch.setattr(weight_store, "_done", set())
    with memory("shm") as plane:
        monkeypatch.setattr(type(plane), "expose", refuse)
        weight_store.warm_up(plane)
        assert weight_store._done
