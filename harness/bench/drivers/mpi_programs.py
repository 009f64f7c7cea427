"""The launchers of the compared MPIs: which program, in which environment.

Open MPI comes from the wheel beside this Python. MPICH's wheel has programs of the same names, so it lies in a folder
of its own, `peers/mpich` under this environment (`make peers`); HOLDFAST_MPICH names another one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast.ft.launch.launcher import memory_in, mpirun_path

OPENMPI, MPICH = "openmpi", "mpich"
INSTALL_MPI = "pip install 'holdfast[mpi]'"


@dataclass(frozen=True, slots=True)
class MpiLauncher:
    """How to start ranks: the words before the program's own, and additions to their environment."""

    words: tuple[str, ...]
    environment: dict[str, str]


def mpich_home() -> Path:
    """The folder of MPICH, whether or not it is there."""
    return Path(os.environ.get("HOLDFAST_MPICH") or Path(sys.prefix) / "peers" / "mpich")


def missing(mpi: str) -> str | None:
    """Why `mpi` cannot run here and what to install; None if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed; {INSTALL_MPI}"
    if mpi == MPICH and not (mpich_home() / "bin" / "mpiexec").exists():
        return f"no MPICH; pip install --no-deps --prefix {mpich_home()} mpich"
    if mpi == OPENMPI and mpirun_path() is None:
        return f"no mpirun; {INSTALL_MPI}"
    return None


def launcher(mpi: str, ranks: int, shared: Path) -> MpiLauncher:
    """The launcher of `mpi`. Raises RuntimeError if it is missing. Open MPI keeps its shared memory in `shared`."""
    if (reason := missing(mpi)) is not None:
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
