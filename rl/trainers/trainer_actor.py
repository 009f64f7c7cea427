"""`TrainerActor`: a member or a spare of the trainers' session, with a thread of its own for the steps."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from holdfast import ft
from holdfast.comms.errors import HoldfastError, StaleEpoch, describe
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.replay_buffer import BufferState, StepReport
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import EncodedBatch
from holdfast.rl.telemetry import TrainerStatus, WorkLog, WorkReport
from holdfast.rl.trainers.training import BadBatch, Training
from holdfast.store import WeightStore

BATCH_SECONDS = 3600.0
"""Seconds that a trainer waits for a batch: the longest time to generate one.

The replay buffer ends a run sooner, if no group comes any more; this is for a driver that is lost with its host.
"""

CLOSE_SECONDS = 30.0
"""Seconds that `close` waits for the step that is being computed."""

KEPT = 3
"""The number of newest batches and reports that are kept: members are at most one step apart, and have the next."""

LOOK_SECONDS = 0.05
"""Seconds of one wait for a batch, after which `over` is called."""

T = TypeVar("T")
Numbered = TypeVar("Numbered", EncodedBatch, StepReport)


class TrainerEnded(HoldfastError):
    """The trainer does not train any more: it was closed, or its steps ended with the error in `why`.

    `fault`: that error is none of holdfast's own, so its traceback has to be seen.
    """

    def __init__(self, why: str, *, fault: bool = False) -> None:
        self.why, self.fault = why, fault
        super().__init__(f"the trainer has ended: {why}; start another one")


class TrainerLeftOut(TrainerEnded):
    """The other trainers go on without this one, and its process must be replaced.

    They took it for dead, or it could not join them for a reason that passes.
    """

    retryable = True


class TrainerPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where training begins: at `step`, with the replay `buffer` that was saved then; None in a new run."""

    step: int
    buffer: BufferState | None


class TrainerActor:
    """A trainer: its methods are the endpoints of an actor.

    `session` are arguments of `ft.Session`; what they leave out comes from the environment. `store` is the URL of the
    store to publish to, none if it is empty, `checkpoints` the folder of the checkpoints. Raises `ModelMisfit`, and the
    errors of a session's start.
    """

    def __init__(
        self,
        config: RunConfig,
        source: ModelSource,
        store: str = "",
        session: Mapping[str, Any] | None = None,
        checkpoints: str = "",
    ) -> None:
        self._config = config
        self._changed = threading.Condition()
        """Held to read or change what the endpoints and the thread of the steps share: the fields up to `_news`."""
        self._batches: dict[int, EncodedBatch] = {}
        self._reports: dict[int, StepReport] = {}
        self._position: TrainerPosition | None = None
        self._digest: str | None = None
        self._cause: BaseException | None = None
        self._over = self._closed = False
        self._news: Future[None] = Future()
        """Done at the next change."""
        self._work, copies, keep = WorkLog(), config.store.copies, config.kept_versions
        to = WeightStore(store, replicas=copies, keep=keep, hold=False) if store else None
        self._training = Training(config, source, to, self._take, self._report, self._begun, self._work, checkpoints)
        options = {"shards": config.trainer.units, **(session or {})}
        self._session = ft.Session(**options)
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    async def begin(self) -> None:
        """Join the session, and start with its steps."""
        self._thread.start()

    async def position(self) -> TrainerPosition:
        """Wait until this trainer takes part; returns where training began then. Raises `TrainerEnded`."""
        return await self._until(lambda: self._position)

    async def train(self, batch: EncodedBatch) -> StepReport | None:
        """Train on a batch with the other members, which get the same one; returns once it is committed.

        Returns None if this trainer does not take part before two later batches come: a spare. A batch is trained on
        once, also if it comes twice. Raises `TrainerEnded` if the steps end, with the cause as its `__cause__`;
        `TrainerLeftOut` if the others go on.
        """
        with self._changed:
            if self._over:
                raise self._ended()
            if self._reply_to(batch.step) is None:
                _put(self._batches, batch)
                self._tell()
        [reply] = await self._until(lambda: self._reply_to(batch.step))
        return reply

    async def status(self) -> TrainerStatus:
        """The state of this trainer."""
        session = self._session
        with self._changed:
            newest = max(self._batches, default=None)
        return TrainerStatus(
            pid=os.getpid(),
            rank=session.rank,
            epoch=session.epoch,
            committed=min(session.step, self._config.steps),
            newest_batch=newest,
        )

    async def work(self) -> WorkReport:
        """What this trainer did since the last call."""
        return self._work.report()

    async def finished(self) -> str:
        """Wait until all batches are committed and published; returns the digest of the last weights.

        It is "" for a spare that was not needed. Raises as `train`.
        """
        return await self._until(lambda: self._digest)

    def close(self) -> None:
        """Leave the session at the next wait for a batch, as a death would, and the store. Idempotent.

        A spare waits in its session for as long as the job runs, so its thread goes with the process.
        """
        with self._changed:
            self._closed = True
        if self._thread.ident is not None:
            if self._session.rank is not None:
                self._thread.join(CLOSE_SECONDS)
        elif not self._over:
            self._end(TrainerEnded("it was closed"))
        self._training.close()

    async def _until(self, answer: Callable[[], T | None]) -> T:
        """Wait for an answer, which a change may give. Raises `TrainerEnded` if the steps are over without one."""
        while True:
            with self._changed:
                if (found := answer()) is not None:
                    return found
                if self._over:
                    raise self._ended()
                news = self._news
            await asyncio.shield(asyncio.wrap_future(news))

    def _reply_to(self, step: int) -> tuple[StepReport | None] | None:
        """What `train` returns for the batch that begins with `step`, in a tuple; None while it must wait."""
        if step in self._reports:
            return (self._reports[step],)
        later = sum(each > step for each in self._batches)
        over = self._digest is not None or any(each > step for each in self._reports)
        return (None,) if over or later > 1 else None

    def _tell(self) -> None:
        """Wake the endpoints that wait for a change, and the thread of the steps. The caller holds `_changed`."""
        self._changed.notify_all()
        news, self._news = self._news, Future()
        news.set_result(None)

    # -- in the thread of the steps

    def _run(self) -> None:
        try:
            with self._session as session:
                digest = self._training.run(session)
        except BaseException as error:
            self._end(error)
        else:
            self._end(None, digest)

    def _end(self, cause: BaseException | None, digest: str | None = None) -> None:
        with self._changed:
            self._over, self._cause, self._digest = True, cause, digest
            self._tell()

    def _ended(self) -> TrainerEnded:
        cause = self._cause
        ours = isinstance(cause, HoldfastError)
        passes = isinstance(cause, HoldfastError) and cause.retryable and self._position is None
        kind = TrainerLeftOut if passes or isinstance(cause, StaleEpoch) else TrainerEnded
        why = "all batches are committed" if cause is None else describe(cause)
        ended = kind(why, fault=cause is not None and not ours)
        ended.__cause__ = cause
        return ended

    def _begun(self, step: int, buffer: BufferState | None) -> None:
        with self._changed:
            self._position = TrainerPosition(step=step, buffer=buffer)
            self._tell()

    def _take(self, step: int, over: Callable[[], None]) -> EncodedBatch:
        """Wait for the batch that begins with update `step`; it stays. `over` is called meanwhile, and may raise."""
        deadline = time.monotonic() + BATCH_SECONDS
        while True:
            with self._changed:
                if step in self._batches:
                    return self._batches[step]
                left = deadline - time.monotonic()
                if left <= 0:
                    has = f"the newest is that of step {max(self._batches)}" if self._batches else "none has come"
                    raise BadBatch(step, f"it did not come within {BATCH_SECONDS:.3g} s: {has}")
                self._changed.wait(min(left, LOOK_SECONDS))
                if self._closed:
                    raise TrainerEnded("it was closed")
            over()

    def _report(self, report: StepReport) -> None:
        with self._changed:
            _put(self._reports, report)
            self._tell()


def _put(newest: dict[int, Numbered], added: Numbered) -> None:
    """Add what belongs to a step; the oldest one goes if there are too many."""
    newest[added.step] = added
    while len(newest) > KEPT:
        del newest[min(newest)]
