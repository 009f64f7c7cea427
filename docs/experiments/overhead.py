"""What do observation and fault tolerance cost while nothing fails? `python docs/experiments/overhead.py`.

Ops: the same all_reduce of the same ranks over three communicators, which take turns in the same processes: one bare,
one with the flight recorder, one with recorder and metrics. They are timed by the clock, which includes disturbance by
other processes, and by the CPU time of a rank that is alone, which does not.

Steps: blocks of steps under `ft.Session`, each committed, between blocks of the same work and the same all_reduce over
a bare communicator. Both kinds of blocks run in the same processes, so the cost of the session's threads (heartbeats,
register) is in both; it is measured separately, by their CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.operations import parse_size
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.results import Noise, figures, others
from holdfast.harness.measure.rounds import TimedTurn, Workload, take_turns

if TYPE_CHECKING:
    from holdfast.comms import Communicator
    from holdfast.comms.ops import Recorder
    from holdfast.ft import Session

VARIANTS = ("bare", "recorder", "recorder and metrics")
TIMEOUT = 60.0
TURN_SECONDS = 0.04


class OpCost(msgspec.Struct, frozen=True):
    """One op with one kind of observer: the median over rounds (us), and its ratio to the bare op.

    `alone_us` is the CPU time of the op on a rank that is alone, `alone_extra_us` the part of it beyond the bare op.
    """

    variant: str
    us: float
    extra_us: float
    ratio: float
    alone_us: float
    alone_extra_us: float


class StepCost(msgspec.Struct, frozen=True):
    """A step in ms, bare and under `ft.Session`, and their difference (medians of pairs of blocks).

    `alone_us` is the CPU time of the session's part of a step on a rank that is alone, in the thread of the step;
    `background` that of the session's other threads, as a share of one CPU. `paid` is both as a share of a step's work.
    """

    bare_ms: float
    session_ms: float
    extra_us: float
    share: float
    alone_us: float
    background: float
    paid: float


class Overhead(msgspec.Struct, frozen=True):
    """The whole result. `others`: CPUs that other processes used meanwhile."""

    backend: str
    ranks: int
    nbytes: int
    work_ms: float
    ops: tuple[OpCost, ...]
    step: StepCost
    others: float


def run(backend: str, ranks: int, nbytes: int, rounds: int, work_ms: float) -> Overhead:
    """Measure; takes about half a minute. Raises the errors of `LocalCluster`."""
    noise = Noise(zygote_pid)
    times = _ops(backend, ranks, nbytes, rounds, time.perf_counter)
    alone = _ops(backend, 1, nbytes, rounds, time.thread_time)
    steps = _steps_of(backend, ranks, max(4, rounds // 2), work_ms / 1e3, time.perf_counter)
    step_alone = _steps_of(backend, 1, max(4, rounds), 0.0, time.thread_time)
    step = _step_cost(steps, step_alone[0], work_ms)
    return Overhead(backend, ranks, nbytes, work_ms, _op_costs(times, alone), step, noise.cpus())


# Ops ------------------------------------------------------------------------------------------------------------------


def _ops(backend: str, ranks: int, nbytes: int, rounds: int, clock: Callable[[], float]) -> list[list[float]]:
    """By variant, the microseconds of an op in each round: of the slowest rank."""
    quiet = {"HOLDFAST_CHECK": "0"}
    with (
        LocalCluster(ranks, backend, environ=quiet, threads=1, echo=False, timeout=300.0) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        by_rank = cluster.run(_observed_ops, nbytes, rounds, clock, Path(folder))
    return [[1e6 * max(each) for each in zip(*(rank[name] for rank in by_rank), strict=True)] for name in VARIANTS]


def _observed_ops(
    comm: Communicator, nbytes: int, rounds: int, clock: Callable[[], float], folder: Path
) -> dict[str, list[float]]:
    """The body of a rank: by variant, the seconds of an op in each round."""
    from holdfast.ft.telemetry.flight.recorder import FlightRecorder
    from holdfast.ft.telemetry.metrics import OpTally

    def recorder(number: int) -> FlightRecorder:
        return FlightRecorder(folder / f"overhead-{comm.rank}-{number}.flight", f"bench-{number}", "bench")

    recorders: tuple[Recorder | None, ...] = (None, recorder(1), OpTally(recorder(2)))
    variants = {
        name: another(comm, folder, f"variant-{number}", each)
        for number, (name, each) in enumerate(zip(VARIANTS, recorders, strict=True))
    }
    turns = take_turns(_ObservedOps(nbytes, clock), variants, range(rounds), _raise)
    for variant in variants.values():
        variant.close()
    return {name: [turn.seconds["op"][0] for turn in each] for name, each in turns.items()}


class _ObservedOps(Workload["Communicator"]):
    """Ops in a row that fill a turn, after the check of one."""

    name = "all_reduce"

    def __init__(self, nbytes: int, clock: Callable[[], float]) -> None:
        import torch

        self._tensor, self._clock, self._ops = torch.empty(max(1, nbytes // 4)), clock, 0

    def set_up(self, contestant: Communicator) -> None:
        self._tensor.fill_(contestant.rank + 1.0)
        contestant.all_reduce(self._tensor)
        if not bool((self._tensor == contestant.size * (contestant.size + 1) / 2).all()):
            raise ArithmeticError(f"the sum is {self._tensor}")
        self._tensor.zero_()
        taken = [_timed(lambda: contestant.all_reduce(self._tensor)) for _ in range(20)]
        if not self._ops:
            self._ops = contestant.broadcast_object(max(3, int(TURN_SECONDS / statistics.median(taken))), 0)

    def turn(self, contestant: Communicator, number: int) -> TimedTurn:
        tensor, all_reduce, repeats = self._tensor, contestant.all_reduce, range(self._ops)
        all_reduce(tensor)
        contestant.barrier()
        began = self._clock()
        for _ in repeats:
            all_reduce(tensor)
        return TimedTurn({"op": [(self._clock() - began) / self._ops]}, wrong=None)


def _raise(name: str, error: Exception) -> None:
    raise error


def another(comm: Communicator, folder: Path, name: str, recorder: Recorder | None) -> Communicator:
    """A communicator of the same ranks, with a recorder of its own."""
    import torch.distributed as dist

    from holdfast.comms.connect import KnownMembers, connect_members
    from holdfast.comms.executor import OpSettings
    from holdfast.comms.transport.base import Peer
    from holdfast.comms.transport.liveness import this_process

    peers = [msgspec.convert(each, Peer) for each in comm.all_gather_object(msgspec.to_builtins(this_process()))]
    store = dist.PrefixStore(name, dist.FileStore(str(folder / f"overhead-{comm.epoch}-{name}"), comm.size))
    members = KnownMembers(rank=comm.rank, peers=peers, store=store, epoch=0, name=name)
    return connect_members(comm.backend, members, settings=OpSettings(TIMEOUT, recorder=recorder))


def _op_costs(times_of: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]) -> tuple[OpCost, ...]:
    """The costs of each op and kind of observer."""
    bare = times_of[0]
    return tuple(
        OpCost(
            variant,
            statistics.median(times),
            statistics.median(t - b for t, b in zip(times, bare, strict=True)),
            statistics.median(t / b for t, b in zip(times, bare, strict=True)),
            statistics.median(cpu),
            statistics.median(t - b for t, b in zip(cpu, alone[0], strict=True)),
        )
        for variant, times, cpu in zip(VARIANTS, times_of, alone, strict=True)
    )


# Steps ----------------------------------------------------------------------------------------------------------------

_STEPS_A_BLOCK = 10


def _steps_of(backend: str, ranks: int, blocks: int, seconds: float, clock: Callable[[], float]) -> list[_Steps]:
    """What `_steps` measured on each rank of a job."""
    quiet = {"HOLDFAST_CHECK": "0"}
    with LocalCluster(ranks, backend, environ=quiet, threads=1, echo=False, timeout=300.0) as cluster:
        return cluster.start(_steps, cluster.logs, blocks, seconds, clock).results(300.0)


def _steps(
    session: Session, folder: Path, blocks: int, seconds: float, clock: Callable[[], float]
) -> tuple[list[float], list[float], float]:
    """Seconds of a step in each bare block and each session block, and the CPU share of the session's threads."""
    import torch

    gradients = torch.zeros(16_384)
    work = _work_of(seconds)
    bare: Communicator | None = None
    plain, committed, cpu, began = [], [], 0.0, 0.0
    inside = 0.0
    for attempt in session.steps(blocks * _STEPS_A_BLOCK):
        if bare is None:
            bare = another(attempt.comm, folder, "bare", None)
            cpu, began = _threads_cpu(), time.perf_counter()
        if attempt.step % _STEPS_A_BLOCK == 0:
            if attempt.step:
                committed.append((clock() - inside) / _STEPS_A_BLOCK)
            bare.barrier()
            start = clock()
            for _ in range(_STEPS_A_BLOCK):
                work()
                bare.all_reduce(gradients)
            plain.append((clock() - start) / _STEPS_A_BLOCK)
            bare.barrier()
            inside = clock()
        with attempt:
            work()
            attempt.comm.all_reduce(gradients)
    committed.append((clock() - inside) / _STEPS_A_BLOCK)
    background = (_threads_cpu() - cpu) / (time.perf_counter() - began)
    if bare is not None:
        bare.close()
    return plain[:-1], committed[:-1], background  # the last block has the end of the job in it


def _work_of(seconds: float) -> Callable[[], None]:
    """A fixed amount of work that takes about `seconds` on an idle CPU."""
    import torch

    left, right = torch.rand(128, 128), torch.rand(128, 128)
    for _ in range(20):
        left @ right
    best = min(_timed(lambda: left @ right) for _ in range(200))

    def work() -> None:
        for _ in range(int(seconds / best)):
            left @ right

    return work


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _threads_cpu() -> float:
    """CPU seconds of the threads of this process other than the calling one."""
    me, total = threading.get_native_id(), 0.0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != me:
            fields = (task / "schedstat").read_text().split()
            total += int(fields[0]) / 1e9
    return total


_Steps = tuple[list[float], list[float], float]


def _step_cost(by_rank: Sequence[_Steps], alone: _Steps, work_ms: float) -> StepCost:
    plain = [max(times) for times in zip(*(rank[0] for rank in by_rank), strict=True)]
    committed = [max(times) for times in zip(*(rank[1] for rank in by_rank), strict=True)]
    pairs = list(zip(plain, committed, strict=True))
    in_thread = statistics.median(c - p for p, c in zip(*alone[:2], strict=True))
    background = max(rank[2] for rank in by_rank)
    return StepCost(
        1e3 * statistics.median(plain),
        1e3 * statistics.median(committed),
        1e6 * statistics.median(c - p for p, c in pairs),
        statistics.median(c / p for p, c in pairs) - 1,
        1e6 * in_thread,
        background,
        in_thread / (work_ms / 1e3) + background,
    )


def show(cost: Overhead) -> None:
    """Print the costs of ops and of steps."""
    out = console()
    here = f"{cost.backend}, {counted(cost.ranks, 'rank')}, {counted(os.cpu_count() or 1, 'CPU')}"
    columns = ("observed by", "time", "more", "ratio", "CPU time alone", "more of it")
    ops = figures(f"an all_reduce of {format_bytes(cost.nbytes)}: {here}", columns, names=("observed by",))
    for op in cost.ops:
        ops.add_row(
            op.variant, f"{op.us:.2f} us", f"{op.extra_us:+.2f} us", f"x{op.ratio:.3f}", f"{op.alone_us:.2f} us",
            f"{op.alone_extra_us:+.2f} us",
        )  # fmt: skip
    out.print(ops)
    step = cost.step
    steps = figures(
        f"a step of {cost.work_ms:g} ms of work and an all_reduce of 64 KiB",
        ("", "time", "more", "share"),
        names=("",),
        caption=f"CPU time, alone: {step.alone_us:.0f} us of its thread, {step.background:.2%} of a CPU elsewhere: "
        f"{step.paid:.2%} of a step, to reach: 1%; {others(cost.others)}",
    )
    steps.add_row("bare", f"{step.bare_ms:.2f} ms", "", "")
    steps.add_row("under ft.Session", f"{step.session_ms:.2f} ms", f"{step.extra_us:+.0f} us", f"{step.share:+.2%}")
    out.print(steps)


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm", help="one whose ranks are processes")
    parser.add_argument("--size", type=parse_size, default="8", help="bytes of the all_reduce")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each variant")
    parser.add_argument("--work", type=float, default=20.0, help="milliseconds of work in a step")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    cost = run(asked.backend, asked.ranks, asked.size, asked.rounds, asked.work)
    if asked.json:
        print_json(cost)
    else:
        show(cost)


if __name__ == "__main__":
    main()
