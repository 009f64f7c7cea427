"""Several ways to do the same thing take turns in the same ranks, a block of calls at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.harness.measure.rounds import rotated

if TYPE_CHECKING:
    from holdfast.comms import Communicator

Way = Callable[[], object]


def agreed_block(comm: Communicator, way: Way, seconds: float, most: int, tries: int = 20) -> int:
    """How many calls take `seconds`, `most` at most; the same on all ranks."""
    began = time.perf_counter()
    for _ in range(tries):
        way()
    mine = int(seconds / max(1e-7, (time.perf_counter() - began) / tries))
    agreed: int = comm.broadcast_object(max(2, min(most, mine)), 0)
    return agreed


def block_times(
    ways: Sequence[Way],
    rounds: int,
    block: int,
    clock: Callable[[], float] = time.perf_counter,
    line_up: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """By way, the seconds of a call in each round. Ranks `line_up` before a block; its first call is untimed."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds):
        for number in rotated(range(len(ways)), turn):
            way = ways[number]
            line_up()
            way()
            began = clock()
            for _ in range(block):
                way()
            times[number].append((clock() - began) / block)
    return times


def slowest(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """By way, the time of the slowest rank in each round."""
    return [[max(times) for times in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]
