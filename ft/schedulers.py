"""What a scheduler says: where it has put this process, of how many, and the nodes of a SLURM job.

`placement` is a pure function of variables, read from the inside out: torchrun, an MPI launcher, SLURM, Kubernetes. A
process that none of them started has an empty placement, and needs none: it joins its job by name, and its rank comes
from the view.

`slurm_hosts` are the nodes as hosts of a `MonarchEngine`. Monarch's own `SlurmJob` submits a job of plain Monarch
hosts, and refuses a part of the nodes. Here the job is the user's, `srun` starts `monarch_host` on each node, and a
node that is lost takes no other with it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.comms.errors import HoldfastError
from holdfast.ft.listen_address import choose_address, join_address, local_addresses

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


PORT = 26600
"""The port of the first node; each further one has the next, as nodes may be one machine."""

WORD = re.compile(r"slurm(?::(\d{1,5}))?")
"""What stands for the nodes of the job: `slurm`, or `slurm:PORT`."""

_SECONDS = 30.0


class NotUnderSlurm(HoldfastError):
    """The hosts are to be the nodes of a SLURM job, and SLURM does not name them, because of `why`."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"the nodes of the SLURM job are not known: {why}; start the run within sbatch or salloc, or name the "
            "addresses of the hosts"
        )


def slurm_hosts(word: str) -> tuple[str, ...]:
    """The address of each node of this job, in SLURM's order. Raises `NotUnderSlurm`."""
    nodes = _nodes()
    addresses = _addresses(nodes)
    first = _first_port(word)
    return tuple(f"tcp://{join_address(addresses[node], first + index)}" for index, node in enumerate(nodes))


def own_slurm_host(word: str) -> str:
    """The address of the node on which `srun` started this process. Raises `NotUnderSlurm`."""
    nodes, mine = _nodes(), os.environ.get("SLURMD_NODENAME", "")
    if mine not in nodes:
        raise NotUnderSlurm(f"SLURMD_NODENAME={mine!r} is none of the job's nodes, {', '.join(nodes)}")
    return f"tcp://{join_address(_addresses([mine])[mine], _first_port(word) + nodes.index(mine))}"


def found_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Hosts of a configuration, with the word `slurm` replaced by the job's nodes. Raises `NotUnderSlurm`."""
    return slurm_hosts(hosts[0]) if len(hosts) == 1 and WORD.fullmatch(hosts[0]) else hosts


def _first_port(word: str) -> int:
    found = WORD.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r}: write slurm, or slurm:PORT")
    return int(found[1] or PORT)


def _nodes() -> list[str]:
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    if not listed:
        raise NotUnderSlurm("SLURM_JOB_NODELIST is not set")
    return _scontrol("hostnames", listed).split()


def _addresses(nodes: list[str]) -> dict[str, str]:
    """The IP address at which SLURM itself reaches each node. A loopback address is this node's own one."""
    said = _scontrol("node", ",".join(nodes), "--oneliner")
    names = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", said, re.MULTILINE))
    found = {}
    for node in nodes:
        name = names.get(node, node)
        try:
            address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise NotUnderSlurm(f"node {node} has no address: {name}: {error}") from error
        if ipaddress.ip_address(address).is_loopback:
            interface = os.environ.get("HOLDFAST_INTERFACE", "")
            address = choose_address(interface, f"node {node} is this machine, called {name}", local_addresses())
        found[node] = address
    return found


def _scontrol(*words: str) -> str:
    command = ["scontrol", "show", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotUnderSlurm(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NotUnderSlurm(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
