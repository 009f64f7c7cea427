"""The nodes of a SLURM job as hosts of a `MonarchEngine`, from the variables that SLURM sets.

Monarch's own `SlurmJob` submits a job of plain Monarch hosts, and refuses a part of the nodes. Here the job is the
user's, `srun` starts `monarch_host` on each node, and a node that is lost takes no other with it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess

from holdfast.comms.errors import HoldfastError
from holdfast.ft.environment.listen_address import choose_address, join_address, local_addresses

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
