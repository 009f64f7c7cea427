"""Stores in one process, for tests that need no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store import WeightStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore(f"memory://{tmp_path}") as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore(f"memory://{tmp_path}/other") as opened:
        yield opened
