"""Stores in one process, for tests that need no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast.store.torchstore as ts
from holdfast.backends.inproc.transport import InprocPlane
from holdfast.comms.errors import Unsupported
from holdfast.store import WeightStore
from support.children import Child, Start
from support.samples.store_processes import Holders, a_holder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore(f"memory://{tmp_path}") as opened:
        yield opened


@pytest.fixture
def torchstore() -> Iterator[None]:
    """The default store of torchstore's interface, owned by this process."""
    asyncio.run(ts.initialize())
    yield
    asyncio.run(ts.shutdown())


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process maps the memory of another, as between hosts."""

    def refuse(*_: object, **__: object) -> None:
        raise Unsupported("mapping", "read it")  # a new one: an error that is kept keeps what its callers hold

    monkeypatch.setattr(InprocPlane, "can_map", False)
    monkeypatch.setattr(InprocPlane, "map", refuse)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore(f"memory://{tmp_path}/other") as opened:
        yield opened


@pytest.fixture
def holders(url: str, start: Start) -> Holders:
    """A function that starts processes which keep replicas, and waits until they do."""

    def started(count: int) -> list[Child]:
        found = [start(a_holder, url) for _ in range(count)]
        for each in found:
            each.hear()
        return found

    return started
