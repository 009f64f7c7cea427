"""The driver's handlers of remote calls: they lease units, keep samples, and record versions and commits.

All handlers run in the driver's event loop, so the state needs no locks. A call that cannot be answered yet waits up to
`PATIENCE` seconds and then returns empty: callers call again, and can check for failures in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from holdfast.comms.errors import HoldfastError, Mismatch, again
from holdfast.ft.control.rpc import Handler
from holdfast.rl.happenings import (
    Evaluated,
    Happening,
    PointReached,
    Published,
    StepCommitted,
    TrainerFinished,
    UnitDone,
    WarmedUp,
)
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.learning.task import ANSWER_TOKENS
from holdfast.rl.roles import wire
from holdfast.rl.roles.buffer import ReplayBuffer
from holdfast.rl.units import Ledger, Unit

PATIENCE = 0.25
"""Seconds that a call waits at most for its answer to exist."""

Audience = Callable[[Happening], None]


async def _go_on(worker: str, reached: wire.Reached) -> None:
    """The default `pause`: no faults are planned."""


class Service:
    """The state of a run, and the handlers by which workers change it.

    `pause(worker, reached)` is awaited before a worker may continue from a point where a fault is planned.
    """

    def __init__(
        self,
        recipe: Recipe,
        audience: Audience,
        pause: Callable[[str, wire.Reached], Awaitable[None]] = _go_on,
    ) -> None:
        self.recipe = recipe
        self.ledger = Ledger(recipe)
        self.buffer = ReplayBuffer(recipe)
        self.digests: dict[str, str] = {}
        self.epoch, self.size = 0, 0
        self.ranks: dict[str, int] = {}
        """The trainers of the newest `epoch` that have asked for samples, and their ranks among its `size`."""
        self.failure: HoldfastError | None = None
        self._audience, self._pause = audience, pause
        self._rewards: dict[int, list[float]] = {}
        self._scored: set[int] = set()
        self._warmed = False
        self._over = False
        self._changed = asyncio.Event()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by the names of their calls."""
        return {
            "warmed": self._on_warmed,
            "work": self._on_work,
            "take": self._on_take,
            "reached": self._on_reached,
            "finished": self._on_finished,
            "stay": self._on_stay,
        }

    @property
    def running(self) -> bool:
        """Whether a trainer is in a step, so that the job has its first members."""
        return self.epoch > 0

    @property
    def done(self) -> bool:
        """Whether all steps are committed, the last weights published, and all evaluations done."""
        return (
            bool(self.digests)
            and self.buffer.committed == self.recipe.steps
            and self.ledger.published == self.recipe.steps
            and not self.ledger.open
        )

    async def until_done(self) -> None:
        """Wait for `done`; raises the first `failure`."""
        while not self.done:
            if self.failure is not None:
                raise again(self.failure)
            await self._change(1.0)

    def end(self) -> None:
        """Let every worker stop at its next call."""
        self._over = True
        self._wake()

    def fail(self, error: HoldfastError) -> None:
        """End the run with `error`."""
        self.failure = self.failure or error
        self._wake()

    def lose(self, worker: str) -> tuple[Unit, ...]:
        """Requeue and return the units of a worker that is gone."""
        units = self.ledger.release(worker)
        self._wake()
        return units

    def _on_warmed(self, worker: str, body: bytes) -> bytes:
        warmed = wire.decode(body, wire.Warmed)
        if not self._warmed:
            self._warmed = True
            self._audience(WarmedUp(time=time.monotonic(), untrained=warmed.untrained, loss=warmed.loss))
        return b""

    async def _on_work(self, worker: str, body: bytes) -> bytes:
        request = wire.decode(body, wire.WorkRequest)
        if request.done is not None:
            self._accept(worker, request.done, request.result)
        deadline = time.monotonic() + PATIENCE
        while not self._over:
            unit = self.ledger.lease(worker, time.monotonic())
            if unit is not None:
                return wire.encode(wire.WorkReply(unit))
            if not await self._change(deadline - time.monotonic()):
                break
        return wire.encode(wire.WorkReply(None, self._over))

    async def _on_take(self, worker: str, body: bytes) -> bytes:
        request = wire.decode(body, wire.TakeRequest)
        if request.epoch > self.epoch:
            self.epoch, self.size, self.ranks = request.epoch, request.size, {}
        if request.epoch == self.epoch:
            self.ranks[worker] = request.rank
        self._publish(request.published)
        self._commit(request.step, request.epoch, request.size)
        deadline = time.monotonic() + PATIENCE
        while True:
            samples = self.buffer.take(request.step, request.units)
            if samples is not None or not await self._change(deadline - time.monotonic()):
                return wire.encode(wire.TakeReply(samples))

    async def _on_reached(self, worker: str, body: bytes) -> bytes:
        reached = wire.decode(body, wire.Reached)
        self._audience(PointReached(time=time.monotonic(), worker=worker, point=reached.point, step=reached.step))
        await self._pause(worker, reached)
        return b""

    def _on_finished(self, worker: str, body: bytes) -> bytes:
        finished = wire.decode(body, wire.Finished)
        self._publish(finished.published)
        self._commit(self.recipe.steps, finished.epoch, finished.size)
        self.digests[worker] = finished.digest
        now = time.monotonic()
        self._audience(TrainerFinished(time=now, worker=worker, digest=finished.digest, epoch=finished.epoch))
        if len(set(self.digests.values())) > 1:
            self.fail(Mismatch(f"trainers ended with different weights: {self.digests}"))
        self._wake()
        return b""

    async def _on_stay(self, worker: str, body: bytes) -> bytes:
        """Answer, once the run is over, the call of a worker that only has to stay alive until then."""
        while not self._over:
            await self._change(60.0)
        return b""

    def _accept(self, worker: str, unit: Unit, result: bytes) -> None:
        now = time.monotonic()
        if unit.kind == "evaluate":
            if result and unit.version not in self._scored:
                score = wire.decode(result, wire.EvaluationScore)
                self._scored.add(unit.version)
                self._audience(
                    Evaluated(time=now, version=unit.version, exact_match=score.exact_match, digest=score.digest)
                )
        else:
            samples = wire.unpack_samples(result, self.recipe.unit_samples)
            try:
                new = self.buffer.put(unit, result)
            except HoldfastError as error:
                self.fail(error)
                raise
            if new:
                self._rewards.setdefault(unit.step, []).append(float(samples.rewards.mean()))
        if self.ledger.complete(unit):
            self._audience(UnitDone(time=now, unit=unit, worker=worker))
        self._wake()

    def _publish(self, version: int) -> None:
        if version > self.ledger.published:
            for new in range(self.ledger.published + 1, version + 1):
                self._audience(Published(time=time.monotonic(), version=new))
            self.ledger.publish(version)
            self._wake()

    def _commit(self, steps: int, epoch: int, size: int) -> None:
        for step in range(self.buffer.committed, steps):
            if len(self._rewards.get(step, ())) < self.recipe.units:
                raise ValueError(f"step {step} cannot be committed: some of its units were never generated")
            rewards = self._rewards.pop(step)
            self._audience(
                StepCommitted(
                    time=time.monotonic(),
                    step=step,
                    reward=sum(rewards) / len(rewards),
                    tokens=self.recipe.step_samples * ANSWER_TOKENS,
                    epoch=epoch,
                    size=size,
                )
            )
        self.buffer.commit(steps)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout: float) -> bool:
        """Wait for a change of the state; False after `timeout` seconds without one."""
        if timeout <= 0:
            return False
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
