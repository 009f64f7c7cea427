"""A worker of the bench: one rank of one library, which runs and times ops on order.

Run as a program (`python -m holdfast.harness.bench.collectives.worker KEY DIRECTORY RANKS`) it is a rank under mpirun.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from holdfast.ft.processes.message_socket import MessageSocket
from holdfast.harness.bench.collectives.data import allocate, count_wrong, fill
from holdfast.harness.bench.collectives.definitions import OPERATIONS, Operation
from holdfast.harness.bench.collectives.startline import StartLine
from holdfast.harness.bench.collectives.wire import (
    DECODER,
    Measure,
    Measurement,
    MeasurementFailed,
    StopWorker,
    WorkerReady,
)
from holdfast.harness.bench.drivers.driver import LibraryDriver
from holdfast.harness.bench.drivers.mpi import MpiDriver

WARM_UP = 2
"""Untimed ops at the start of each turn: the rank was asleep during the turns of others."""


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
    bound: Bound, call: Callable[[], object], seed: int, line: StartLine, times: int, block: int
) -> list[tuple[int, int]]:
    """Entry and exit times (ns) of `times` timings of `block` calls each. Filling buffers is not timed."""
    timings = []
    repeats = range(block)
    for _ in range(times):
        bound.make_ready(block, seed)
        line.wait()
        start = perf_counter_ns()
        for _ in repeats:
            call()
        timings.append((start, perf_counter_ns()))
    return timings


def _measure(bound: Bound, line: StartLine, order: Measure) -> Measurement:
    bound.fill(order.seed)
    run = bound.fresh() if order.fresh else bound.call.run
    bound.make_ready(WARM_UP, order.seed)
    line.wait()
    for _ in range(WARM_UP):
        run()
    singles = time_ops(bound, run, order.seed, line, order.singles, 1)
    blocks = time_ops(bound, run, order.seed, line, order.blocks, order.block)
    line.wait()
    wrong = bound.wrong(order.seed) if not bound.operation.once else 0
    bound.fill(order.seed + 1)
    line.wait()
    bound.call.run()
    line.wait()
    return Measurement(singles, blocks, wrong + bound.wrong(order.seed + 1))


def serve(key: str, directory: Path, driver: LibraryDriver, give_way: Callable[[], object] = os.sched_yield) -> None:
    """Connect to the bench's socket in `directory`, and run its orders until it stops this worker or is gone."""
    line = StartLine(directory / f"{key}.line", driver.rank, driver.ranks, give_way)
    bound: Bound | None = None
    with MessageSocket.dial(directory / "socket", DECODER) as bench:
        bench.send(WorkerReady(key, driver.rank, os.getpid(), tuple(sorted(os.sched_getaffinity(0))), driver.detail))
        while True:
            try:
                order = bench.receive()
            except EOFError:
                break
            if isinstance(order, StopWorker):
                break
            if not isinstance(order, Measure):
                raise TypeError(f"a worker cannot do {order}")
            try:
                wanted = (OPERATIONS[order.op], order.c, order.dtype)
                if bound is None or (bound.operation, bound.c, bound.dtype) != wanted:
                    if bound is not None:
                        bound.call.close()
                    bound = None
                    bound = Bound(driver, *wanted)
                bench.send(_measure(bound, line, order))
            except NotImplementedError as error:
                bench.send(MeasurementFailed(str(error), unmeasured=True))
            except Exception as error:
                bench.send(MeasurementFailed("".join(traceback.format_exception_only(error)).strip()))
    if bound is not None:
        bound.call.close()
    driver.close()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), MpiDriver())
