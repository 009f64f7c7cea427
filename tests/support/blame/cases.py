"""Generated cases: a job of the model with one fault, everything about it drawn from a seed."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.comms.errors import Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.ft.diagnosis.analyse import analyse
from holdfast.ft.diagnosis.evidence import Finding, JobEvidence, ProcessState, assemble
from holdfast.ft.telemetry.flight import read
from support.blame.model import NEVER, ModelCall, ModelWorld

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
