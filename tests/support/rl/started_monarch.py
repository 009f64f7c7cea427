"""Monarch in the test process: it opens sockets at its first use that stay until the process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from support.leaks import Snapshot, exempt_descriptors_since

_started = False


def start_monarch_once() -> Callable[..., Any]:
    """The class `MonarchEngine`; the first time, Monarch is started, and what it keeps open is no leak."""
    global _started
    before = Snapshot.take()
    pytest.importorskip("monarch", reason="needs Monarch: pip install 'holdfast[rl]'")
    from holdfast.rl.actors.monarch import MonarchEngine
    from support.samples.actors import Counter

    if not _started:

        async def once() -> None:
            async with MonarchEngine() as engine:
                for name in ("first", "second", "third"):
                    await (await engine.start(name, Counter)).stop()

        asyncio.run(once())
        exempt_descriptors_since(before)
        _started = True
    return MonarchEngine
