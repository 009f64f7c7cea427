"""One rank of one library, which runs, times and checks ops on order.

Run as a program (`python -m holdfast.harness.bench.ranks CONTESTANT FOLDER RANKS`) it is a rank under mpirun; otherwise
the zygote forks it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from holdfast.comms.system.files import url_of
from holdfast.harness.bench.data import allocate, count_wrong, fill
from holdfast.harness.bench.drivers import (
    GLOO,
    HOLDFAST,
    MEMCPY,
    MPICH,
    OPENMPI,
    TIMEOUT,
    CopyDriver,
    GlooDriver,
    HoldfastDriver,
    LibraryDriver,
    MpiDriver,
)
from holdfast.harness.bench.operations import OPERATIONS, Operation
from holdfast.harness.measure.worker import WorkerBarrier, serve

WARM_UP = 2
"""Untimed ops at the start of each turn: the rank was asleep during the turns of others."""


class Measure(msgspec.Struct, frozen=True):
    """Run an op: `singles` times alone, then `blocks` times `block` in a row, with `c` elements in a block.

    `fresh`: each rank writes its input anew before each op, within the timing.
    """

    op: str
    c: int
    dtype: str
    seed: int
    singles: int
    blocks: int
    block: int
    fresh: bool = False


class Measurement(msgspec.Struct, frozen=True):
    """Entry and exit of each timing (CLOCK_MONOTONIC, ns), and how many elements were wrong (None: unknown)."""

    singles: list[tuple[int, int]]
    blocks: list[tuple[int, int]]
    wrong: int | None


class Bound:
    """An op bound to buffers of one size."""

    def __init__(self, driver: LibraryDriver, operation: Operation, c: int, dtype: str) -> None:
        self.operation, self.c, self.dtype = operation, c, dtype
        lengths = operation.lengths(c, driver.ranks)
        self.source = allocate(lengths[0], dtype)
        in_place = operation.layout in ("in_place", "counter", "none")
        self.target = self.source if in_place else allocate(lengths[1], dtype)
        self.call = driver.bind(operation, self.source, self.target)
        self._rank, self._ranks = driver.rank, driver.ranks
        self._most, self._done = operation.in_a_row(driver.ranks), 0

    def fill(self, seed: int) -> None:
        self._done = 0
        fill(self.operation, self._rank, seed, self.source, self.target)
        self.call.prepare()

    def fresh(self) -> Callable[[], object]:
        """A call that writes the input anew, as a real program would, and runs the op."""
        source, written, run = self.source, self.source.copy(), self.call.run

        def call() -> object:
            np.copyto(source, written)
            return run()

        return call

    def make_ready(self, ops: int, seed: int) -> None:
        """Prepare for `ops` more ops: refill the buffers if they cannot take so many in a row."""
        if self._done + ops > self._most:
            self.fill(seed)
        self._done += ops

    def wrong(self, seed: int) -> int:
        self.call.settle()
        return count_wrong(self.operation, self._rank, self._ranks, self.c, seed, self.target)


def time_ops(
    bound: Bound, call: Callable[[], object], seed: int, barrier: WorkerBarrier, times: int, block: int
) -> list[tuple[int, int]]:
    """Entry and exit times (ns) of `times` timings of `block` calls each. Filling buffers is not timed."""
    timings = []
    repeats = range(block)
    for _ in range(times):
        bound.make_ready(block, seed)
        barrier.wait()
        start = time.perf_counter_ns()
        for _ in repeats:
            call()
        timings.append((start, time.perf_counter_ns()))
    return timings


class Rank:
    """What a worker serves: one rank of a library."""

    def __init__(self, driver: LibraryDriver, barrier: WorkerBarrier) -> None:
        self._driver, self._barrier = driver, barrier
        self._bound: Bound | None = None

    def measure(self, order: Measure) -> Measurement:
        """Time the op, and check its last result and that of one more on other data."""
        operation, bound = OPERATIONS[order.op], self._bound
        if bound is None or (bound.operation, bound.c, bound.dtype) != (operation, order.c, order.dtype):
            self._release()
            bound = self._bound = Bound(self._driver, operation, order.c, order.dtype)
        seed, barrier = order.seed, self._barrier
        bound.fill(seed)
        run = bound.fresh() if order.fresh else bound.call.run
        bound.make_ready(WARM_UP, seed)
        barrier.wait()
        for _ in range(WARM_UP):
            run()
        singles = time_ops(bound, run, seed, barrier, order.singles, 1)
        blocks = time_ops(bound, run, seed, barrier, order.blocks, order.block)
        barrier.wait()
        wrong = bound.wrong(seed) if not operation.once else 0
        bound.fill(seed + 1)
        barrier.wait()
        bound.call.run()
        barrier.wait()
        return Measurement(singles, blocks, wrong + bound.wrong(seed + 1))

    def _release(self) -> None:
        if self._bound is not None:
            self._bound.call.close()
            self._bound = None

    def close(self) -> None:
        self._release()
        self._driver.close()


def _driver(contestant: str, folder: Path, rank: int, ranks: int) -> LibraryDriver:
    meeting = folder / "meeting"
    if contestant == MEMCPY:
        return CopyDriver(rank, ranks)
    if contestant in (OPENMPI, MPICH):
        return MpiDriver()
    if contestant == GLOO:
        return GlooDriver(meeting, rank, ranks)
    if not contestant.startswith(HOLDFAST):
        raise ValueError(f"no such contestant: {contestant}")
    from holdfast import comms

    backend = contestant.removeprefix(HOLDFAST)
    where = url_of("file", meeting)
    return HoldfastDriver(
        comms.connect(backend, rank=rank, size=ranks, rendezvous=where, name="bench", timeout=TIMEOUT)
    )


def be_rank(
    contestant: str, folder: Path, rank: int, ranks: int, give_way: Callable[[], object] = os.sched_yield
) -> None:
    """Serve as one rank until the bench hangs up; a wait at the barrier calls `give_way`. `rank` -1: the library says.

    Raises what connecting raises.
    """
    driver = _driver(contestant, folder, rank, ranks)
    barrier = WorkerBarrier(folder / "barrier", driver.rank, driver.ranks, give_way)
    service = Rank(driver, barrier)
    try:
        serve(folder / "socket", service, contestant, driver.rank, driver.detail)
    finally:
        service.close()


def be_threads(contestant: str, folder: Path, ranks: int) -> None:
    """Be all ranks of a backend that has threads for ranks."""
    threads = [
        threading.Thread(target=be_rank, args=(contestant, folder, rank, ranks, lambda: time.sleep(0)))
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    if sys.argv[1].startswith(HOLDFAST):
        import torch

        torch.set_num_threads(1)
    be_rank(sys.argv[1], Path(sys.argv[2]), int(os.environ.get("PMIX_RANK", "-1")), int(sys.argv[3]))
