"""The contestants of a bench: our backends and peer libraries, whether each can run here, and their running ranks."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from holdfast.harness.bench.collectives.ranks import (
    GLOO,
    HOLDFAST,
    LAYERED,
    MEMCPY,
    OBSERVED,
    Measure,
    Measurement,
    be_rank,
    be_threads,
)
from holdfast.harness.bench.drivers import mpi_programs, perftest
from holdfast.harness.bench.drivers.mpi_programs import MPICH, OPENMPI
from holdfast.harness.bench.drivers.perftest import UCX_PERFTEST, Perftest
from holdfast.harness.measure.barrier import WorkerBarrier
from holdfast.harness.measure.workers import Fork, Place, StartedWorker, WorkerGroup, WorkerProgram

__all__ = [
    "HOLDFAST",
    "MEMCPY",
    "PEERS",
    "ContestantGroup",
    "RankPlace",
    "RunningContestant",
    "missing",
    "shared",
    "start",
]

PEERS = (GLOO, OPENMPI, MPICH, UCX_PERFTEST)
PRELOAD = ("holdfast.comms", "holdfast.harness.bench.collectives.ranks", "holdfast.harness.bench.drivers.holdfast")
"""What ranks import: once, in the zygote."""


def missing(contestant: str) -> str | None:
    """Why `contestant` cannot run here and what to install; None if it can."""
    if contestant in (OPENMPI, MPICH):
        return mpi_programs.missing(contestant)
    if contestant == UCX_PERFTEST:
        return perftest.missing()
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


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a forked rank runs: `enter` moves it there, before it uses the network."""

    enter: Callable[[], object] = lambda: None
    environ: Mapping[str, str] = field(default_factory=dict)


class ContestantGroup(WorkerGroup):
    """The running ranks of one contestant, which are workers of ours; `placed` says where each runs."""

    def __init__(
        self, contestant: str, ranks: int, placed: Callable[[int], RankPlace] = lambda rank: RankPlace()
    ) -> None:
        self.ranks = ranks
        super().__init__(contestant, ranks, partial(_start_ranks, contestant, ranks, placed))

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


class SharedContestant:
    """One of several libraries in the same ranks."""

    def __init__(self, contestant: str, group: ContestantGroup) -> None:
        self.contestant, self._group = contestant, group

    @property
    def detail(self) -> str:
        """What the ranks say of themselves."""
        return self._group.detail

    def measure(self, order: Measure, timeout: float) -> list[Measurement]:
        """As `ContestantGroup.measure`, for this library."""
        return self._group.measure(msgspec.structs.replace(order, library=self.contestant), timeout)

    def close(self, gently: bool = True) -> None:
        """End the ranks, and so all libraries in them. Idempotent."""
        self._group.close(gently)


RunningContestant = ContestantGroup | SharedContestant | Perftest
"""The running ranks of a contestant."""


def shared(name: str) -> Callable[[str, int], RunningContestant]:
    """The `start` of a run whose contestants are the libraries in the ranks of `name`."""

    @functools.cache
    def group(ranks: int) -> ContestantGroup:
        return ContestantGroup(name, ranks)

    return lambda contestant, ranks: SharedContestant(contestant, group(ranks))


def _start_ranks(
    contestant: str, ranks: int, placed: Callable[[int], RankPlace], place: Place
) -> Sequence[StartedWorker]:
    """Start the processes of all ranks: under mpirun where the library needs it, else forked by the zygote."""
    WorkerBarrier.create(place.folder / "barrier", ranks)
    backend = _backend_of(contestant)
    ours = _launcher_of(backend) == "mpirun"
    if ours or contestant in (OPENMPI, MPICH):
        launcher = mpi_programs.launcher(OPENMPI if ours else contestant, ranks, place.shared)
        recovery = ["--with-ft", "ulfm"] if ours else []
        module = [sys.executable, "-m", "holdfast.harness.bench.collectives.ranks"]
        command = [*launcher.words, *recovery, *module, contestant, str(place.folder), str(ranks)]
        return [WorkerProgram(place, command, launcher.environment)]
    if backend == "inproc":
        return [Fork(place, contestant, partial(be_threads, contestant, place.folder, ranks), preload=PRELOAD)]
    started = []
    for rank, where in enumerate(map(placed, range(ranks))):
        be = partial(_enter_and_be_rank, where.enter, contestant, place.folder, rank, ranks)
        started.append(Fork(place, f"{contestant} {rank}", be, preload=PRELOAD, environ=where.environ))
    return started


def _enter_and_be_rank(enter: Callable[[], object], contestant: str, folder: Path, rank: int, ranks: int) -> None:
    enter()
    be_rank(contestant, folder, rank, ranks)


def _backend_of(contestant: str) -> str:
    """The backend of ours in the ranks of this contestant; "" without one."""
    kind, _, backend = contestant.rpartition(":")
    return backend if f"{kind}:" in (HOLDFAST, LAYERED, OBSERVED) else ""


def _launcher_of(backend: str) -> str:
    """The program that must start the ranks of a backend together; "" if the zygote forks them."""
    from holdfast.comms.plugins.registry import registry

    found = registry().backends.get(backend)
    return "" if found is None else found.capabilities.launcher


def start(contestant: str, ranks: int) -> RunningContestant:
    """Start `ranks` ranks of `contestant`. Raises `WorkerFailed` with its last words if it does not come up."""
    return Perftest(ranks) if contestant == UCX_PERFTEST else ContestantGroup(contestant, ranks)
