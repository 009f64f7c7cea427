"""Engines, each in turn, held to one suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.rl.engine.engine import Engine
from holdfast.rl.engine.local import LocalEngine
from support.rl.started_monarch import start_monarch_once


@pytest.fixture(params=["local", pytest.param("monarch", marks=pytest.mark.thorough)])
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """A function that makes an engine."""
    if request.param == "local":
        return LocalEngine
    return start_monarch_once()
