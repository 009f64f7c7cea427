"""Jobs with a known culprit, for blame to find: cases of a model, and faults in real processes.

`ModelWorld` is a small model of ranks that run collectives by messages. Time is virtual. Collectives run round by round
(ring, dissemination, binomial tree) with noise on computation and messages, so the fault alone determines which ranks
are blocked, in which round, and which ones still leave the op. The real recorder writes the results. `generated` draws
everything about such a job from a seed.

`injected` runs real processes under `ft.Session`, one of which is killed, stopped, slow, cut off or wrong. A message
lost on a link goes out over ucx under a tag that no rank receives: the sender believes that it has sent.
"""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdfast.comms.collectives import TAGS
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.ft.diagnosis.analyse import analyse
from holdfast.ft.diagnosis.evidence import Finding, JobEvidence, ProcessState, assemble, gather
from holdfast.ft.events import StepBegun
from holdfast.ft.telemetry.flight import read
from holdfast.ft.telemetry.flight.recorder import FlightRecorder
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.local_cluster import LocalCluster

if TYPE_CHECKING:
    from holdfast.ft import Session

NEVER = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One collective as a rank calls it."""

    op: str
    tensor: torch.Tensor | None
    detail: str = ""
    peer: int = -1


@dataclass(slots=True)
class ModelOp:
    """One rank's part in one op: `left` is NEVER while it is inside, waiting for `takes` in round `rounds`."""

    call: ModelCall
    step: int
    entered: float
    left: float = NEVER
    takes: tuple[int, ...] = ()
    rounds: int = 0
    error: HoldfastError | None = None


@dataclass(slots=True)
class ModelWorld:
    """`size` ranks, their virtual time, and their ops so far. A `cut` is (sender, receiver)."""

    size: int
    rng: random.Random
    latency: float
    cut: tuple[int, int] | None = None
    dead_after: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: the op (counted from 0) and the round after which the rank stops for ever; -1: before the op."""

    times: list[float] = field(default_factory=list)
    lived: list[list[ModelOp]] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.times = [self.rng.uniform(0.0, 1e-3) for _ in range(self.size)]
        self.lived = [[] for _ in range(self.size)]

    def compute(self, seconds: Sequence[float]) -> None:
        """Each rank computes for its own time."""
        self.times = [at + spent for at, spent in zip(self.times, seconds, strict=True)]

    def run(self, calls: Sequence[ModelCall], step: int) -> bool:
        """Run one collective, as each rank calls it; False once a rank is blocked for ever."""
        number = self.count
        self.count += 1
        op = calls[0].op
        entered = list(self.times)
        for rank, (when, rounds) in self.dead_after.items():
            if (when, rounds) == (number, -1):
                entered[rank] = NEVER
        lives = [ModelOp(call, step, at) for call, at in zip(calls, entered, strict=True)]
        if op in ("broadcast", "reduce"):
            done = self._tree(lives, calls[0].peer, number, reverse=op == "reduce")
        else:
            done = self._rounds(lives, number)
        for rank, life in enumerate(lives):
            if life.entered < NEVER:
                life.left = done[rank]
                self.lived[rank].append(life)
        self.times = done
        return all(at < NEVER for at in done)

    def _message(self, source: int, target: int, sent: float) -> float:
        """When a message arrives."""
        if (source, target) == self.cut:
            return NEVER
        return sent + self.latency * self.rng.lognormvariate(0.0, 0.5)

    def _stops(self, rank: int, number: int, rounds: int) -> bool:
        return self.dead_after.get(rank) == (number, rounds)

    def _rounds(self, lives: list[ModelOp], number: int) -> list[float]:
        """Ring or dissemination: in each round every rank sends to one and takes from another."""
        size = self.size
        ring = self.rng.random() < 0.5
        distances = [1] * (size - 1) if ring else [1 << k for k in range(max(1, (size - 1).bit_length()))]
        at = [life.entered for life in lives]
        for k, distance in enumerate(distances, 1):
            sent = [NEVER if self._stops(rank, number, k - 1) else at[rank] for rank in range(size)]
            for rank in range(size):
                if at[rank] < NEVER and sent[rank] == NEVER:
                    at[rank] = NEVER
            before = list(at)
            for rank in range(size):
                source = (rank - distance) % size
                arrives = self._message(source, rank, sent[source]) if sent[source] < NEVER else NEVER
                if before[rank] < NEVER and arrives == NEVER:
                    lives[rank].takes, lives[rank].rounds = (source,), k
                    at[rank] = NEVER
                elif before[rank] < NEVER:
                    at[rank] = max(before[rank], arrives)
        return at

    def _tree(self, lives: list[ModelOp], root: int, number: int, reverse: bool) -> list[float]:
        """A binomial tree, from the root or to it."""
        size = self.size
        at = [life.entered for life in lives]
        order = sorted(range(size), key=lambda rank: (rank - root) % size)
        parents = {rank: order[_parent(place)] for place, rank in enumerate(order) if place}
        if not reverse:
            for rank in order[1:]:
                self._take(lives, at, parents[rank], rank, number)
            return at
        for rank in reversed(order[1:]):
            self._take(lives, at, rank, parents[rank], number)
        return at

    def _take(self, lives: list[ModelOp], at: list[float], source: int, target: int, number: int) -> None:
        if self._stops(source, number, 0):
            at[source] = NEVER
        if self._stops(target, number, 0):
            at[target] = NEVER
        if at[target] == NEVER:
            return
        arrives = self._message(source, target, at[source]) if at[source] < NEVER else NEVER
        lives[target].rounds += 1
        if arrives == NEVER:
            lives[target].takes = (source,)
            at[target] = NEVER
        else:
            at[target] = max(at[target], arrives)

    def write(
        self, folder: Path, hosts: Sequence[str], clocks: Sequence[float], *, waits: bool, capacity: int
    ) -> list[Path]:
        """Write the recordings of all ranks; with `waits`, those of a transport that names the ranks it waits for."""
        paths = []
        for rank, lives in enumerate(self.lived):
            clock = _HostClock(clocks[rank])
            path = folder / f"p{rank}.flight"
            recorder = FlightRecorder(
                path, f"p{rank}", "job", capacity=capacity, now=clock, process=(hosts[rank], 100 + rank, 1)
            )
            journal = recorder.journal("job", 1, rank, self.size, "model")
            for seq, life in enumerate(lives, 1):
                clock.at = life.entered
                recorder.at_step(StepBegun(step=life.step, epoch=1))
                tensor = life.call.tensor
                nbytes = 0 if tensor is None else tensor.nbytes
                journal.enter(life.call.op, seq, nbytes, tensor, life.call.detail, life.call.peer)
                if waits and life.takes:
                    clock.at = life.entered + 2 * self.latency
                    journal.waits(life.takes, rounds=life.rounds)
                if life.left < NEVER:
                    clock.at = life.left
                    journal.leave(life.error)
            paths.append(path)
        return paths


def _parent(place: int) -> int:
    """The parent of a place in a binomial tree: without its highest bit."""
    return place - (1 << (place.bit_length() - 1))


class _HostClock:
    """A host's clock."""

    def __init__(self, offset: float) -> None:
        self.at, self._offset = 0.0, offset

    def __call__(self) -> float:
        return self.at + self._offset


KINDS = ("crash", "hang", "slow", "cut", "mismatch")


@dataclass(frozen=True, slots=True)
class Truth:
    """The injected fault: of `rank`; for a cut, from `rank` to `to`."""

    kind: str
    rank: int
    to: int | None = None


@dataclass(frozen=True, slots=True)
class ScoredCase:
    """A case, and the first finding of blame."""

    name: str
    truth: Truth
    first: Finding | None

    @property
    def right(self) -> bool:
        """Whether the right rank comes first; of a cut both ends, of a mismatch and of slowness also the kind."""
        if self.first is None or self.first.rank != self.truth.rank:
            return False
        if self.truth.kind == "cut":
            return self.first.kind == "cut" and self.first.to == self.truth.to
        if self.truth.kind in ("slow", "mismatch"):
            return self.first.kind == self.truth.kind
        return self.first.kind in ("crash", "hang")


def generated(kind: str, seed: int) -> ScoredCase:
    """Make a case, ask blame, and compare."""
    rng = random.Random(f"{kind}/{seed}")
    with tempfile.TemporaryDirectory(prefix="holdfast-score-") as folder:
        truth, evidence = _MAKE[kind](rng, Path(folder))
        found = analyse(evidence)
    return ScoredCase(f"{kind} {seed}", truth, found[0] if found else None)


# Jobs -----------------------------------------------------------------------------------------------------------------


def _program(rng: random.Random, size: int) -> list[ModelCall]:
    """The ops of a step."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64]

    def call() -> ModelCall:
        shape = [rng.choice([1, 2, 64, 1000]) for _ in range(rng.randint(1, 2))]
        tensor = torch.empty(shape, dtype=rng.choice(dtypes), device="meta")
        op = rng.choice(
            ["all_reduce", "all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast", "reduce"]
        )
        if op in ("broadcast", "reduce"):
            return ModelCall(op, tensor, "sum" * (op == "reduce"), rng.randrange(size))
        return ModelCall(op, tensor, "" if op == "all_gather_single" else "sum")

    return [*(call() for _ in range(rng.randint(1, 5))), ModelCall("barrier", None)]


@dataclass(slots=True)
class _SampleJob:
    rng: random.Random
    world: ModelWorld
    program: list[ModelCall]
    steps: int
    base: float
    slow: dict[int, float]

    def run(self, change: Callable[[int, int, list[ModelCall]], list[ModelCall]] | None = None) -> None:
        """Run all steps, or until a rank is blocked. `change(step, place, calls)` may change what ranks call."""
        for step in range(self.steps):
            spread = [
                self.base * self.rng.lognormvariate(0.0, 0.1) * self.slow.get(rank, 1.0)
                for rank in range(self.world.size)
            ]
            self.world.compute(spread)
            for place, call in enumerate(self.program):
                calls = [call] * self.world.size
                if change is not None:
                    calls = change(step, place, calls)
                if not self.world.run(calls, step):
                    return
                small = [self.base * 0.02 * self.rng.lognormvariate(0.0, 0.5) for _ in range(self.world.size)]
                self.world.compute(small)


def _job(rng: random.Random, fewest: int = 2) -> _SampleJob:
    size = rng.choice([n for n in (2, 3, 4, 5, 8, 16) if n >= fewest])
    base = rng.choice([2e-3, 20e-3, 200e-3])
    world = ModelWorld(size, rng, latency=rng.choice([5e-6, 50e-6, 500e-6]))
    return _SampleJob(rng, world, _program(rng, size), rng.randint(4, 30), base, {})


def _evidence(job: _SampleJob, folder: Path, lives: Sequence[ProcessState], now: float, waits: bool) -> JobEvidence:
    """The recordings of the job, from one to three hosts with different clocks."""
    rng, size = job.rng, job.world.size
    hosts = rng.choice([1, 1, 2, 3])
    names = [f"host{rank * hosts // size}" for rank in range(size)]
    clocks = {name: 5000.0 + rng.uniform(-4000.0, 4000.0) * (name != "host0") for name in names}
    capacity = rng.choice([64, 64, 256, 1024])
    paths = job.world.write(folder, names, [clocks[name] for name in names], waits=waits, capacity=capacity)
    recordings = [read(path) for path in paths]
    return assemble(recordings, {r.identity: life for r, life in zip(recordings, lives, strict=True)}, [], now + 5000.0)


def _end_time(job: _SampleJob) -> float:
    return max(life.entered for lives in job.world.lived for life in lives)


def _lives(rng: random.Random, size: int, rank: int, as_seen: ProcessState) -> list[ProcessState]:
    """The state of the processes when blame looks: as at the fault, all gone since, or unknown (elsewhere)."""
    scene = rng.choice(["live", "all gone", "elsewhere"])
    if scene == "all gone":
        return [ProcessState.GONE] * size
    if scene == "elsewhere":
        return [ProcessState.UNKNOWN] * size
    return [as_seen if each == rank else ProcessState.RUNNING for each in range(size)]


def _fail(job: _SampleJob, error: Callable[[int, tuple[int, ...]], Exception | None], after: float) -> float:
    """Let blocked ranks leave their op `after` seconds later, by `error(rank, waited for)`; when the last one does."""
    end = 0.0
    for rank, lives in enumerate(job.world.lived):
        if lives and lives[-1].left == NEVER:
            failure = error(rank, lives[-1].takes)
            if failure is not None:
                lives[-1].error = failure  # type: ignore[assignment]
                lives[-1].left = _end_time(job) + after * job.rng.uniform(1.0, 1.2)
                end = max(end, lives[-1].left)
    return end


# Faults ---------------------------------------------------------------------------------------------------------------


def _stop(rng: random.Random, job: _SampleJob) -> int:
    """Choose a rank and the place where it stops; the rank."""
    rank = rng.randrange(job.world.size)
    op = rng.randrange(len(job.program), job.steps * len(job.program))
    job.world.dead_after[rank] = (op, rng.choice([-1, -1, 0, 0, 1]))
    return rank


def _stopped_job(rng: random.Random) -> tuple[_SampleJob, int]:
    """A job that a rank stopped for sure.

    A rank that stops in a round that its op does not have stops before the next op.
    """
    while True:
        job = _job(rng)
        rank = _stop(rng, job)
        job.run()
        if any(lives and lives[-1].left == NEVER for lives in job.world.lived):
            others = [lives[-1].left == NEVER for r, lives in enumerate(job.world.lived) if r != rank]
            if any(others):
                return job, rank


def _crash(rng: random.Random, folder: Path) -> tuple[Truth, JobEvidence]:
    job, rank = _stopped_job(rng)
    job.world.lived[rank][-1].takes = job.world.lived[rank][-1].takes if rng.random() < 0.5 else ()
    told = rng.choice(["found", "left waiting", "timed out"])

    def error(waiter: int, takes: tuple[int, ...]) -> Exception | None:
        if waiter == rank or told == "left waiting":
            return None
        if told == "timed out":
            return OpTimeout("op", 1, 1.0, takes)
        return PeerFailed([rank], "gone") if rng.random() < 0.5 else Revoked(1, "gone")

    now = max(_fail(job, error, 0.01 if told == "found" else 30.0), _end_time(job)) + 60.0
    lives = _lives(rng, job.world.size, rank, ProcessState.GONE)
    return Truth("crash", rank), _evidence(job, folder, lives, now, waits=told != "found" or rng.random() < 0.5)


def _hang(rng: random.Random, folder: Path) -> tuple[Truth, JobEvidence]:
    job, rank = _stopped_job(rng)
    timed_out = rng.random() < 0.5

    def error(waiter: int, takes: tuple[int, ...]) -> Exception | None:
        return OpTimeout("op", 1, 1.0, takes) if timed_out and waiter != rank else None

    now = max(_fail(job, error, 30.0), _end_time(job)) + 60.0
    lives = _lives(rng, job.world.size, rank, rng.choice([ProcessState.STOPPED, ProcessState.RUNNING]))
    return Truth("hang", rank), _evidence(job, folder, lives, now, waits=True)


def _slow(rng: random.Random, folder: Path) -> tuple[Truth, JobEvidence]:
    job = _job(rng)
    rank = rng.randrange(job.world.size)
    job.steps = rng.randint(10, 40)
    job.slow[rank] = rng.uniform(1.5, 4.0)
    job.run()
    lives = [rng.choice([ProcessState.RUNNING, ProcessState.UNKNOWN])] * job.world.size
    return Truth("slow", rank), _evidence(job, folder, lives, max(job.world.times), waits=rng.random() < 0.5)


def _cut(rng: random.Random, folder: Path) -> tuple[Truth, JobEvidence]:
    while True:
        job = _job(rng)
        sender, receiver = rng.sample(range(job.world.size), 2)
        at = rng.randrange(len(job.program), job.steps * len(job.program))

        def change(
            step: int, place: int, calls: list[ModelCall], job: _SampleJob = job, at: int = at
        ) -> list[ModelCall]:
            if step * len(job.program) + place >= at:
                job.world.cut = (sender, receiver)  # noqa: B023  (used in this turn alone)
            return calls

        job.run(change)
        if any(lives[-1].left == NEVER for lives in job.world.lived):
            break
    timed_out = rng.random() < 0.5
    now = max(_fail(job, lambda _, takes: OpTimeout("op", 1, 1.0, takes) if timed_out else None, 30.0), _end_time(job))
    lives = _lives(rng, job.world.size, sender, ProcessState.RUNNING)
    return Truth("cut", sender, receiver), _evidence(job, folder, lives, now + 60.0, waits=True)


def _mismatch(rng: random.Random, folder: Path) -> tuple[Truth, JobEvidence]:
    job = _job(rng)
    rank = rng.randrange(job.world.size)
    step_of, place_of = rng.randrange(2, job.steps), rng.randrange(len(job.program))
    right = job.program[place_of]
    wrong = right
    while _same(wrong, right):
        wrong = _other_call(rng, right, job.program[(place_of + 1) % len(job.program)])

    def change(step: int, place: int, calls: list[ModelCall]) -> list[ModelCall]:
        if (step, place) != (step_of, place_of):
            return calls
        job.world.dead_after.update(dict.fromkeys(range(job.world.size), (job.world.count, 0)))
        return [wrong if each == rank else call for each, call in enumerate(calls)]

    job.run(change)
    checked = rng.random() < 0.5
    now = max(_fail(job, lambda *_: Mismatch("no") if checked else None, 1e-3), _end_time(job)) + 60.0
    lives = _lives(rng, job.world.size, rank, ProcessState.RUNNING)
    return Truth("mismatch", rank), _evidence(job, folder, lives, now, waits=rng.random() < 0.5)


def _same(a: ModelCall, b: ModelCall) -> bool:
    alike = [None if c.tensor is None else (c.tensor.dtype, c.tensor.shape) for c in (a, b)]
    return (a.op, a.detail, a.peer, alike[0]) == (b.op, b.detail, b.peer, alike[1])


def _other_call(rng: random.Random, right: ModelCall, following: ModelCall) -> ModelCall:
    """A wrong call: another shape, dtype, reduction, root or op, or the next op (one was left out)."""
    if right.tensor is None or (rng.random() < 0.3 and following is not right):
        return following if following is not right else ModelCall("all_reduce", torch.empty(3, device="meta"), "sum")
    kind = rng.choice(["shape", "dtype", "op"])
    if kind == "shape":
        return ModelCall(right.op, torch.empty([7, *right.tensor.shape], device="meta"), right.detail, right.peer)
    if kind == "dtype":
        return ModelCall(right.op, right.tensor.to(torch.float64), right.detail, right.peer)
    return ModelCall("all_to_all_single", right.tensor, "float32")


_MAKE: dict[str, Callable[[random.Random, Path], tuple[Truth, JobEvidence]]] = {
    "crash": _crash,
    "hang": _hang,
    "slow": _slow,
    "cut": _cut,
    "mismatch": _mismatch,
}


_ENVIRON = {"HOLDFAST_CHECK": "0", "UCX_TLS": "tcp,self"}
_ASTRAY = TAGS - 1
"""A tag that a user could receive from, and that this job does not use."""
LIMIT = 20.0
"""Seconds within which a fault must show."""


def train(session: Session, fault: str, victim: int, other: int, at: int, steps: int) -> None:
    """Steps of a few small ops; what is wrong with rank `victim` begins at step `at`."""
    began = session.step
    for attempt in session.steps(steps):
        first_epoch = began == 0 and attempt.comm.size > victim
        mine = first_epoch and attempt.rank == victim and attempt.step >= at
        with attempt:
            comm = attempt.comm
            before = fault == "slow" or attempt.step <= at
            time.sleep(0.002 if before else 0.05)  # later ops would overwrite the recording of the fault
            if mine and attempt.step == at:
                _break(fault, comm, other)
            if mine and fault == "slow":
                time.sleep(0.004)
            shape = [3, 2] if mine and fault == "shape" and attempt.step == at else [2, 3]
            comm.all_reduce(torch.ones(shape))
            if not (mine and fault == "order" and attempt.step == at):
                comm.broadcast(torch.ones(4), src=0)
            comm.all_gather_single(torch.ones(2 * comm.size), torch.ones(2))


def _break(fault: str, comm: Any, other: int) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(LIMIT)
        case "cut":
            _lose_messages(comm, other)


def _lose_messages(comm: Any, other: int) -> None:
    """Lose what this rank sends to `other` from now on: it goes out under tags that `other` does not receive."""
    transport = comm._transport
    send = transport._post_send

    def post(tensor: Any, dst: int, tag: int) -> Any:
        return send(tensor, dst, _ASTRAY if dst == other else tag)

    transport._post_send = post


FAULTS = {
    "kill": "crash",
    "stop": "hang",
    "sleep": "hang",
    "slow": "slow",
    "cut": "cut",
    "shape": "mismatch",
    "order": "mismatch",
}
"""The faults, and the kind that blame must report for each."""


def injected(fault: str, seed: int) -> ScoredCase:
    """Run a job with the fault, ask blame, and compare."""
    rng = random.Random(f"{fault}/{seed}")
    size = rng.choice([2, 3] if fault == "cut" else [2, 3, 4])  # of 4, not every pair exchanges messages
    victim = rng.randrange(size)
    other = rng.choice([r for r in range(size) if r != victim])
    backend = "ucx" if fault == "cut" else "shm"
    kind = FAULTS[fault]
    truth = Truth(kind, victim, other if fault == "cut" else None)
    steps = 60 if fault == "slow" else 10_000
    options = {"min_size": 1}
    with (
        LocalCluster(size, backend, session=options, environ=_ENVIRON, threads=1, echo=False) as cluster,
        cluster.start(train, fault, victim, other, rng.randint(3, 8), steps) as job,
    ):
        found = _await(job, kind)
    return ScoredCase(f"{fault} {seed}", truth, found[0] if found else None)


def _await(job: Job, kind: str) -> list[Finding]:
    """Wait until blame has something to find, and return that; let a slow job run to its end."""
    deadline = time.monotonic() + LIMIT
    if kind == "slow":
        job.results(LIMIT)
    while True:
        time.sleep(0.3)
        found = analyse(gather(job.directory / "events", time.monotonic()))
        sure = [finding for finding in found if finding.kind != "slow" or kind == "slow"]
        if (sure and sure[0].kind != "stuck") or time.monotonic() >= deadline:
            return found
