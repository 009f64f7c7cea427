"""Contestants take short turns at a workload, round after round, so that noise hits all of them alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from holdfast.harness.measure.workers import OpFailed, WorkerFailed

C = TypeVar("C")
N = TypeVar("N")

FAILURES = (NotImplementedError, OpFailed, WorkerFailed)
"""What a contestant may fail with: it has no such op, the op failed, or its workers did."""


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """What one turn gave: the seconds of each figure, one or many.

    `wrong` counts results that came out wrong; None from a library that does not say. `memory` is private bytes that
    the workers took, by figure.
    """

    seconds: Mapping[str, Sequence[float]]
    wrong: int | None
    memory: Mapping[str, int] = field(default_factory=dict)


class Workload(ABC, Generic[C]):
    """What is measured: the set-up of a contestant, and its turns, each with the check of its results."""

    name: str

    def set_up(self, contestant: C) -> None:
        """Prepare a contestant before the first round; nothing of it is recorded."""

    @abstractmethod
    def turn(self, contestant: C, number: int) -> TimedTurn:
        """One turn in round `number`. Raises one of `FAILURES`."""


Order = Callable[[Sequence[str], int], Iterable[str]]
"""Who has a turn in round `number`, in order."""


def rotated(names: Sequence[N], number: int) -> Iterable[N]:
    """Each name once, beginning with the second of the round before: none always follows the same one."""
    first = number % max(1, len(names))
    return [*names[first:], *names[:first]]


def mirrored(names: Sequence[str], number: int) -> Iterable[str]:
    """Each twice, A B B A, and in the next round B A A B: drift within a round cancels."""
    order = list(names) if number % 2 == 0 else list(names)[::-1]
    return [*order, *reversed(order)]


def take_turns(
    workload: Workload[C],
    contestants: Mapping[str, C],
    rounds: Iterable[int],
    failed: Callable[[str, Exception], None],
    order: Order = rotated,
) -> dict[str, list[TimedTurn]]:
    """Set up all contestants, then give them turns in each round; the turns of those that did not fail.

    A contestant that fails has no more turns, and `failed` is called with its name and the error.
    """
    turns: dict[str, list[TimedTurn]] = {}

    def attempt(name: str, body: Callable[[C], TimedTurn | None]) -> None:
        try:
            turn = body(contestants[name])
        except FAILURES as error:
            turns.pop(name, None)
            failed(name, error)
        else:
            turns.setdefault(name, []).extend([] if turn is None else [turn])

    for name in contestants:
        attempt(name, workload.set_up)
    for number in rounds:
        for name in order(list(turns), number):
            if name in turns:
                attempt(name, partial(workload.turn, number=number))
    return turns


def total_wrong(counts: Iterable[int | None]) -> int | None:
    """How many results were wrong in all; None if one count is unknown."""
    known = list(counts)
    return None if None in known else sum(count or 0 for count in known)
