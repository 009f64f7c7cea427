"""Finds the spares of a job that stand by: every member that they announced themselves to has welcomed them.

Before that the job goes on without a dead rank instead of replacing it, so fault injection waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.ft.events import Event, SpareWaits, SpareWelcomed


def standing_by(events: Iterable[Event]) -> set[str]:
    """The spares that stand by, from the events of all processes so far."""
    told: dict[str, tuple[str, ...]] = {}
    heard: set[tuple[str, str]] = set()
    for event in events:
        if isinstance(event, SpareWaits):
            told.setdefault(event.process, event.to)
        elif isinstance(event, SpareWelcomed):
            heard.add((event.spare, event.process))
    return {spare for spare, members in told.items() if all((spare, member) in heard for member in members)}
