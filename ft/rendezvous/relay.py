"""Passes batches of keys along a tree, once over each edge, in few messages: without I/O.

What a member gets from one neighbour goes to all its others, so every batch crosses each edge once. Batches for a
neighbour wait for each other: the first goes at once, and the pause to the next message doubles from one to the next,
up to a limit. So the messages of a member grow with the logarithm of the time that a meeting takes, and not with the
number of members, and what is passed on is late by no more than the time that has passed already.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Batch = TypeVar("Batch")

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.004
"""Seconds between two messages to a neighbour."""


class TreeRelay(Generic[Batch]):
    """The part of one member. `neighbours` are the ids of those next to it; `pauses` is False in small jobs."""

    __slots__ = ("_next", "_pause", "_pauses", "_pending")

    def __init__(self, neighbours: Iterable[str], pauses: bool) -> None:
        self._pending: dict[str, list[Batch]] = {each: [] for each in neighbours}
        self._pauses, self._pause, self._next = pauses, FIRST_PAUSE, 0.0

    def add(self, batch: Batch, source: str | None) -> None:
        """Pass a batch on that was set here (`source` None), or came from a neighbour."""
        for neighbour, batches in self._pending.items():
            if neighbour != source:
                batches.append(batch)

    def add_for(self, neighbour: str, batch: Batch) -> None:
        """Pass a batch on to one neighbour: the connection to it is new."""
        if neighbour in self._pending:
            self._pending[neighbour].append(batch)

    def wake_at(self, now: float) -> float | None:
        """When `take` is to be called next; None if there is nothing to send."""
        return max(now, self._next) if any(self._pending.values()) else None

    def take(self, now: float) -> list[tuple[str, list[Batch]]]:
        """The batches to send to each neighbour now. Call it when `wake_at` says so, or to send all at the end."""
        due = [(neighbour, batches) for neighbour, batches in self._pending.items() if batches]
        for neighbour, _ in due:
            self._pending[neighbour] = []
        if due and self._pauses:
            if now > self._next + LONGEST_PAUSE:
                self._pause = FIRST_PAUSE
            self._next, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return due
