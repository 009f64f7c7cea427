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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.comms.collectives import TAGS
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.ft import Session, Timeouts
from holdfast.ft.diagnosis.analyse import analyse
from holdfast.ft.diagnosis.evidence import Finding, JobEvidence, ProcessState, assemble, gather
from holdfast.ft.events import StepBegun
from holdfast.ft.telemetry.flight import read
from holdfast.ft.telemetry.flight.recorder import FlightRecorder
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.local_cluster import LocalCluster

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One collective as a rank calls it, with a tensor of this shape if it has one."""

    op: str
    shape: tuple[int, ...] | None = None
    detail: str = ""
    peer: int = -1
    dtype: torch.dtype = torch.float32


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
        number, self.count = self.count, self.count + 1
        at = [NEVER if self.dead_after.get(rank) == (number, -1) else now for rank, now in enumerate(self.times)]
        lives = [ModelOp(call, step, entered) for call, entered in zip(calls, at, strict=True)]
        for life, mine in zip(lives, self.lived, strict=True):
            if life.entered < NEVER:
                mine.append(life)
        for messages in self._rounds(calls[0]):
            for rank in (rank for message in messages for rank in message):
                if self.dead_after.get(rank) == (number, lives[rank].rounds):
                    at[rank] = NEVER
            before = list(at)
            for source, target in messages:
                lost = (source, target) == self.cut
                arrives = NEVER if lost else before[source] + self.latency * self.rng.lognormvariate(0.0, 0.5)
                if before[target] < NEVER:
                    at[target] = max(before[target], arrives)
                    lives[target].rounds += 1
                    lives[target].takes = (source,) if arrives == NEVER else ()
        for life, left in zip(lives, at, strict=True):
            life.left = left
        self.times = at
        return all(left < NEVER for left in at)

    def _rounds(self, call: ModelCall) -> list[list[tuple[int, int]]]:
        """The messages of each round, from rank to rank: of a binomial tree, a ring or a dissemination."""
        if call.op in ("broadcast", "reduce"):
            order = [(call.peer + place) % self.size for place in range(self.size)]
            parents = [order[place - (1 << place.bit_length() - 1)] for place in range(1, self.size)]
            down = list(zip(parents, order[1:], strict=True))
            return [[edge] for edge in down] if call.op == "broadcast" else [[edge[::-1]] for edge in reversed(down)]
        doubling = [1 << k for k in range((self.size - 1).bit_length())]
        distances = [1] * (self.size - 1) if self.rng.random() < 0.5 else doubling
        return [[((rank - by) % self.size, rank) for rank in range(self.size)] for by in distances]

    def write(
        self, folder: Path, hosts: Sequence[str], clocks: Sequence[float], *, waits: bool, capacity: int
    ) -> list[Path]:
        """Write the recordings of all ranks; with `waits`, those of a transport that names the ranks it waits for."""
        paths = []
        for rank, lives in enumerate(self.lived):
            now = [0.0]
            path = folder / f"p{rank}.flight"
            clock = partial(lambda now, offset: now[0] + offset, now, clocks[rank])
            process = (hosts[rank], 100 + rank, 1)
            recorder = FlightRecorder(path, f"p{rank}", "job", capacity=capacity, now=clock, process=process)
            journal = recorder.journal("job", 1, rank, self.size, "model")
            for seq, life in enumerate(lives, 1):
                now[0] = life.entered
                recorder.at_step(StepBegun(step=life.step, epoch=1))
                call = life.call
                tensor = None if call.shape is None else torch.empty(call.shape, dtype=call.dtype, device="meta")
                journal.enter(call.op, seq, 0 if tensor is None else tensor.nbytes, tensor, call.detail, call.peer)
                if waits and life.takes:
                    now[0] = life.entered + 2 * self.latency
                    journal.waits(life.takes, rounds=life.rounds)
                if life.left < NEVER:
                    now[0] = life.left
                    journal.leave(life.error)
            paths.append(path)
        return paths


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
    while True:
        job = _SampleJob(rng, kind)
        job.run()
        if kind == "slow" or set(job.blocked()) - {job.truth.rank}:
            break
    with tempfile.TemporaryDirectory(prefix="holdfast-score-") as folder:
        found = analyse(_later(job, Path(folder)))
    return ScoredCase(f"{kind} {seed}", job.truth, found[0] if found else None)


class _SampleJob:
    """A job of any size, speed and program, with a fault of a kind."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng = rng
        size = rng.choice([2, 3, 4, 5, 8, 16])
        self.base = rng.choice([2e-3, 20e-3, 200e-3])
        self.world = ModelWorld(size, rng, latency=rng.choice([5e-6, 50e-6, 500e-6]))
        self.program = [*(self._call() for _ in range(rng.randint(1, 5))), ModelCall("barrier")]
        self.steps = rng.randint(4, 30)
        length, (rank, other) = len(self.program), rng.sample(range(size), 2)
        self.truth = Truth(kind, rank, other if kind == "cut" else None)
        self._at = rng.randrange(length * (2 if kind == "mismatch" else 1), self.steps * length)
        self._slow = 1.0
        if kind in ("crash", "hang"):
            self.world.dead_after[rank] = (self._at, rng.choice([-1, -1, 0, 0, 1]))
        elif kind == "slow":
            self.steps, self._slow = rng.randint(10, 40), rng.uniform(1.5, 4.0)

    def _call(self) -> ModelCall:
        rng = self.rng
        shape = tuple(rng.choice([1, 2, 64, 1000]) for _ in range(rng.randint(1, 2)))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64])
        ops = ["all_reduce", "all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast", "reduce"]
        op = rng.choice(ops)
        peer = rng.randrange(self.world.size) if op in ("broadcast", "reduce") else -1
        return ModelCall(op, shape, "" if op in ("broadcast", "all_gather_single") else "sum", peer, dtype)

    def run(self) -> None:
        size, rank = self.world.size, self.truth.rank
        for step in range(self.steps):
            spent = [self.base * self.rng.lognormvariate(0.0, 0.1) for _ in range(size)]
            spent[rank] *= self._slow
            self.world.compute(spent)
            for place, call in enumerate(self.program):
                calls = [call] * size
                if self.world.count == self._at and self.truth.kind == "cut":
                    self.world.cut = (rank, self.truth.to or 0)
                elif self.world.count == self._at and self.truth.kind == "mismatch":
                    self.world.dead_after.update(dict.fromkeys(range(size), (self._at, 0)))
                    calls[rank] = self._another(call, self.program[(place + 1) % len(self.program)])
                if not self.world.run(calls, step):
                    return
                self.world.compute([self.base * 0.02 * self.rng.lognormvariate(0.0, 0.5) for _ in range(size)])

    def _another(self, right: ModelCall, following: ModelCall) -> ModelCall:
        """A wrong call: the next op (one was left out), or another op, shape or dtype."""
        calls = [following, ModelCall("all_reduce", (3,), "sum")]
        if right.shape is not None:
            calls = [following, replace(right, shape=(7, *right.shape)), replace(right, dtype=torch.float64)]
            calls.append(ModelCall("all_to_all_single", right.shape, "float32", dtype=right.dtype))
        return self.rng.choice([call for call in calls if call != right])

    def blocked(self) -> list[int]:
        """The ranks that are inside of an op for ever."""
        return [rank for rank, lives in enumerate(self.world.lived) if lives and lives[-1].left == NEVER]


ENDS = {
    "crash": ("found", "waiting", "late"),
    "hang": ("waiting", "late"),
    "slow": ("waiting",),
    "cut": ("waiting", "late"),
    "mismatch": ("waiting", "refused"),
}
"""How the blocked ranks come out of their op: by an error after a while, or not at all."""


def _later(job: _SampleJob, folder: Path) -> JobEvidence:
    """What blame finds a minute later: recordings from one to three hosts with different clocks, and processes."""
    rng, size, truth, kind = job.rng, job.world.size, job.truth, job.truth.kind
    how = rng.choice(ENDS[kind])
    end = max(life.entered for lives in job.world.lived for life in lives)
    for rank in [] if how == "waiting" else job.blocked():
        if (kind, rank) in (("crash", truth.rank), ("hang", truth.rank)):
            continue
        last = job.world.lived[rank][-1]
        gone = PeerFailed([truth.rank], "gone") if rng.random() < 0.5 else Revoked(1, "gone")
        last.error = {"found": gone, "late": OpTimeout("op", 1, 1.0, last.takes), "refused": Mismatch("no")}[how]
        last.left = end + {"found": 0.01, "late": 30.0, "refused": 1e-3}[how] * rng.uniform(1.0, 1.2)
    ends = [life.left for lives in job.world.lived for life in lives if life.left < NEVER]
    now = max(end, *ends) + (0.0 if kind == "slow" else 60.0)

    hosts = rng.choice([1, 1, 2, 3])
    names = [f"host{rank * hosts // size}" for rank in range(size)]
    offsets = {name: 5000.0 + rng.uniform(-4000.0, 4000.0) * (name != "host0") for name in names}
    clocks, capacity = [offsets[name] for name in names], rng.choice([64, 64, 256, 1024])
    waits = (how in ("waiting", "late") and kind not in ("slow", "mismatch")) or rng.random() < 0.5
    recordings = [read(path) for path in job.world.write(folder, names, clocks, waits=waits, capacity=capacity)]

    seen = {"crash": [ProcessState.GONE], "hang": [ProcessState.STOPPED, ProcessState.RUNNING]}
    everywhere = rng.choice([None, ProcessState.UNKNOWN, *([] if kind == "slow" else [ProcessState.GONE])])
    lives = dict.fromkeys((each.identity for each in recordings), everywhere or ProcessState.RUNNING)
    if everywhere is None:
        lives[recordings[truth.rank].identity] = rng.choice(seen.get(kind, [ProcessState.RUNNING]))
    return assemble(recordings, lives, [], now + 5000.0)


_ENVIRON = {"HOLDFAST_CHECK": "0", "UCX_TLS": "tcp,self"}
_ASTRAY = TAGS - 1
"""A tag that a user could receive from, and that this job does not use."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LIMIT = 20.0
"""Seconds within which a fault must show."""


def train(session: Session, fault: str, victim: int, other: int, at: int, steps: int) -> None:
    """Steps of a few small ops; what is wrong with rank `victim` begins at step `at`."""
    rank_at_first = None
    for attempt in session.steps(steps):
        rank_at_first = attempt.rank if rank_at_first is None else rank_at_first  # a survivor may get the victim's
        mine = rank_at_first == victim and attempt.step >= at
        with attempt:
            comm = attempt.comm
            before = fault == "slow" or attempt.step <= at
            time.sleep(0.002 if before else 0.05)  # later ops would overwrite the recording of the fault
            if mine and attempt.step == at:
                if fault in SIGNALS:
                    os.kill(os.getpid(), SIGNALS[fault])
                elif fault == "sleep":
                    time.sleep(LIMIT)
                elif fault == "cut":
                    _lose_messages(comm, other)
            if mine and fault == "slow":
                time.sleep(0.004)
            shape = [3, 2] if mine and fault == "shape" and attempt.step == at else [2, 3]
            comm.all_reduce(torch.ones(shape))
            if not (mine and fault == "order" and attempt.step == at):
                comm.broadcast(torch.ones(4), src=0)
            comm.all_gather_single(torch.ones(2 * comm.size), torch.ones(2))


def _lose_messages(comm: Any, other: int) -> None:
    """Lose what this rank sends to `other` from now on: it goes out under tags that `other` does not receive."""
    send = comm._transport._post_send
    comm._transport._post_send = lambda tensor, dst, tag: send(tensor, dst, _ASTRAY if dst == other else tag)


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
    backend, kind = "ucx" if fault == "cut" else "shm", FAULTS[fault]
    truth = Truth(kind, victim, other if fault == "cut" else None)
    steps = 60 if fault == "slow" else 10_000
    # a busy machine evicts no rank that is late: another rank would then be the last that was late
    options = {"min_size": 1, "timeouts": Timeouts(heartbeat=0.5, suspect=8.0)}
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
