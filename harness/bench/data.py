"""The inputs of ops and their expected results, computed from a formula and by no library under test.

Rank r's input is a pattern of small integers with a prime period, so that a block in the wrong place shows;
sums over ranks are exact in every dtype and order.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.harness.bench.operations import Operation

Array = NDArray[Any]

PERIOD = 8191
POISON = -7
START = 100
"""The first value of counters."""


def allocate(count: int, dtype: str) -> Array:
    """`count` elements in ordinary private pages of their own, the same for every library."""
    nbytes = max(1, count * np.dtype(dtype).itemsize)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array: Array = np.frombuffer(pages, dtype=dtype, count=count)
    array[:] = 0
    return array


def pattern(rank: int, seed: int, dtype: str) -> Array:
    """One period of rank `rank`'s numbers: integers from 0 to 10."""
    index = np.arange(PERIOD, dtype=np.int64)
    values: Array = ((index * 7 + index * index * 3 + rank * 13 + seed * 5) % 11).astype(dtype)
    return values


def tile(array: Array, period: Array) -> None:
    """Fill `array` with repeats of `period`."""
    whole = len(array) // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: len(array) - whole]


def differing(array: Array, period: Array, start: int) -> int:
    """How many elements of `array` differ from `period`, repeated from its element `start` on."""
    rolled = np.roll(period, -(start % PERIOD))
    whole = len(array) // PERIOD * PERIOD
    wrong = int(np.count_nonzero(array[:whole].reshape(-1, PERIOD) != rolled))
    return wrong + int(np.count_nonzero(array[whole:] != rolled[: len(array) - whole]))


def fill(operation: Operation, rank: int, seed: int, source: Array, target: Array) -> None:
    """Set up an op: the rank's input, and an output that no op would leave behind."""
    if target is not source:
        target[:] = POISON
    if operation.name in ("broadcast", "broadcast_object") and rank != 0:
        source[:] = POISON
    elif operation.layout == "counter":
        source[:] = START
    elif len(source):
        tile(source, pattern(rank, seed, source.dtype.name))


def _expected(
    operation: Operation, rank: int, ranks: int, block: int, seed: int, dtype: str
) -> Iterator[tuple[Array, int]]:
    """For each block of the output: the period that it repeats, and the place in it at which it starts."""
    match operation.name:
        case "all_reduce" | "all_reduce_async" | "all_reduce_reproducible" | "reduce_scatter":
            yield _sum(ranks, seed, dtype), rank * block if operation.layout == "scatter" else 0
        case "reduce":
            if rank == 0:
                yield _sum(ranks, seed, dtype), 0
        case "all_gather" | "all_gather_object":
            for source in range(ranks):
                yield pattern(source, seed, dtype), 0
        case "gather":
            for source in range(ranks) if rank == 0 else ():
                yield pattern(source, seed, dtype), 0
        case "broadcast" | "broadcast_object":
            yield pattern(0, seed, dtype), 0
        case "scatter":
            yield pattern(0, seed, dtype), rank * block
        case "all_to_all":
            for source in range(ranks):
                yield pattern(source, seed, dtype), rank * block
        case "send_recv" | "put" | "get" | "memory_read" | "memory_write":
            yield pattern((rank - 1) % ranks, seed, dtype), 0
        case "ping_pong":
            if rank ^ 1 < ranks:
                yield pattern(rank & ~1, seed, dtype), 0
        case "fetch_add" | "compare_swap":
            yield np.full(PERIOD, START + 1, dtype=dtype), 0
        case "copy":
            yield pattern(rank, seed, dtype), 0


def _sum(ranks: int, seed: int, dtype: str) -> Array:
    return sum((pattern(rank, seed, dtype) for rank in range(1, ranks)), start=pattern(0, seed, dtype))


def count_wrong(operation: Operation, rank: int, ranks: int, block: int, seed: int, target: Array) -> int:
    """#wrong: elements of this rank's output that differ from the result of one op on data of `seed`."""
    return sum(
        differing(target[i * block : (i + 1) * block], period, start)
        for i, (period, start) in enumerate(_expected(operation, rank, ranks, block, seed, target.dtype.name))
    )
