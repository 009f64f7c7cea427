"""`holdfast bench recovery`: from the SIGKILL of a rank inside an all_reduce to the survivors' next correct one.

All ranks of a job do nothing but all_reduce under an `ft.Session`. One is killed. What counts is the time from just
before the signal to the end of the last survivor's first all_reduce in the next epoch with the right result. All times
are CLOCK_MONOTONIC of one host. The killer sleeps while the job recovers.
"""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from holdfast.ft.console.units import counted
from holdfast.ft.event_lines import read_events
from holdfast.ft.events import EpochReduced, Event, ViewInstalled
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.results import Noise, figures, others
from holdfast.harness.measure.stats import Spread
from holdfast.harness.recovery import Recovery, wait_for_recovery

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.ft import Session
    from holdfast.harness.bench.command import RecoveryPlan

SETTLE = 0.2
"""Seconds for which a job reduces undisturbed before a kill; the killer sleeps as long after one."""

LIMIT = 30.0
"""Seconds without a recovery after which a job has failed."""


class RecoveryTiming(msgspec.Struct, frozen=True):
    """One kill, of one rank or several at once, of which `rank` is the first.

    All in milliseconds from just before the signal to when the last survivor got there.

    `gone`: the kernel has freed the process, and tells the killer so. `detect`: the first survivor knows.
    `agree`: the next epoch is installed. `rebuild`: its communicator is connected. `total`: its first all_reduce is
    complete and correct.
    """

    rank: int
    gone: float
    detect: float
    agree: float
    rebuild: float
    total: float


class RecoveryBench(msgspec.Struct, frozen=True):
    """A whole run. The parts are differences: `agree` is from detection to installation, and so on.

    `others` is how many CPUs other processes used meanwhile, on average. `together` ranks died at once, and with
    `proposer` also the one that had just put the next epoch into the register. `stopped`: they were not killed but
    stopped, and ended by the survivors.
    """

    backend: str
    ranks: int
    spares: int
    nbytes: int
    others: float
    kills: tuple[RecoveryTiming, ...]
    total: Spread
    gone: Spread
    detect: Spread
    agree: Spread
    rebuild: Spread
    first_op: Spread
    together: int = 1
    proposer: bool = False
    stopped: bool = False
    device: str = "cpu"

    @staticmethod
    def of(plan: RecoveryPlan, others: float, kills: tuple[RecoveryTiming, ...]) -> RecoveryBench:
        return RecoveryBench(
            plan.backend,
            plan.ranks,
            plan.spares,
            plan.nbytes,
            others,
            kills,
            total=Spread.of(kill.total for kill in kills),
            gone=Spread.of(kill.gone for kill in kills),
            detect=Spread.of(kill.detect for kill in kills),
            agree=Spread.of(kill.agree - kill.detect for kill in kills),
            rebuild=Spread.of(kill.rebuild - kill.agree for kill in kills),
            first_op=Spread.of(kill.total - kill.rebuild for kill in kills),
            together=plan.together,
            proposer=plan.proposer,
            stopped=plan.stopped,
            device=plan.device,
        )


def reduce_for_ever(session: Session, count: int, device: str) -> None:
    """The body of a rank: all_reduce `count` float32 numbers and check them until killed; log it once an epoch.

    On a GPU an op is complete when the device has finished it.
    """
    import torch

    from holdfast.ft.telemetry.event_log import EventLog

    log = EventLog(f"bench-{os.getpid()}")
    if on_gpu := torch.device(device).type == "cuda":
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"  # NCCL refuses two ranks of one host on one GPU
    tensor = torch.empty(count, device=device)
    said = 0
    for attempt in session.steps(1):
        with attempt:
            comm = attempt.comm
            expected = float(comm.size * (comm.size + 1) // 2)
            while True:
                tensor.fill_(comm.rank + 1)
                comm.all_reduce(tensor)
                if on_gpu:
                    torch.cuda.synchronize()
                if said != comm.epoch:
                    completed = time.monotonic()
                    if not bool((tensor == expected).all()):
                        raise ArithmeticError(f"an all_reduce in epoch {comm.epoch} gave {tensor}, not {expected}")
                    log.emit(EpochReduced(epoch=comm.epoch, rank=comm.rank, completed=completed))
                    said = comm.epoch


def _read(job: Job) -> list[Event]:
    """The events of the job; what a rank logs beside its session has the name of its session."""
    log = read_events(job.events_directory)
    names = {event.pid: event.process for event in log if isinstance(event, ViewInstalled)}
    return [replace(event, process=names.get(event.pid, event.process)) for event in log]


def timing_of(recovery: Recovery, rank: int, gone: float, survivors: Collection[str]) -> RecoveryTiming:
    """The timing of a kill of `rank`, until the last survivor got there; its process was gone at `gone`."""

    def since(moment: float) -> float:
        return 1e3 * (moment - recovery.fault)

    assert recovery.detected is not None
    return RecoveryTiming(
        rank=rank,
        gone=since(gone),
        detect=since(recovery.detected),
        agree=since(max(recovery.installed[each] for each in survivors)),
        rebuild=since(max(recovery.rebuilt[each] for each in survivors)),
        total=since(max(recovery.resumed[each] for each in survivors)),
    )


def _inject(job: Job, ranks: Sequence[int], proposer: bool, number: int) -> RecoveryTiming:
    """Send signal `number` to these ranks at once; with `proposer` rank 0 will end itself."""
    members = job.view().members
    pids = [members[rank].peer.pid for rank in ranks]
    victims = [process for process in job.processes if process.pid in pids]
    lost = {members[rank].id for rank in (*ranks, *[0] * proposer)}
    end = select.poll()
    end.register(victims[0].pidfd, select.POLLIN)
    killed = time.monotonic()
    for victim in victims:
        victim.signal(number)
    end.poll(1e3 * LIMIT)
    gone = time.monotonic()
    time.sleep(SETTLE)
    recovery = wait_for_recovery(lambda: _read(job), killed, lost, limit=LIMIT, every=0.05)
    return timing_of(recovery, ranks[0], gone, {member.id for member in members} - lost)


def run(plan: RecoveryPlan, progress: Callable[[str], None] = lambda text: None) -> RecoveryBench:
    """Measure, about a second for each kill."""
    choose, number = random.Random(plan.seed), signal.SIGSTOP if plan.stopped else signal.SIGKILL
    done: list[RecoveryTiming] = []
    noise = Noise(zygote_pid)
    options = {"min_size": plan.ranks - plan.lost, **({} if plan.device == "cpu" else {"device": plan.device})}
    environ = {"HOLDFAST_CHECK": "0", **({"HOLDFAST_FAULT": "rebuild.after_propose:0:0"} if plan.proposer else {})}
    with LocalCluster(
        plan.ranks,
        plan.backend,
        spares=plan.spares,
        session=options,
        device=None if plan.device == "cpu" else plan.device,
        environ=environ,
        threads=1,
        echo=False,
    ) as cluster:
        while len(done) < plan.kills:
            with cluster.start(reduce_for_ever, max(1, plan.nbytes // 4), plan.device) as job:
                job.wait_for_spares()
                view = job.view()
                for member in view.members:
                    job.wait_for("first_op", LIMIT, pid=member.peer.pid)
                for _ in range(min(max(1, plan.spares // plan.together), plan.kills - len(done))):
                    time.sleep(SETTLE + choose.random() * SETTLE)
                    victims = choose.sample(range(1 if plan.proposer else 0, plan.ranks), plan.together)
                    done.append(_inject(job, victims, plan.proposer, number))
                    progress(f"{len(done)} of {plan.kills} kills, median {_median(done):.1f} ms")
    return RecoveryBench.of(plan, noise.cpus(), tuple(done))


def _median(done: list[RecoveryTiming]) -> float:
    return statistics.median(kill.total for kill in done)


def show_recovery(bench: RecoveryBench, out: Console) -> None:
    """Print the spread of the whole recovery and of its parts."""
    spares = f", {counted(bench.spares, 'spare')}" if bench.spares else ", no spares"
    where = "" if bench.device == "cpu" else f" on {bench.device}"
    signal, kills = ("SIGSTOP", "times") if bench.stopped else ("SIGKILL", "kills")
    proposer = " and then of the proposer" if bench.proposer else ""
    table = figures(
        f"{signal} of {bench.together} of {bench.ranks} ranks{proposer} in all_reduce, {bench.backend}{where}{spares}, "
        f"{len(bench.kills)} {kills}",
        ("", "median", "p90", "p99", "max"),
        names=("",),
        caption=f"until the last survivor's next correct all_reduce; {others(bench.others)}",
    )
    for name, spread in (
        ("whole recovery", bench.total),
        ("the process is gone, as the killer sees it", bench.gone),
        ("detect", bench.detect),
        ("agree on the next epoch", bench.agree),
        ("rebuild the communicator", bench.rebuild),
        ("first all_reduce", bench.first_op),
    ):
        values = (spread.median, spread.p90, spread.p99, spread.max)
        table.add_row(name, *(f"{value:.2f} ms" for value in values), style="bold" if name.startswith("whole") else "")
    out.print(table)
