"""A small model of ranks that run collectives by messages: makes flight recordings of jobs with a known culprit.

Time is virtual. Collectives run round by round (ring, dissemination, binomial tree) with noise on computation and
messages, so the fault alone determines which ranks are blocked, in which round, and which ones still leave the op.
The real recorder writes the results.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.ft.events import StepBegun
from holdfast.ft.telemetry.flight.recorder import FlightRecorder

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
