"""Tests of rl may be coroutines: each has an event loop of its own, and fails if it leaves a task behind."""

from __future__ import annotations

import inspect

import pytest

from support.rl.event_loop import run

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
