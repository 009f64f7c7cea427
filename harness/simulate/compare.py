"""`holdfast simulate --compare`: the same faults simulated and on real processes, and how far the simulation is off."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft import events
from holdfast.ft.console.console import FoldingTable, console
from holdfast.ft.console.units import counted, format_seconds
from holdfast.ft.event_lines import read_events
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.recovery import NotRecovered, Recovery, recovery_of, wait_for_recovery
from holdfast.harness.simulate.core.faults import Fault, KillHost, KillProcess, PauseProcess
from holdfast.harness.simulate.core.schedule import JobLayout, Schedule
from holdfast.harness.simulate.core.world import World
from holdfast.harness.simulate.machine_costs import MachineCosts, measure_costs
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.netns import ClaimHost, Network

if TYPE_CHECKING:
    from holdfast.ft import Session
    from holdfast.harness.cluster.job import Job
    from holdfast.harness.simulate.core.process import SimulatedProcess

FaultKind = Literal["kill", "stop", "host"]
FAULTS: tuple[FaultKind, ...] = ("kill", "stop", "host")
HOSTS = 4
"""Into how many hosts the ranks are divided where one is to be lost."""
SEEDS = 15
"""Simulations of a case: its prediction is their median."""
SETTLE = 0.3
"""Seconds for which a job commits undisturbed before its fault."""
LIMIT = 60.0
"""Seconds for a job to form, and to recover: on a busy machine 16 processes take long to start."""
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
    return JobLayout(ranks=ranks, hosts=hosts, racks=1, spares=0, steps=10**6, compute=EMPTY, join=60.0)


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


def _break(job: Job, fault: FaultKind, ranks: int, network: Network | None) -> tuple[set[str], float]:
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
    """Measure the machine, simulate each case with what was measured, and break real jobs `repeats` times."""
    left_out: list[str] = []
    if "host" in faults and (why := netns.missing()) is not None:
        left_out.append(f"the loss of a host: network namespaces as hosts need more ({why})")
        faults = [fault for fault in faults if fault != "host"]
    costs: dict[tuple[int, str], MachineCosts] = {}
    cases: list[Comparison] = []
    done, total = 0, len(sizes) * len(faults) * repeats
    for ranks in sizes:
        for fault in faults:
            backend = "gloo" if fault == "host" else "shm"
            if (ranks, backend) not in costs:
                costs[ranks, backend] = measure_costs(ranks, backend, progress)
            name = f"{fault}, {counted(ranks, 'rank')} over {backend}"
            progress(f"{done} of {total} faults: simulating {name}")
            predicted = middle([predict(fault, ranks, costs[ranks, backend], seed) for seed in range(SEEDS)])
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
    for name in ("ranks", "backend", "cores", "link, one way", "message, CPU", "register write", "register read"):
        table.add_column(name, justify="right")
    for name in ("connect", "op", "end reported"):
        table.add_column(name, justify="right")
    for cost in costs:
        times = (cost.link, cost.message, cost.write, cost.read, cost.connect, cost.op, cost.gone)
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
