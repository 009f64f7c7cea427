"""The contestants of a bench: our backends and peer libraries, whether each can run here, and their running ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.ft.launch.launcher import memory_in, mpirun_path
from holdfast.harness.bench.drivers import GLOO, HOLDFAST, MPICH, OPENMPI
from holdfast.harness.bench.ranks import Measure, Measurement, be_rank, be_threads
from holdfast.harness.measure.worker import WorkerBarrier
from holdfast.harness.measure.workers import Place, StartedWorker, WorkerGroup, WorkerProgram, fork

PEERS = (GLOO, OPENMPI, MPICH)
PRELOAD = ("holdfast.comms", "holdfast.harness.bench.ranks", "holdfast.harness.bench.drivers")
"""What ranks import: once, in the zygote."""


def missing(contestant: str) -> str | None:
    """Why `contestant` cannot run here and what to install; None if it can."""
    if contestant in (OPENMPI, MPICH):
        return mpi_missing(contestant)
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
        start = launcher(OPENMPI if ours else contestant, ranks, place.shared)
        recovery = ["--with-ft", "ulfm"] if ours else []
        module = [sys.executable, "-m", "holdfast.harness.bench.ranks"]
        command = [*start.words, *recovery, *module, contestant, str(place.folder), str(ranks)]
        return [WorkerProgram(place, command, start.environment)]
    if backend == "inproc":
        return [fork(place, contestant, partial(be_threads, contestant, place.folder, ranks), preload=PRELOAD)]
    return [
        fork(place, f"{contestant} {rank}", partial(be_rank, contestant, place.folder, rank, ranks), preload=PRELOAD)
        for rank in range(ranks)
    ]


def _launcher_of(backend: str) -> str:
    """The program that must start the ranks of a backend together; "" if the zygote forks them."""
    from holdfast.comms.plugins.registry import registry

    found = registry().backends.get(backend)
    return "" if found is None else found.capabilities.launcher


# The launchers of the compared MPIs -----------------------------------------------------------------------------------
# Open MPI comes from the wheel beside this Python. MPICH's wheel has programs of the same names, so it lies in a folder
# of its own, `peers/mpich` under this environment (`make peers`); HOLDFAST_MPICH names another one.


INSTALL_MPI = "pip install 'holdfast[mpi]'"


@dataclass(frozen=True, slots=True)
class MpiLauncher:
    """How to start ranks: the words before the program's own, and additions to their environment."""

    words: tuple[str, ...]
    environment: dict[str, str]


def mpich_home() -> Path:
    """The folder of MPICH, whether or not it is there."""
    return Path(os.environ.get("HOLDFAST_MPICH") or Path(sys.prefix) / "peers" / "mpich")


def mpi_missing(mpi: str) -> str | None:
    """Why `mpi` cannot run here and what to install; None if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed; {INSTALL_MPI}"
    if mpi == MPICH and not (mpich_home() / "bin" / "mpiexec").exists():
        return f"no MPICH; pip install --no-deps --prefix {mpich_home()} mpich"
    if mpi == OPENMPI and mpirun_path() is None:
        return f"no mpirun; {INSTALL_MPI}"
    return None


def launcher(mpi: str, ranks: int, shared: Path) -> MpiLauncher:
    """The launcher of `mpi`. Raises RuntimeError if it is mpi_missing. Open MPI keeps its shared memory in `shared`."""
    if (reason := mpi_missing(mpi)) is not None:
        raise RuntimeError(reason)
    if mpi == MPICH:
        home = mpich_home()
        libraries = ":".join(filter(None, (str(home / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
        return MpiLauncher(
            (str(home / "bin" / "mpiexec"), "-n", str(ranks)),
            {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": libraries},
        )
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    words = (str(mpirun_path()), *as_root, *memory_in(shared), "--oversubscribe", "-n", str(ranks))
    return MpiLauncher(words, {"MPI4PY_MPIABI": "openmpi"})
