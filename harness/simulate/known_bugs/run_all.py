"""Looks for every known bug on all cores: one process each, which takes the next bug when it is done."""

from __future__ import annotations

import os
import select
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.harness.simulate.known_bugs import KNOWN_BUGS
from holdfast.harness.simulate.known_bugs.reproduce import Sighting, reproduce


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
