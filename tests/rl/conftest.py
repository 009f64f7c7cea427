"""Tests of rl share an engine of each kind, a store, and a warm sandbox for each module.

Where the walls of a sandbox are not allowed, its tests are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.rl.actors.engine import Engine, LocalEngine
from holdfast.rl.environments.sandbox import Sandbox, SandboxUnavailable
from holdfast.store import WeightStore
from support.event_loop import start_monarch_once


@pytest.fixture(params=["local", pytest.param("monarch", marks=pytest.mark.thorough)])
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    return LocalEngine if request.param == "local" else start_monarch_once()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    """A store that other processes can reach; it keeps the newest four versions."""
    with WeightStore(f"sqlite://{tmp_path}/weights.sqlite", replicas=1, keep=4) as found:
        yield found


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        started = Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with started:
        yield started
