"""A host's part in a job on several hosts: its name, its address, and the checks before a start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.system.keys import load_key
from holdfast.ft.environment.listen_address import choose_address
from holdfast.ft.environment.local_addresses import local_addresses
from holdfast.ft.environment.placement import placement
from holdfast.ft.launch.hosts.host_registry import HostRanks, HostRegistry, check_view
from holdfast.ft.launch.hosts.job_watch import JobWatch
from holdfast.ft.launch.torch_environment import ReservedPort


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One of the `nodes` hosts of a job, with the name `node`. It listens on `interface`."""

    nodes: int
    register: str
    key_file: Path
    node: str
    interface: str = ""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes={self.nodes} must be at least 1")
        if self.nodes > 1 and self.register.partition("://")[0] in ("sqlite", "memory"):
            raise ValueError(
                f"register {self.register} is on one host, and the job on {self.nodes}: use etcd://host:2379/name"
            )


def host_name(environ: Mapping[str, str]) -> str:
    """The name of this host: HOLDFAST_NODE, the scheduler's name for it, or the kernel's."""
    return environ.get("HOLDFAST_NODE") or placement(environ).node or socket.gethostname()


class HostAgent:
    """Registers this host, which starts `members` of the `size` members of a job, and follows the job.

    A context manager. `address` is where the other hosts reach this one, `interface` the interface that has it; `torch`
    has the variables of its processes for torch.distributed. Raises `AddressNeeded`, `NoSuchInterface`, `KeyRefused`,
    `RegisterAway`, and what `HostRegistry` and `check_view` raise.
    """

    def __init__(self, plan: HostPlan, job: str, members: int, size: int) -> None:
        here = local_addresses()
        why = f"the job is on {plan.nodes} hosts" if plan.nodes > 1 else ""
        self.address = choose_address(plan.interface, why, here)
        self.interface = next((each.interface for each in here if str(each.address) == self.address), None)
        key = load_key(plan.key_file)
        with contextlib.ExitStack() as undo:
            self.watch = undo.enter_context(contextlib.closing(JobWatch(plan.register)))
            check_view(plan.register, self.watch.view, job, key)
            port = undo.enter_context(ReservedPort(self.address)).number
            asked = HostRanks(members, size, port)
            registry = HostRegistry(plan.register, job, key, plan.node, self.address, asked)
            undo.enter_context(contextlib.closing(registry))
            self.torch, self.hosts = registry.torch, registry.hosts
            self._undo = undo.pop_all()

    def __enter__(self) -> HostAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
