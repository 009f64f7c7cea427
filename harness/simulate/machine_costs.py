"""Measures on this machine what a simulation has for parameters: delays, and processor time of what members do.

Nothing is broken meanwhile, and no view changes, so a simulation that gets these numbers still has to predict.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, stdev

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.system.paths import url_of
from holdfast.ft.console.units import counted
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.control.rpc import AsyncRpcServer, RpcConnection, dial_rpc
from holdfast.ft.detectors.process_watch import ProcessWatch
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.node.register import Register
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.simulate.core.schedule import MachineModel, NetworkModel

ROUNDS = 7
LIMIT = 60.0
COOL_SECONDS = 0.1
"""Before each turn all ranks sleep so long: members that a fault wakes have cold caches, too."""
OPS = 3
"""Ops of a first step: the votes, the sum, the barrier before the commit."""
KEY = b"k" * 32


class MachineCosts(msgspec.Struct, frozen=True):
    """What was measured with `ranks` processes over `backend`, in seconds (medians).

    `link` is one message between two members, and `spread` the standard deviation of its logarithm. `message` is the
    processor time of a message when a member tells all others at once, and they answer. `read` and `write` are calls of
    the register. `connect` is from the last rank that begins to connect to the last that is done, `op` an op of the new
    communicator. `gone` is from SIGKILL until the watch of another member reports the end. The processes share `cores`.
    """

    ranks: int
    backend: str
    cores: int
    link: float
    spread: float
    message: float
    read: float
    write: float
    connect: float
    op: float
    gone: float

    def network(self) -> NetworkModel:
        """The network with these delays: on one machine a message within a host takes as long as one between hosts."""
        return NetworkModel(latency=self.link, local=self.link, spread=self.spread, register=self.write)

    def machine(self) -> MachineModel:
        """The machine with these costs. What all ranks do at once takes a rank its share of the cores' time."""
        share = self.cores / self.ranks
        return MachineModel(
            cores=self.cores,
            message=self.message,
            op=self.op * share,
            connect=self.connect * share,
            gone=self.gone,
            thread=0.0,
            late=0.0,
        )


class _RankTimes(msgspec.Struct):
    """What one rank measured: the times of each round, its processor seconds for messages, and on rank 0 the delays."""

    entered: list[float]
    connected: list[float]
    reduced: list[float]
    processor: float = 0.0
    links: list[float] = []
    reads: list[float] = []
    writes: list[float] = []


def measure_costs(ranks: int, backend: str, progress: Callable[[str], None] = lambda text: None) -> MachineCosts:
    """Measure with `ranks` processes over `backend`. Takes about three seconds."""
    progress(f"measuring the machine with {counted(ranks, 'rank')} over {backend}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        LocalCluster(ranks, backend, timeout=LIMIT, threads=1, echo=False, environ={"HOLDFAST_CHECK": "0"}) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        times = cluster.run(_measure_rank, store.port, folder)
        first = cluster.outcomes(_kill_others)[0]
        if first.error is not None:
            raise first.error
        gone: list[float] = first.value
    rounds = range(ROUNDS)
    begun = [max(rank.entered[number] for rank in times) for number in rounds]
    stand = [max(rank.connected[number] for rank in times) for number in rounds]
    over = [max(rank.reduced[number] for rank in times) for number in rounds]
    return MachineCosts(
        ranks=ranks,
        backend=backend,
        cores=len(os.sched_getaffinity(0)),
        link=median(times[0].links),
        spread=stdev(map(_log, times[0].links)),
        message=sum(rank.processor for rank in times) / (2 * ROUNDS * (ranks - 1)),
        read=median(times[0].reads),
        write=median(times[0].writes),
        connect=median(stand[number] - begun[number] for number in rounds),
        op=median(over[number] - stand[number] for number in rounds) / OPS,
        gone=median(gone),
    )


def _log(seconds: float) -> float:
    return float(torch.tensor(seconds, dtype=torch.float64).log())


def _measure_rank(comm: Communicator, port: int, folder: str) -> _RankTimes:
    """The body of a rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    times = _RankTimes([], [], [])
    _measure_messages(comm, store, times)
    if comm.rank == 0:
        _measure_register(comm, Path(folder), times)
    _measure_connects(comm, store, times)
    return times


def _measure_messages(comm: Communicator, store: dist.Store, times: _RankTimes) -> None:
    """Let rank 0 call all others at once, and one of them alone, over the control channel."""
    loop = LoopThread("messages")
    try:
        if comm.rank:
            server = AsyncRpcServer(
                key=KEY, job="job", identity=str(comm.rank), handlers={"echo": lambda _, body: body}
            )
            loop.run(server.start(), LIMIT)
            comm.all_gather_object(server.address)
            began = time.process_time()
            store.get("messages are over")  # sleeps in the kernel: no processor time
            times.processor = time.process_time() - began
            loop.run(server.close(), LIMIT)
        else:
            links = loop.run(_dial(comm.all_gather_object("")[1:]), LIMIT)
            began = time.process_time()
            for _ in range(ROUNDS):
                time.sleep(COOL_SECONDS)
                loop.run(_call(links), LIMIT)
            times.processor = time.process_time() - began
            for _ in range(3 * ROUNDS):
                times.links.append(loop.run(_call(links[:1]), LIMIT) / 2)
            store.set("messages are over", "")
    finally:
        loop.close()


async def _dial(addresses: list[str]) -> list[RpcConnection]:
    return [await dial_rpc(address, key=KEY, job="job", identity="0") for address in addresses]


async def _call(links: list[RpcConnection]) -> float:
    began = time.monotonic()
    await asyncio.gather(*(link.call("echo", bytes(200)) for link in links))
    return time.monotonic() - began


def _measure_register(comm: Communicator, folder: Path, times: _RankTimes) -> None:
    """Time calls of a register as jobs of this machine have it, with a view of this size."""
    members = tuple(Member(f"p{rank}", f"127.0.0.1:{7000 + rank}", peer) for rank, peer in enumerate(comm.peers))
    job = Job("job", comm.size, 1, comm.size, (comm.backend,), comm.backend)
    folder.chmod(0o700)
    with Register.open(url_of("sqlite", folder / "register.sqlite")) as register:
        for epoch in range(1, 3 * ROUNDS):
            began = time.monotonic()
            register.compare_and_set(epoch - 1, View(epoch, "running", members, job, "measured"))
            written = time.monotonic()
            register.read()
            times.writes.append(written - began)
            times.reads.append(time.monotonic() - written)


def _measure_connects(comm: Communicator, store: dist.Store, times: _RankTimes) -> None:
    """Connect the ranks repeatedly, as a session does after a fault, and run a first step's ops."""
    before: Communicator | None = None
    numbers, gathered = torch.ones(1, 8, dtype=torch.int64), torch.empty(comm.size, 8, dtype=torch.int64)
    for number in range(ROUNDS + 1):  # the first one has no communicator before it
        comm.barrier()
        time.sleep(COOL_SECONDS)
        comm.barrier()
        entered = time.monotonic()
        if before is not None:
            before.abort()
        new = connect_members(
            comm.backend,
            KnownMembers(
                rank=comm.rank,
                peers=comm.peers,
                store=dist.PrefixStore(f"epoch {number}", store),
                epoch=number + 2,
                previous=before,
            ),
            timeout=LIMIT,
        )
        connected = time.monotonic()
        new.all_gather_single(gathered, numbers)
        new.all_reduce(torch.ones(1))
        new.barrier()
        if number:
            times.entered.append(entered)
            times.connected.append(connected)
            times.reduced.append(time.monotonic())
        if before is not None:
            before.close()
        before = new
    assert before is not None
    before.close()


def _kill_others(comm: Communicator) -> list[float]:
    """Let rank 0 kill one other after the other; the seconds until the production watch reports each end."""
    loop, second = LoopThread("watched"), LoopThread("watched too")  # sessions have threads too, and name some of them
    threads = comm.all_gather_object((loop.native_id, second.native_id))
    if comm.rank:
        time.sleep(LIMIT)
    members = [
        Member(str(rank), "", peer, threads=tuple(filter(None, threads[rank]))) for rank, peer in enumerate(comm.peers)
    ]
    reports = queue.SimpleQueue[float]()
    seconds = []

    async def watch() -> ProcessWatch:
        return ProcessWatch(lambda deaths: reports.put(time.monotonic()))

    async def follow(watching: ProcessWatch) -> None:
        watching.follow(members)

    watching = loop.run(watch(), LIMIT)
    loop.run(follow(watching), LIMIT)
    for member in members[1:]:
        time.sleep(COOL_SECONDS)
        began = time.monotonic()
        os.kill(member.peer.pid, signal.SIGKILL)
        seconds.append(reports.get(timeout=LIMIT) - began)
    return seconds
