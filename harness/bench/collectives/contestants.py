"""The contestants of a bench: our backends and peer libraries, whether each can run here, and their running ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from holdfast.harness.bench.collectives.ranks import (
    GLOO,
    HOLDFAST,
    MEMCPY,
    Measure,
    Measurement,
    be_rank,
    be_threads,
)
from holdfast.harness.bench.drivers import mpi_programs
from holdfast.harness.bench.drivers.mpi_programs import MPICH, OPENMPI
from holdfast.harness.measure.barrier import WorkerBarrier
from holdfast.harness.measure.workers import Fork, Place, StartedWorker, WorkerGroup, WorkerProgram

__all__ = [
    "HOLDFAST",
    "MEMCPY",
    "PEERS",
    "ContestantGroup",
    "missing",
]

PEERS = (GLOO, OPENMPI, MPICH)
PRELOAD = ("holdfast.comms", "holdfast.harness.bench.collectives.ranks", "holdfast.harness.bench.drivers.holdfast")
"""What ranks import: once, in the zygote."""


def missing(contestant: str) -> str | None:
    """Why `contestant` cannot run here and what to install; None if it can."""
    if contestant in (OPENMPI, MPICH):
        return mpi_programs.missing(contestant)
    if contestant.startswith(HOLDFAST):
        return _backend_missing(contestant.removeprefix(HOLDFAST))
    return None


def _backend_missing(backend: str) -> str | None:
    from holdfast.comms.errors import BackendUnavailable
    from holdfast.comms.plugins.registry import registry

    try:
        missing = registry().backend(backend).missing
    except BackendUnavailable as error:
        return str(error)
    return None if missing is None else f"{missing.reason}; {missing.install_hint}"


class ContestantGroup(WorkerGroup):
    """The running ranks of one contestant, which are workers of ours."""

    def __init__(self, contestant: str, ranks: int) -> None:
        self.ranks = ranks
        super().__init__(contestant, ranks, partial(_start_ranks, contestant, ranks))

    @property
    def detail(self) -> str:
        """The library, its version, and the CPUs that its ranks may run on."""
        cpus = [",".join(map(str, worker.cpus)) for worker in self.workers]
        everywhere = set(cpus) == {",".join(map(str, sorted(os.sched_getaffinity(0))))}
        placing = "not bound" if everywhere else "bound to CPUs " + " | ".join(cpus)
        return f"{super().detail}; {placing}"

    def measure(self, order: Measure, timeout: float) -> list[Measurement]:
        """Give the order to all ranks; their answers by rank. Raises as `workers.call`."""
        return self.call("measure", order, into=Measurement, timeout=timeout)


def _start_ranks(contestant: str, ranks: int, place: Place) -> Sequence[StartedWorker]:
    """Start the processes of all ranks: under mpirun where the library needs it, else forked by the zygote."""
    WorkerBarrier.create(place.folder / "barrier", ranks)
    backend = contestant.removeprefix(HOLDFAST) if contestant.startswith(HOLDFAST) else ""
    ours = _launcher_of(backend) == "mpirun"
    if ours or contestant in (OPENMPI, MPICH):
        launcher = mpi_programs.launcher(OPENMPI if ours else contestant, ranks, place.shared)
        recovery = ["--with-ft", "ulfm"] if ours else []
        module = [sys.executable, "-m", "holdfast.harness.bench.collectives.ranks"]
        command = [*launcher.words, *recovery, *module, contestant, str(place.folder), str(ranks)]
        return [WorkerProgram(place, command, launcher.environment)]
    if backend == "inproc":
        return [Fork(place, contestant, partial(be_threads, contestant, place.folder, ranks), preload=PRELOAD)]
    return [
        Fork(place, f"{contestant} {rank}", partial(be_rank, contestant, place.folder, rank, ranks), preload=PRELOAD)
        for rank in range(ranks)
    ]


def _launcher_of(backend: str) -> str:
    """The program that must start the ranks of a backend together; "" if the zygote forks them."""
    from holdfast.comms.plugins.registry import registry

    found = registry().backends.get(backend)
    return "" if found is None else found.capabilities.launcher
