"""A host's part in a job on several hosts: its name, its address, and the checks before a start."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.errors import CorruptData
from holdfast.comms.system.keys import load_key
from holdfast.ft.environment.listen_address import choose_address, local_addresses
from holdfast.ft.environment.placement import placement
from holdfast.ft.launch.hosts.host_registry import HostRanks, HostRegistry, check_view
from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.ft.membership.view import View
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway

WATCH_SECONDS = 1.0
AWAY_SECONDS = 0.2


class JobWatch:
    """Follows the view of a job in a register that other hosts share, in a thread of its own.

    `view` is the newest view that the register has shown; while the register is away, it stays the last one.
    """

    def __init__(self, url: str) -> None:
        """Raises `RegisterAway` and `CorruptData` if the register cannot be read now."""
        self._register = Register.open(url)
        self._closing = threading.Event()
        try:
            self.view: View | None = self._register.read()
        except BaseException:
            self._register.close()
            raise
        self._thread = threading.Thread(target=self._follow, name="holdfast-job-watch", daemon=True)
        self._thread.start()

    def read(self) -> View | None:
        """The newest view, asked for now; the last one known if the register is away."""
        with contextlib.suppress(RegisterAway, CorruptData):
            self.view = self._register.read() or self.view
        return self.view

    def _follow(self) -> None:
        while not self._closing.is_set():
            known = self.view
            try:
                newest = self._register.watch(0 if known is None else known.epoch, WATCH_SECONDS)
            except (RegisterAway, CorruptData):
                self._closing.wait(AWAY_SECONDS)
                continue
            if newest is not None:
                self.view = newest

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._register.close()
        self._thread.join()


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
