"""Messages between two ranks of a board arrive in the order sent, for all interleavings of their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from holdfast.comms.algorithms.shared_memory import channels
from holdfast.comms.algorithms.shared_memory.channels import Channels
from holdfast.comms.errors import Mismatch

SENDER, RECEIVER = 0, 1


class Schedules:
    """Runs a program once for each possible sequence of results of `choose`."""

    def __init__(self) -> None:
        self.runs = 0
        self._plan: list[int] = []
        self._made: list[tuple[int, int]] = []

    def choose(self, options: int) -> int:
        """Choose a number below `options`."""
        at = len(self._made)
        choice = self._plan[at] if at < len(self._plan) else 0
        self._made.append((choice, options))
        return choice

    def explore(self, program: Callable[[], None]) -> None:
        while True:
            self._made = []
            self.runs += 1
            program()
            while self._made and self._made[-1][0] + 1 == self._made[-1][1]:
                self._made.pop()
            if not self._made:
                return
            self._plan = [choice for choice, _ in self._made]
            self._plan[-1] += 1


View = dict[int, int]
"""For each word, the number of the first store that a thread can still read."""


class WeakMemory:
    """The words of a board in the memory of weakly ordered processors.

    A load may return any store to its word that is not older than one which the thread knows of. A thread knows of its
    own stores, of what it has read, and, after an acquiring load of a releasing store, of all that the storing thread
    knew of.
    """

    def __init__(self, schedules: Schedules, ordered: bool) -> None:
        self._schedules, self._ordered = schedules, ordered
        self._stores: dict[int, list[tuple[int, View]]] = {}

    def load(self, view: View, word: int) -> int:
        stores = self._stores.setdefault(word, [(0, {})])
        first = view.get(word, 0)
        last = len(stores) - 1
        number = last - (self._schedules.choose(last - first + 1) if last > first else 0)
        value, known = stores[number]
        view[word] = number
        if self._ordered:
            for other, least in known.items():
                view[other] = max(view.get(other, 0), least)
        return value

    def store(self, view: View, word: int, value: int) -> None:
        stores = self._stores.setdefault(word, [(0, {})])
        view[word] = len(stores)
        stores.append((value, dict(view)))


class ThreadWords:
    """One thread's words, in place of `_native.Words`; every access is an acquire or a release."""

    def __init__(self, memory: WeakMemory) -> None:
        self._memory, self._view = memory, View()

    def __getitem__(self, word: int) -> int:
        return self._memory.load(self._view, word)

    def __setitem__(self, word: int, value: int) -> None:
        self._memory.store(self._view, word, value)


class ModelBoard:
    """The part of a board that `Channels` uses."""

    size = 2

    def __init__(self, memory: WeakMemory, rank: int) -> None:
        self.rank, self.words, self.native = rank, ThreadWords(memory), self

    def entry(self, src: int, dst: int, number: int) -> int:
        return 8 * number

    def wake(self, rank: int) -> None:
        """Do nothing: no rank sleeps."""


def channels_over(board: Any, read: Callable[[int], None]) -> Channels:
    return Channels(board, lambda rank, address, into, nbytes: read(address))


def run_once(schedules: Schedules, tags: Sequence[int], wanted: Sequence[int], ordered: bool = True) -> None:
    """Send a message of each tag, and receive the wanted ones, under one schedule.

    The sender posts at any time between two receives; loads that see less than that stand for later times.
    """
    memory = WeakMemory(schedules, ordered)
    into = torch.zeros(channels.INLINE_BYTES + 1, dtype=torch.uint8)
    messages = [(torch.empty_like(into), RECEIVER, tag) for tag in tags]
    numbers = {tensor.data_ptr(): number for number, (tensor, _, _) in enumerate(messages)}
    taken: list[int] = []
    sender = channels_over(ModelBoard(memory, SENDER), lambda address: None)
    receiver = channels_over(ModelBoard(memory, RECEIVER), lambda address: taken.append(numbers[address]))
    posted = 0
    for tag in wanted:
        while posted < len(messages) and schedules.choose(2) and sender._post(messages[posted]) is not None:
            posted += 1
        if not receiver._take((into, SENDER, tag)):
            return  # the receiver would poll again: equal to a schedule with an earlier sender
    for tag in set(wanted):
        got = [number for number in taken if tags[number] == tag]
        assert got == [number for number, each in enumerate(tags) if each == tag][: len(got)], f"{taken} of {tags}"
    assert [tags[number] for number in taken] == list(wanted)


CASES = [
    (2, (7, 7, 7, 7), (7, 7, 7, 7)),
    (3, (7, 7, 7, 7), (7, 7, 7, 7)),
    (3, (7, 9, 7, 9), (9, 7, 7, 9)),
    (3, (9, 7, 7, 7), (7, 7, 7, 9)),
]


@pytest.mark.parametrize(("entries", "tags", "wanted"), CASES)
def test_no_order_of_loads_and_stores_lets_messages_overtake_each_other(
    entries: int, tags: tuple[int, ...], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CHANNEL_ENTRIES", entries)
    schedules = Schedules()
    schedules.explore(lambda: run_once(schedules, tags, wanted))
    assert schedules.runs > 100


def test_the_exploration_finds_what_a_single_scan_does_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CHANNEL_ENTRIES", 3)
    scan = Channels._scan
    monkeypatch.setattr(Channels, "_scan", lambda self, src, tag, whole=True: not whole or scan(self, src, tag))
    schedules = Schedules()
    with pytest.raises(AssertionError, match="of"):
        schedules.explore(lambda: run_once(schedules, (7, 7, 7), (7, 7, 7)))


def test_the_exploration_finds_what_accesses_without_order_do_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CHANNEL_ENTRIES", 3)
    schedules = Schedules()
    with pytest.raises((AssertionError, KeyError, Mismatch)):
        schedules.explore(lambda: run_once(schedules, (7, 7, 7), (7, 7, 7), ordered=False))
