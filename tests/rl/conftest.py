"""Tests of rl may be coroutines: each has an event loop of its own, and fails if it leaves a task behind.

They share an engine of each kind, a store, and a warm sandbox for each module. Where its walls are not allowed, its
tests are skipped with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.rl.actors.engine import Engine, LocalEngine
from holdfast.rl.environments.sandbox import Sandbox, SandboxUnavailable
from holdfast.store import WeightStore
from support.rl.event_loop import run, start_monarch_once

SECONDS = 120.0
"""What a test may take that has no mark `timeout`."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    limit = pyfuncitem.get_closest_marker("timeout")
    run(
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}),
        (limit.args[0] if limit else SECONDS) - 10,
    )
    return True


@pytest.fixture(params=["local", pytest.param("monarch", marks=pytest.mark.thorough)])
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """A function that makes an engine."""
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
