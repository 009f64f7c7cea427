"""Where a scheduler has put this process: its host, its job, and how many there are. A pure function of variables.

Read from the inside out: torchrun, an MPI launcher, SLURM, Kubernetes. A process that none of them started has an empty
placement, and needs none: it joins its job by name, and its rank comes from the view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_TASKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Placement:
    """What the variables of `source` say; None and "" for what they do not.

    It has started `size` processes on `nodes` hosts; `node` is the name of this one. `job` names the scheduler's job,
    another one after each restart as a whole. `spread`: processes of the job may be on other hosts. `ends_together`:
    the scheduler ends, or starts again, all processes when one fails.
    """

    source: str = ""
    node: str = ""
    nodes: int | None = None
    size: int | None = None
    job: str = ""
    spread: bool = False
    ends_together: bool = False


def placement(environ: Mapping[str, str]) -> Placement:
    """The placement of a process with these variables. Raises ValueError for a number that is none."""
    for mark, read in _SOURCES.items():
        if environ.get(mark):
            return read(environ)
    return Placement()


def _torchrun(environ: Mapping[str, str]) -> Placement:
    size, local = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    nodes = _number(environ, "GROUP_WORLD_SIZE") or (-(-size // local) if size and local else None)
    run, restarts = environ.get("TORCHELASTIC_RUN_ID", ""), _number(environ, "TORCHELASTIC_RESTART_COUNT")
    return Placement(
        "torchrun",
        nodes=nodes,
        size=size,
        job=_restarted(f"torchrun-{run}", restarts) if run not in ("", "none") else "",
        spread=bool(nodes and nodes > 1),
        ends_together=bool(_number(environ, "TORCHELASTIC_MAX_RESTARTS")) or bool(local and local > 1),
    )


def _open_mpi(environ: Mapping[str, str]) -> Placement:
    return _mpi(environ, "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _pmi(environ: Mapping[str, str]) -> Placement:
    return _mpi(environ, "PMI", "PMI_SIZE", "MPI_LOCALNRANKS")


def _mpi(environ: Mapping[str, str], source: str, *names: str) -> Placement:
    size, local = (_number(environ, name) for name in names)
    node = environ.get("PMIX_HOSTNAME", "") or environ.get("SLURMD_NODENAME", "")
    return Placement(source, node, size=size, spread=bool(size and local and size > local))


def _slurm(environ: Mapping[str, str]) -> Placement:
    """A task of a step (`srun`). The batch script itself is one process, whatever the size of its allocation."""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    job = environ.get("SLURM_JOB_ID", "")
    return Placement(
        "SLURM",
        node=environ.get("SLURMD_NODENAME", ""),
        nodes=nodes,
        size=_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        job=_restarted(f"slurm-{job}", _number(environ, "SLURM_RESTART_COUNT")) if job else "",
        spread=bool(nodes and nodes > 1),
    )


def _kubernetes(environ: Mapping[str, str]) -> Placement:
    """A pod of an Indexed Job. The names of a JobSet are no variables unless its manifest makes them so."""
    jobset = environ.get("JOBSET_NAME", "")
    return Placement(
        "Kubernetes",
        node=environ.get("HOSTNAME", ""),
        job=_restarted(jobset, _number(environ, "JOBSET_RESTART_ATTEMPT")) if jobset else "",
        spread=True,
    )


_SOURCES = {
    "TORCHELASTIC_RUN_ID": _torchrun,
    "OMPI_COMM_WORLD_RANK": _open_mpi,
    "MPI_LOCALNRANKS": _pmi,
    "SLURM_STEP_ID": _slurm,
    "PMI_RANK": _pmi,
    "JOB_COMPLETION_INDEX": _kubernetes,
}
"""The variable by which each source is known, from the inside out: srun may start torchrun, and a pod both."""


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that is set; None if none is."""
    for name in names:
        if text := environ.get(name, "").strip():
            if not text.isdecimal() or int(text) > MOST_TASKS:
                raise ValueError(f"{name}={text!r} in the environment is not a number of a scheduler")
            return int(text)
    return None


def _restarted(job: str, restarts: int | None) -> str:
    """The name of a job after so many restarts of it: no process joins a run that has ended."""
    return f"{job}.{restarts}" if restarts else job
