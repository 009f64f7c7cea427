"""A store in this process, for the tests of torchstore's interface."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import holdfast.store.torchstore as ts


@pytest.fixture
def store() -> Iterator[None]:
    """The default store, owned by this process."""
    asyncio.run(ts.initialize())
    yield
    asyncio.run(ts.shutdown())
