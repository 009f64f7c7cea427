"""A host's part in a job on several hosts: its entry in the register, and its view of the job.

Each host agent enters the name of its host; no two have one name. The entry says where its agent listens. An agent that
finds its name taken dials the other one: if that does not answer, it has ended, and the name is free. No clock is
compared, and a host that comes back needs no clean-up.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError
from holdfast.comms.system.keys import load_key
from holdfast.comms.transport.liveness import this_host
from holdfast.ft.control.errors import ControlError, WrongKey
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.control.rpc import AsyncRpcServer, dial_rpc
from holdfast.ft.launch.job_contract import ReservedPort, TorchEnvironment
from holdfast.ft.listen_address import choose_address, local_addresses, split_address
from holdfast.ft.membership.view import JobIdentity, View
from holdfast.ft.node.register import Register
from holdfast.ft.node.runtime import new_identity
from holdfast.ft.registers import RegisterAway, change_cell, open_cell
from holdfast.ft.schedulers import placement
from holdfast.ft.settings import check_identity, identity_of

CELL = "hosts"
DIAL_SECONDS = 2.0
START_SECONDS = 10.0


class HostNameTaken(HoldfastError):
    """The name `node` is taken by another host of the job, with a live agent at `address`."""

    def __init__(self, node: str, address: str) -> None:
        self.node, self.address = node, address
        super().__init__(
            f"host name {node!r} is taken: the agent at {address} has it, and runs; give each host a name of its own "
            "by --node, and start one agent on each"
        )


@dataclass(frozen=True, slots=True)
class HostRanks:
    """What a host asks for: up to `count` of the job's `size` ranks. If it gets rank 0, that listens at `port`."""

    count: int
    size: int
    port: int


class HostEntry(msgspec.Struct, frozen=True):
    """A host of the job: its agent's identity and address, and which machine it is.

    For programs of torch.distributed it has `count` ranks from `first` on. Rank 0 listens at `port`.
    """

    agent: str
    address: str
    machine: str
    first: int = 0
    count: int = 0
    port: int = 0


class HostTable(msgspec.Struct, frozen=True):
    """All hosts of a job by name, and the job on which they must agree."""

    job: JobIdentity
    hosts: dict[str, HostEntry] = {}


class HostRegistry:
    """This host's entry, from construction to `close`.

    `torch` has the variables for this host's processes: the first host that comes has the lowest ranks, and a host that
    comes back gets its own again. Raises `Mismatch` for a register of another job or another version of holdfast,
    `WrongKey`, `HostNameTaken`, and `RegisterAway`.
    """

    def __init__(
        self, url: str, job: str, key: bytes, node: str, address: str, ranks: HostRanks = HostRanks(0, 0, 0)
    ) -> None:
        self._node, self._job, self._key, self._ranks = node, job, key, ranks
        self._url = url
        self._empty = HostTable(identity_of(key, job))
        self._agent = f"host-{new_identity()}"
        with contextlib.ExitStack() as undo:
            self._cell = undo.enter_context(contextlib.closing(open_cell(url, CELL)))
            self._thread = LoopThread(f"holdfast-{self._agent}")
            undo.callback(self._thread.close)
            self._server = self._thread.run(self._listen(address), START_SECONDS)
            undo.callback(lambda: self._thread.run(self._server.close(), START_SECONDS))
            self._entry = HostEntry(self._agent, self._server.address, this_host(), port=ranks.port)
            table = self._change(self._enter)
            undo.callback(self._leave)
            mine = table.hosts[node]
            master = next((each for each in table.hosts.values() if each.count and each.first == 0), mine)
            host, _ = split_address(master.address)
            self.torch = TorchEnvironment(ranks.size, mine.count, mine.first, host, master.port)
            self._undo = undo.pop_all()

    def hosts(self) -> dict[str, HostEntry]:
        """The hosts that take part now, by name. Raises `RegisterAway`, `CorruptData`."""
        return self._read()[1].hosts

    def close(self) -> None:
        """Take the entry out, if the register can be reached. Idempotent."""
        self._undo.close()

    async def _listen(self, address: str) -> AsyncRpcServer:
        server = AsyncRpcServer(key=self._key, job=self._job, identity=self._agent, handlers={})
        await server.start(address)
        return server

    def _enter(self, table: HostTable) -> HostTable:
        there = table.hosts.get(self._node)
        if there is not None and there.agent != self._agent and self._runs(there):
            raise HostNameTaken(self._node, there.address)
        others = {node: entry for node, entry in table.hosts.items() if node != self._node}
        first, count = _free_ranks(self._ranks, there, others.values())
        entry = msgspec.structs.replace(self._entry, first=first, count=count)
        return msgspec.structs.replace(table, hosts=others | {self._node: entry})

    def _runs(self, there: HostEntry) -> bool:
        """Whether the agent of an entry is alive. Raises `WrongKey` if it has another key."""

        async def peer() -> str:
            line = await dial_rpc(
                there.address, key=self._key, job=self._job, identity=self._agent, timeout=DIAL_SECONDS
            )
            line.close()
            return line.peer

        try:
            return self._thread.run(peer(), START_SECONDS) == there.agent
        except WrongKey:
            raise
        except (ControlError, ValueError):
            return False

    def _leave(self) -> None:
        def without(table: HostTable) -> HostTable:
            hosts = {node: entry for node, entry in table.hosts.items() if entry.agent != self._agent}
            return msgspec.structs.replace(table, hosts=hosts)

        with contextlib.suppress(HoldfastError):
            self._change(without)

    def _change(self, change: Callable[[HostTable], HostTable]) -> HostTable:
        """Replace the table by what `change` makes of it, and return that."""
        return change_cell(self._url, self._read, self._write, change)[2]

    def _read(self) -> tuple[int, HostTable]:
        version, data = self._cell.read()
        return version, self._checked(data) if data else self._empty

    def _write(self, version: int, table: HostTable) -> bool:
        return self._cell.compare_and_set(version, msgspec.msgpack.encode(table))

    def _checked(self, data: bytes) -> HostTable:
        try:
            table = msgspec.msgpack.decode(data, type=HostTable)
        except UNDECODABLE as error:
            raise CorruptData(f"what {self._url} holds is no table of hosts: {error}; use another register") from error
        check_identity(self._url, self._empty.job, table.job)
        return table


def _free_ranks(asked: HostRanks, before: HostEntry | None, others: Iterable[HostEntry]) -> tuple[int, int]:
    """The first rank and the number of ranks for a host; (0, 0) if the `others` have all.

    It gets those that it had `before`, else the first gap between those of the others that is wide enough. The last
    host may get fewer than it asks for.
    """
    if before is not None and before.count and before.count == min(asked.count, asked.size - before.first):
        return before.first, before.count
    start = 0
    for first, count in sorted((each.first, each.count) for each in others if each.count):
        if start + asked.count <= first:
            break
        start = max(start, first + count)
    count = min(asked.count, asked.size - start)
    return (start, count) if count > 0 else (0, 0)


def check_view(url: str, view: View | None, job: str, key: bytes) -> None:
    """Raise, before anything is started, what the processes of a host would raise when they join `view`."""
    if view is None:
        return
    check_identity(url, identity_of(key, job), view.job.identity)
    if view.phase in ("finished", "failed"):
        raise HoldfastError(f"job {job!r} has ended ({view.reason}): start it under another name or another register")


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
