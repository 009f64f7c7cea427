"""Which spares of a job stand by: they have said so, and everybody whom they told has heard it.

Before that a rank that dies is done without, not replaced, so what breaks a job on purpose waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.ft.telemetry.event import Event


def standing_by(events: Iterable[Event]) -> set[str]:
    """The members that stand by, from the events of all processes so far."""
    told: dict[str, tuple[str, ...]] = {}
    heard: set[tuple[str, str]] = set()
    for event in events:
        if event.kind == "spare":
            told.setdefault(event.process, event.names("to"))
        elif event.kind == "welcomed":
            heard.add((event.text("spare"), event.process))
    return {spare for spare, members in told.items() if all((spare, member) in heard for member in members)}
