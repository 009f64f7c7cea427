"""Reproduces known bugs: the first seed that shows each, and the smallest schedule that still does.

The search for all of them takes all cores: one process each, which takes the next bug when it is done.
"""

from __future__ import annotations

import os
import select
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.harness.simulate.core.schedule import Schedule
from holdfast.harness.simulate.draw import draw
from holdfast.harness.simulate.known_bugs import KnownBug, membership_bugs, node_bugs
from holdfast.harness.simulate.run import simulate
from holdfast.harness.simulate.shrink import shrink

KNOWN_BUGS = tuple(
    bug for module in (membership_bugs, node_bugs) for bug in vars(module).values() if isinstance(bug, KnownBug)
)


class Sighting(msgspec.Struct, frozen=True):
    """The result of the search for a bug. `seeds` were tried; `checker` is the invariant that it broke, "" if none.

    `real`: without the bug neither the schedule of the seed nor the shrunk one breaks an invariant. `schedule` is the
    shrunk one, with `shrunk` events instead of `events`.
    """

    name: str
    bug: str
    origin: str
    seeds: int
    checker: str = ""
    message: str = ""
    real: bool = False
    events: int = 0
    shrunk: int = 0
    schedule: Schedule | None = None

    @property
    def found(self) -> bool:
        return bool(self.checker)


def reproduce(bug: KnownBug, seeds: int, tries: int = 120, first: int = 0) -> Sighting:
    """Find the first of `seeds` seeds with a schedule that shows a bug; shrink that in at most `tries` runs."""
    for tried, seed in enumerate(range(first, first + seeds), start=1):
        schedule = draw(seed)
        with bug.inject():
            violation = simulate(schedule).violation
        if violation is None:
            continue
        real = simulate(schedule).violation is None
        small = shrink(schedule, partial(_shows, bug, violation.invariant), tries)
        return Sighting(
            bug.name,
            bug.bug,
            bug.origin,
            tried,
            violation.invariant,
            violation.message,
            real and simulate(small).violation is None,
            len(schedule.faults),
            len(small.faults),
            small,
        )
    return Sighting(bug.name, bug.bug, bug.origin, seeds)


def _shows(bug: KnownBug, invariant: str, schedule: Schedule) -> bool:
    """Whether the schedule breaks the invariant with the bug, and nothing without it."""
    with bug.inject():
        violation = simulate(schedule).violation
    return violation is not None and violation.invariant == invariant and simulate(schedule).violation is None


# All of them ----------------------------------------------------------------------------------------------------------


def run_all(
    seeds: int,
    first: int = 0,
    *,
    chosen: Sequence[int] = range(len(KNOWN_BUGS)),
    done: Callable[[Sighting], None] = lambda sighting: None,
) -> list[Sighting]:
    """Search for each bug; returns the results in the order of `KNOWN_BUGS`. `done` is called with each at its end.

    `chosen` are indices into `KNOWN_BUGS`. Raises `StartFailed` if a process ends before it has answered.
    """
    found: dict[int, Sighting] = {}
    todo, busy = list(reversed(chosen)), dict[ForkedProcess, int]()
    with tempfile.TemporaryDirectory(prefix="holdfast-known-bugs-") as folder:
        processes: list[ForkedProcess] = []
        try:
            for number in range(min(len(os.sched_getaffinity(0)), len(todo))):
                name = f"search {number}"
                processes.append(zygote().spawn(_Search(seeds, first), name=name, output=Path(folder) / name))
            for process in processes:
                busy[process] = todo.pop()
                process.channel.send(busy[process])
            while busy:
                for process in _ready(busy):
                    sighting = _answer(process)
                    found[busy.pop(process)] = sighting
                    done(sighting)
                    if todo:
                        busy[process] = todo.pop()
                        process.channel.send(busy[process])
        finally:
            for process in processes:
                process.close()
    return [found[place] for place in chosen]


class _Search:
    """The target of each process: receives indices into `KNOWN_BUGS`, answers each with its `Sighting`."""

    def __init__(self, seeds: int, first: int) -> None:
        self._seeds, self._first = seeds, first

    def __call__(self, channel: ProcessChannel) -> None:
        while True:
            try:
                place = channel.recv()
            except ChannelClosed:
                return
            channel.send(reproduce(KNOWN_BUGS[place], self._seeds, first=self._first))


def _ready(busy: dict[ForkedProcess, int]) -> list[ForkedProcess]:
    """Wait for processes that have answered or ended, and return them."""
    poller = select.poll()
    by_descriptor = {process.channel.fileno(): process for process in busy}
    for descriptor in by_descriptor:
        poller.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poller.poll()]


def _answer(process: ForkedProcess) -> Sighting:
    try:
        sighting: Sighting = process.channel.recv(30.0)
    except ChannelClosed:
        raise StartFailed(f"{process.name}: {process.epitaph()}") from None
    return sighting
