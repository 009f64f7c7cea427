"""`holdfast simulate --compare`: the same faults simulated and on real processes, and how far the simulation is off.

Its parameters are measured here first: delays, and processor time of what members do. Nothing is broken meanwhile, and
no view changes, so a simulation that gets these numbers still has to predict.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, stdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.errors import HoldfastError
from holdfast.comms.rendezvous.meeting_store import MeetingStore
from holdfast.comms.system.files import url_of
from holdfast.ft import events
from holdfast.ft.console.console import FoldingTable, console
from holdfast.ft.console.units import counted, format_seconds
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.control.rpc import AsyncRpcServer, RpcConnection, dial_rpc
from holdfast.ft.detectors.process_watch import ProcessWatch
from holdfast.ft.event_lines import read_events
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.node.register import Register
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.recovery import NotRecovered, Recovery, recovery_of, wait_for_recovery
from holdfast.harness.simulate.core.faults import Fault, KillHost, KillProcess, PauseProcess
from holdfast.harness.simulate.core.schedule import JobLayout, MachineModel, NetworkModel, Schedule
from holdfast.harness.simulate.core.world import World
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.netns import ClaimHost, Network

if TYPE_CHECKING:
    from holdfast.ft import Session
    from holdfast.harness.cluster.job import Job as StartedJob
    from holdfast.harness.simulate.core.process import SimulatedProcess

FaultKind = Literal["kill", "stop", "host"]
FAULTS: tuple[FaultKind, ...] = ("kill", "stop", "host")
HOSTS = 4
"""Into how many hosts the ranks are divided where one is to be lost."""
LEAST_RANKS = 2
SEEDS = 15
"""Simulations of a case: its prediction is their median."""
SETTLE = 0.3
"""Seconds for which a job commits undisturbed before its fault."""
LIMIT = 60.0
"""Seconds for a job to form, to recover, and for a call: on a busy machine 16 processes take long to start."""
EMPTY = 1e-6
"""Seconds of computing in a step that is empty but for its ops."""


class RecoveryMoments(msgspec.Struct, frozen=True):
    """Seconds from a fault until the last survivor had installed the next view, and had committed its next step."""

    view: float
    commit: float


class Comparison(msgspec.Struct, frozen=True):
    """One case: what was predicted and measured, in seconds (medians), and the measured values."""

    fault: FaultKind
    ranks: int
    hosts: int
    backend: str
    predicted: RecoveryMoments
    measured: RecoveryMoments
    recoveries: tuple[RecoveryMoments, ...]

    @property
    def errors(self) -> tuple[float, float]:
        """The errors of both predictions, as shares of what was measured."""
        return (
            error_of(self.predicted.view, self.measured.view),
            error_of(self.predicted.commit, self.measured.commit),
        )


class CompareResult(msgspec.Struct, frozen=True):
    """A whole run: what the simulation was given, the cases, and the median error.

    `load` is the load average of the machine at the end, `left_out` says which cases are impossible here.
    """

    costs: tuple[MachineCosts, ...]
    cases: tuple[Comparison, ...]
    median_error: float
    left_out: tuple[str, ...]
    load: float


def error_of(predicted: float, measured: float) -> float:
    """How far a prediction is off, as a share of what was measured."""
    return abs(predicted - measured) / measured


def moments_of(recovery: Recovery) -> RecoveryMoments:
    """When the last survivor of a fault was there; the recovery is over."""
    return RecoveryMoments(
        *(
            max(times[each] for each in recovery.members) - recovery.fault
            for times in (recovery.installed, recovery.resumed)
        )
    )


def middle(recoveries: Sequence[RecoveryMoments]) -> RecoveryMoments:
    """The medians."""
    return RecoveryMoments(median(each.view for each in recoveries), median(each.commit for each in recoveries))


# The simulation ---------------------------------------------------------------------------------------------------


def layout_of(fault: FaultKind, ranks: int) -> JobLayout:
    """The job of a case, simulated and real."""
    hosts = HOSTS if fault == "host" else 1
    slower = max(1, ranks // 16)
    """Ranks share the cores: with more of them, heartbeats of the living come later."""
    return JobLayout(
        ranks=ranks,
        hosts=hosts,
        racks=1,
        spares=0,
        steps=10**6,
        compute=EMPTY,
        heartbeat=0.1 * slower,
        suspect=0.5 * slower,
        join=LIMIT,
    )


def predict(fault: FaultKind, ranks: int, costs: MachineCosts, seed: int) -> RecoveryMoments:
    """Simulate a fault on a machine with these costs."""
    layout, at = layout_of(fault, ranks), SETTLE + random.Random(seed).random() * 0.1
    what: dict[FaultKind, Fault] = {
        "kill": KillProcess(at=at, process=ranks // 2),
        "stop": PauseProcess(at=at, process=ranks // 2, seconds=LIMIT),
        "host": KillHost(at=at, host=layout.hosts - 1),
    }
    network, machine = costs.network(), costs.machine()
    log: list[events.Event] = []
    world = World(Schedule(seed, layout, network, (what[fault],), machine=machine), log.append)
    world.run(at)
    log.clear()
    lost = {process.member.id for process in _hit(world, fault)}
    end = at
    while end < at + LIMIT:
        end += 0.05
        world.run(end)
        found = recovery_of(log, at, lost)
        if found.over:
            return moments_of(found)
    raise NotRecovered(f"the simulated job of {counted(ranks, 'rank')} did not recover within {LIMIT:g} s")


def _hit(world: World, fault: FaultKind) -> list[SimulatedProcess]:
    """The simulated processes that a fault hits."""
    if fault == "host":
        return world.on_host(world.layout.hosts - 1)
    return [world.processes[world.layout.ranks // 2]]


# The real processes -----------------------------------------------------------------------------------------------


def commit_for_ever(session: Session) -> None:
    """The body of a rank: empty steps, with one all_reduce."""
    import torch

    numbers = torch.ones(1)
    for attempt in session.steps(10**9):
        with attempt:
            attempt.comm.all_reduce(numbers)


def measure_recovery(fault: FaultKind, ranks: int, backend: str, seed: int) -> RecoveryMoments:
    """Break a real job once."""
    layout = layout_of(fault, ranks)
    with ExitStack() as stack:
        network, claim = None, None
        if fault == "host":
            network = stack.enter_context(Network(layout.hosts))
            hosts = [layout.host_of(rank) for rank in range(ranks)]
            addresses = tuple(network.addresses[host] for host in hosts)
            folder = Path(stack.enter_context(TemporaryDirectory()))
            claim = ClaimHost(folder, tuple(map(network.entry, hosts)), addresses)
        options = {"min_size": 1, "timeouts": layout.timeouts()}
        cluster = stack.enter_context(
            LocalCluster(
                ranks,
                backend,
                session=options,
                prepare=claim,
                threads=1,
                echo=False,
                environ={"HOLDFAST_CHECK": "0"},
            )
        )
        job = stack.enter_context(cluster.start(commit_for_ever))
        job.wait_for("committed", LIMIT, step=2)
        time.sleep(SETTLE + random.Random(seed).random() * 0.1)
        lost, struck = _break(job, fault, ranks, network)
        # not read so often that it takes the job's processors
        return moments_of(
            wait_for_recovery(lambda: read_events(job.events_directory), struck, lost, limit=LIMIT, every=0.5)
        )


def _break(job: StartedJob, fault: FaultKind, ranks: int, network: Network | None) -> tuple[set[str], float]:
    """Inject the fault; the members that it hit, and the time."""
    view = job.view()
    victim = view.members[ranks // 2]
    if network is None:
        struck = time.monotonic()
        if fault == "kill":
            job.kill(ranks // 2)
        else:
            job.pause(ranks // 2)
        return {victim.id}, struck
    host = network.host_of(view.members[-1].peer.pid)
    if host is None:
        raise HoldfastError(f"process {view.members[-1].peer.pid} is on none of the hosts")
    there = network.processes(host)
    network.cut(host)  # takes milliseconds; from its end on nothing gets through
    struck = time.monotonic()
    network.lose(host)
    return {member.id for member in view.members if member.peer.pid in there}, struck


# Both -------------------------------------------------------------------------------------------------------------


def compare(
    sizes: Sequence[int],
    faults: Sequence[FaultKind] = FAULTS,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> CompareResult:
    """Measure the machine, simulate each case with what was measured, and break real jobs `repeats` times.

    Raises ValueError for a job of one rank, which nobody survives.
    """
    if min(sizes) < LEAST_RANKS:
        raise ValueError(f"--compare needs {LEAST_RANKS} ranks or more: one is struck, and others have to go on")
    left_out: list[str] = []
    if "host" in faults and (why := netns.missing()) is not None:
        left_out.append(f"the loss of a host: network namespaces as hosts need more ({why})")
        faults = [fault for fault in faults if fault != "host"]
    costs: dict[tuple[int, str], MachineCosts] = {}
    cases: list[Comparison] = []
    if "host" in faults and (few := [ranks for ranks in sizes if ranks < HOSTS]):
        left_out.append(f"the loss of a host with {counted(max(few), 'rank')}: it is one of {HOSTS}, with a rank each")
    struck = [(ranks, fault) for ranks in sizes for fault in faults if fault != "host" or ranks >= HOSTS]
    done, total = 0, len(struck) * repeats
    for ranks, fault in struck:
        backend = "gloo" if fault == "host" else "shm"
        left = ranks - ranks // HOSTS if fault == "host" else ranks
        if (left, backend) not in costs:
            costs[left, backend] = measure_costs(left, backend, progress)
        name = f"{fault}, {counted(ranks, 'rank')} over {backend}"
        progress(f"{done} of {total} faults: simulating {name}")
        predicted = middle([predict(fault, ranks, costs[left, backend], seed) for seed in range(SEEDS)])
        recoveries = []
        for number in range(repeats):
            progress(f"{done} of {total} faults: {name}")
            recoveries.append(measure_recovery(fault, ranks, backend, number))
            done += 1
        hosts = layout_of(fault, ranks).hosts
        case = Comparison(fault, ranks, hosts, backend, predicted, middle(recoveries), tuple(recoveries))
        cases.append(case)
    error = median(error for case in cases for error in case.errors)
    return CompareResult(tuple(costs.values()), tuple(cases), error, tuple(left_out), os.getloadavg()[0])


def show_comparison(result: CompareResult) -> None:
    """Print the tables."""
    out = console()
    out.print(costs_table(result.costs))
    out.print(cases_table(result.cases))
    out.print(f"median error {result.median_error:.0%}; load average of the machine {result.load:.1f}")
    for each in result.left_out:
        out.print(f"left out: {each}")


def costs_table(costs: Iterable[MachineCosts]) -> FoldingTable:
    """What was measured before the comparison, and is all that the simulation was told of this machine."""
    table = FoldingTable(
        title="measured first, for the simulation", caption="medians; message and op: all ranks at once"
    )
    for name in (
        "ranks",
        "backend",
        "cores",
        "link, one way",
        "message, CPU",
        "one more",
        "register write",
        "register read",
    ):
        table.add_column(name, justify="right")
    for name in ("connect", "op", "end reported"):
        table.add_column(name, justify="right")
    for cost in costs:
        times = (cost.link, cost.message, cost.further, cost.write, cost.read, cost.connect, cost.op, cost.gone)
        table.add_row(str(cost.ranks), cost.backend, str(cost.cores), *map(format_seconds, times))
    return table


def cases_table(cases: Iterable[Comparison]) -> FoldingTable:
    """Predictions beside what was measured."""
    table = FoldingTable(title="from the fault, until the last survivor is there")
    table.add_column("fault")
    for name in ("ranks", "times", "next view: predicted", "measured", "error", "next commit: predicted", "measured"):
        table.add_column(name, justify="right")
    table.add_column("error", justify="right")
    for case in cases:
        view, commit = case.errors
        table.add_row(
            f"one of {case.hosts} hosts lost" if case.fault == "host" else case.fault,
            f"{case.ranks} over {case.backend}",
            str(len(case.recoveries)),
            format_seconds(case.predicted.view),
            format_seconds(case.measured.view),
            f"{view:.0%}",
            format_seconds(case.predicted.commit),
            format_seconds(case.measured.commit),
            f"{commit:.0%}",
        )
    return table


# What this machine takes ----------------------------------------------------------------------------------------------


ROUNDS = 7
COOL_SECONDS = 0.1
"""Before each turn all ranks sleep so long: members that a fault wakes have cold caches, too."""
BURST = 8
"""Messages to each other rank in a burst."""
OPS = 3
"""Ops of a first step: the votes, the sum, the barrier before the commit."""
KEY = b"k" * 32


class MachineCosts(msgspec.Struct, frozen=True):
    """What was measured with `ranks` processes over `backend`, in seconds (medians).

    `link` is one message between two members, and `spread` the standard deviation of its logarithm. `message` is the
    processor time of a message when a member tells all others at once, and they answer; `further` that of each one
    more that comes with it. `read` and `write` are calls of the register. `connect` is from the last rank that begins
    to connect to the last that is done, `op` an op of the new communicator. `gone` is from SIGKILL until the watch of
    another member reports the end. The processes share `cores`.
    """

    ranks: int
    backend: str
    cores: int
    link: float
    spread: float
    message: float
    further: float
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
            further=self.further,
            op=self.op * share,
            connect=self.connect * share,
            gone=self.gone,
            thread=0.0,
            late=0.0,
        )


class _RankTimes(msgspec.Struct):
    """What one rank measured.

    That are the times of each round, the processor seconds of single messages and of bursts, and on rank 0 the delays.
    """

    entered: list[float]
    connected: list[float]
    reduced: list[float]
    single: float = 0.0
    bursts: float = 0.0
    links: list[float] = []
    reads: list[float] = []
    writes: list[float] = []


def measure_costs(ranks: int, backend: str, progress: Callable[[str], None] = lambda text: None) -> MachineCosts:
    """Measure with `ranks` processes over `backend`. Takes about three seconds."""
    progress(f"measuring the machine with {counted(ranks, 'rank')} over {backend}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = LIMIT * max(1, ranks // 16)  # ranks share the cores
    with (
        LocalCluster(ranks, backend, timeout=limit, threads=1, echo=False, environ={"HOLDFAST_CHECK": "0"}) as cluster,
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
    messages = 2 * ROUNDS * (ranks - 1)
    message = sum(rank.single for rank in times) / messages
    return MachineCosts(
        ranks=ranks,
        backend=backend,
        cores=len(os.sched_getaffinity(0)),
        link=median(times[0].links),
        spread=stdev(map(math.log, times[0].links)),
        message=message,
        further=min(message, (sum(rank.bursts for rank in times) / messages - message) / (BURST - 1)),
        read=median(times[0].reads),
        write=median(times[0].writes),
        connect=median(stand[number] - begun[number] for number in rounds),
        op=median(over[number] - stand[number] for number in rounds) / OPS,
        gone=median(gone),
    )


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
            times.single = _processor_until(store, "single")
            times.bursts = _processor_until(store, "bursts")
            loop.run(server.close(), LIMIT)
        else:
            links = loop.run(_dial(comm.all_gather_object("")[1:]), LIMIT)
            times.single = _processor_of_rounds(loop, links)
            store.set("single", "")
            times.bursts = _processor_of_rounds(loop, links * BURST)
            for _ in range(3 * ROUNDS):
                times.links.append(loop.run(_call(links[:1]), LIMIT) / 2)
            store.set("bursts", "")
    finally:
        loop.close()


def _processor_until(store: dist.Store, key: str) -> float:
    """The processor time of this process until rank 0 sets `key`: it sleeps in the kernel for that, without any."""
    began = time.process_time()
    store.get(key)
    return time.process_time() - began


def _processor_of_rounds(loop: LoopThread, links: list[RpcConnection]) -> float:
    began = time.process_time()
    for _ in range(ROUNDS):
        time.sleep(COOL_SECONDS)
        loop.run(_call(links), LIMIT)
    return time.process_time() - began


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
                store=_store_of(comm, number, store),
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


def _store_of(comm: Communicator, number: int, store: dist.Store) -> dist.Store:
    """Where the ranks meet for the `number`-th time; it takes as little time as the store of a session."""
    if comm.backend == "gloo":
        return dist.PrefixStore(f"epoch {number}", store)
    # a wait of TCPStore's own that times out looks up the name of its address, which may take seconds
    return MeetingStore(store, f"epoch {number}", where="rank 0", timeout=LIMIT)


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
