"""How fast is recovery beside MPI's own fault tolerance? `python docs/experiments/recovery_ulfm.py`.

First `holdfast bench recovery` is measured, then Open MPI's ULFM, called as its users call it: ranks under mpirun do
nothing but Allreduce. One is killed; each survivor revokes the communicator at its first error, shrinks it, and reduces
again on the rest. What counts is the time from just before the signal to the end of the last survivor's first correct
Allreduce, as in the bench. With `--rank` the program is one of the ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import counted
from holdfast.harness.bench.command import RecoveryPlan
from holdfast.harness.bench.contestants import launcher
from holdfast.harness.bench.drivers import OPENMPI
from holdfast.harness.bench.recovery import LIMIT, SETTLE, show_recovery
from holdfast.harness.bench.recovery import run as run_bench
from holdfast.harness.measure.results import Noise
from holdfast.harness.measure.stats import Spread
from holdfast.harness.measure.worker import serve
from holdfast.harness.measure.workers import OpFailed, Place, StartedWorker, WorkerFailed, WorkerGroup, WorkerProgram
from holdfast.harness.recovery import NotRecovered

HANGS_SECONDS = 10.0
"""Seconds without a recovery after which a job counts as hung."""


class PeerRecovery(msgspec.Struct, frozen=True):
    """Milliseconds of each kill from the signal to the survivors' next correct result, and their spread.

    `hung` counts the jobs that did not recover in time; `kills` and `total` leave them out.
    """

    library: str
    ranks: int
    nbytes: int
    others: float
    kills: tuple[float, ...]
    total: Spread
    hung: int


class UlfmRank:
    """One rank of the job: its method is called once."""

    def __init__(self, comm: Any, nbytes: int) -> None:
        self._comm = comm
        self._input = np.full(max(1, nbytes // 4), comm.rank + 1, np.float32)

    def outlive(self) -> float:
        """Reduce until another rank dies, and once more with the survivors; when that was done (CLOCK_MONOTONIC)."""
        from mpi4py import MPI

        out = np.empty_like(self._input)
        try:
            while True:
                self._comm.Allreduce(self._input, out)
        except MPI.Exception:
            self._comm.Revoke()
        left = self._comm.Shrink()
        self._input[:] = left.rank + 1
        left.Allreduce(self._input, out)
        completed = time.monotonic()
        if (out != left.size * (left.size + 1) / 2).any():
            raise ArithmeticError(f"the Allreduce of {left.size} survivors is wrong")
        return completed


def _start(ranks: int, nbytes: int, place: Place) -> Sequence[StartedWorker]:
    how = launcher(OPENMPI, ranks, place.shared)
    module = [sys.executable, sys.argv[0], "--rank", str(place.address), str(nbytes)]
    return [
        WorkerProgram(
            place, [*how.words, "--with-ft", "ulfm", *module], {**how.environment, "TMPDIR": str(place.folder)}
        )
    ]


def _kill_one(ranks: int, nbytes: int, victim: int, wait: float) -> tuple[str, float]:
    """Kill one rank of a job of its own; returns the library's name of itself, and the milliseconds."""
    try:
        with WorkerGroup("ULFM", ranks, partial(_start, ranks, nbytes), LIMIT) as group:
            for worker in group.workers:
                worker.send("outlive")
            time.sleep(wait)
            killed = time.monotonic()
            group.workers[victim].kill()
            last = max(each.answer(float, HANGS_SECONDS) for each in group.workers if each.rank != victim)
            for worker in group.workers:
                worker.kill()  # mpirun then ends, and has waited for them: their CPU time counts as ours
            return group.detail, 1e3 * (last - killed)
    except (WorkerFailed, OpFailed) as error:
        raise NotRecovered(f"ranks of Open MPI did not come, or not back: {error}") from error


def run(ranks: int, kills: int, nbytes: int, seed: int, progress: Callable[[str], None]) -> PeerRecovery:
    """Kill one of `ranks` ranks in each of `kills` jobs.

    Raises RuntimeError without Open MPI, `NotRecovered` if more jobs hang than recover.
    """
    choose, taken, library, hung, noise = random.Random(seed), list[float](), "", 0, Noise()
    while len(taken) < kills:
        try:
            library, milliseconds = _kill_one(ranks, nbytes, choose.randrange(ranks), SETTLE * (1 + choose.random()))
        except NotRecovered:
            hung += 1
            if hung > kills:
                raise
            continue
        taken.append(milliseconds)
        progress(f"{len(taken)} of {kills} kills: {milliseconds:.1f} ms; {counted(hung, 'job')} hung")
    return PeerRecovery(library, ranks, nbytes, noise.cpus(), tuple(taken), Spread.of(taken), hung)


def _be_a_rank(address: str, nbytes: int) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    library = " ".join(MPI.Get_library_version().split(",")[0].split())
    serve(Path(address), UlfmRank(comm, nbytes), "rank", comm.rank, f"{library} ULFM")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--seed", type=int, default=0, help="chooses who is killed, and when")
    parser.add_argument("--json", action="store_true")
    asked, notes = parser.parse_args(), console(stderr=True)
    plan = RecoveryPlan(asked.backend, asked.ranks, asked.kills, seed=asked.seed)
    ours = run_bench(plan, notes.print)
    peer = run(plan.ranks, plan.kills, plan.nbytes, plan.seed, notes.print)
    if asked.json:
        print_json({"holdfast": ours, "peer": peer})
        return
    show_recovery(ours, console())
    spread = peer.total
    console().print(
        f"{peer.library}, {counted(peer.ranks, 'rank')}, {counted(len(peer.kills), 'kill')}: "
        f"median {spread.median:.2f} ms, p90 {spread.p90:.2f}, p99 {spread.p99:.2f}, max {spread.max:.2f}; "
        f"{counted(peer.hung, 'job')} did not come back; others used {peer.others:.2f} CPUs"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _be_a_rank(sys.argv[2], int(sys.argv[3]))
    else:
        main()
