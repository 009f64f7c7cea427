"""`TrainerActor`: a member or a spare of the trainers' session, with a thread of its own for the steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from holdfast import ft
from holdfast.comms.errors import HoldfastError, StaleEpoch, describe
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.replay_buffer import BufferState, StepReport
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import EncodedBatch
from holdfast.rl.telemetry import WorkLog, WorkReport
from holdfast.rl.trainers.training import Publisher, Training
from holdfast.store import WeightStore

BATCH_SECONDS = 600.0
"""Seconds that a trainer waits for a batch."""

CLOSE_SECONDS = 30.0
"""Seconds that `close` waits for the step that is being computed."""


KEPT = 3
"""The number of newest batches that are kept: members of a session are at most one step apart, and have the next."""

LOOK_SECONDS = 0.05
"""Seconds of one wait for a batch, after which `over` is called."""


class NoBatch(HoldfastError):
    """The batch of a step did not come in time."""

    def __init__(self, step: int, seconds: float, newest: int | None) -> None:
        self.step, self.seconds, self.newest = step, seconds, newest
        has = "none has come" if newest is None else f"the newest is that of step {newest}"
        super().__init__(
            f"the batch of step {step} did not come within {seconds:.3g} s: {has}; send it to all trainers"
        )


class TrainerEnded(HoldfastError):
    """The trainer does not train any more: it was closed, or its steps ended with the error in `why`.

    `fault`: that error is none of holdfast's own, so its traceback has to be seen.
    """

    def __init__(self, why: str, *, fault: bool = False) -> None:
        self.why, self.fault = why, fault
        super().__init__(f"the trainer has ended: {why}; start another one")


class TrainerEvicted(TrainerEnded):
    """The other trainers go on without this one, which they took for dead; its process must be replaced."""

    retryable = True


class TrainerUnjoined(TrainerEnded):
    """The trainer could not join the others for a reason that passes; its process must be replaced."""

    retryable = True


class BatchInbox:
    """Filled by one thread, read by another."""

    def __init__(self) -> None:
        self._batches: dict[int, EncodedBatch] = {}
        self._changed = threading.Condition()

    @property
    def newest(self) -> int | None:
        """The first update of the newest batch; None if none has come."""
        with self._changed:
            return max(self._batches, default=None)

    def put(self, batch: EncodedBatch) -> None:
        """Add a batch. The oldest one goes if there are too many."""
        with self._changed:
            self._batches[batch.step] = batch
            while len(self._batches) > KEPT:
                del self._batches[min(self._batches)]
            self._changed.notify_all()

    def take(self, step: int, over: Callable[[], None], timeout: float) -> EncodedBatch:
        """Wait for the batch that begins with update `step`; it stays. `over` is called meanwhile, and may raise.

        Raises `NoBatch`.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if step in self._batches:
                    return self._batches[step]
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NoBatch(step, timeout, max(self._batches, default=None))
                self._changed.wait(min(left, LOOK_SECONDS))
            over()


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a trainer: its rank in `epoch` (None: a spare), and the updates committed."""

    rank: int | None
    epoch: int | None
    committed: int
    newest_batch: int | None


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
        self._inbox = BatchInbox()
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._waiting: dict[int, list[Future[StepReport | None]]] = {}
        self._last: StepReport | None = None
        self._position: Future[TrainerPosition] = Future()
        self._joined = False
        self._end: Future[str] = Future()
        self._publisher: Publisher | None = None
        self._work = WorkLog()
        if store:
            publishes = WeightStore(store, replicas=config.store.copies, keep=config.kept_versions, hold=False)
            self._publisher = Publisher(publishes, self._work)
        self._training = Training(
            config, source, self._publisher, self._take, self._report, self._begun, self._work, checkpoints
        )
        options = {"shards": config.trainer.units, **(session or {})}
        self._session = ft.Session(**options)
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    async def begin(self) -> None:
        """Join the session, and start with its steps."""
        self._thread.start()

    async def position(self) -> TrainerPosition:
        """Wait until this trainer takes part; returns where training began then. Raises `TrainerEnded`."""
        return await asyncio.shield(asyncio.wrap_future(self._position))

    async def train(self, batch: EncodedBatch) -> StepReport | None:
        """Train on a batch with the other members, which get the same one; returns once it is committed.

        Returns None if this trainer does not take part before two later batches come: a spare. A batch is trained on
        once, also if it comes twice. Raises `TrainerEnded` if the steps end, with the cause as its `__cause__`;
        after an eviction `TrainerEvicted`.
        """
        reply: Future[StepReport | None] = Future()
        with self._changed:
            if self._end.done():
                raise self._ended()
            if self._last is not None and self._last.step >= batch.step:
                return self._last if self._last.step == batch.step else None
            late = sorted(step for step in self._waiting if step < batch.step)[:-1]
            superseded = [each for step in late for each in self._waiting.pop(step)]
            self._waiting.setdefault(batch.step, []).append(reply)
        for each in superseded:
            _answer(each, None)
        self._inbox.put(batch)
        return await asyncio.wrap_future(reply)

    async def status(self) -> TrainerStatus:
        """The state of this trainer."""
        session = self._session
        return TrainerStatus(
            rank=session.rank,
            epoch=session.epoch,
            committed=min(session.step, self._config.steps),
            newest_batch=self._inbox.newest,
        )

    async def work(self) -> WorkReport:
        """What this trainer did since the last call."""
        return self._work.report()

    async def finished(self) -> str:
        """Wait until all batches are committed and published; returns the digest of the last weights.

        It is "" for a spare that was not needed. Raises as `train`.
        """
        try:
            return await asyncio.shield(asyncio.wrap_future(self._end))
        except Exception as error:
            raise self._ended() from error

    def close(self) -> None:
        """Leave the session at the next wait for a batch, as a death would, and the store. Idempotent.

        A spare waits in its session for as long as the job runs, so its thread goes with the process.
        """
        self._closed.set()
        if self._thread.ident is not None:
            if self._session.rank is not None:
                self._thread.join(CLOSE_SECONDS)
        elif not self._end.done():
            self._settle(TrainerEnded("it was closed"))
        if self._publisher is not None:
            self._publisher.close()

    def _run(self) -> None:
        try:
            with self._session as session:
                digest = self._training.run(session)
        except BaseException as error:
            self._settle(error)
        else:
            self._settle(None, digest)

    def _settle(self, error: BaseException | None, digest: str = "") -> None:
        with self._changed:
            if error is not None:
                self._end.set_exception(error)
            else:
                self._end.set_result(digest)
            left = [each for replies in self._waiting.values() for each in replies]
            self._waiting.clear()
        for each in left:
            _answer(each, None if error is None else self._ended())
        _answer(self._position, self._ended())

    def _ended(self) -> HoldfastError:
        cause = self._end.exception()
        kind = TrainerEvicted if isinstance(cause, StaleEpoch) else TrainerEnded
        if not self._joined and isinstance(cause, HoldfastError) and cause.retryable:
            kind = TrainerUnjoined
        fault = cause is not None and not isinstance(cause, HoldfastError)
        ended = kind("all batches are committed" if cause is None else describe(cause), fault=fault)
        ended.__cause__ = cause
        return ended

    def _begun(self, step: int, buffer: BufferState | None) -> None:
        self._joined = True
        _answer(self._position, TrainerPosition(step=step, buffer=buffer))

    def _take(self, step: int, over: Callable[[], None]) -> EncodedBatch:
        def check() -> None:
            if self._closed.is_set():
                raise TrainerEnded("it was closed")
            over()

        return self._inbox.take(step, check, BATCH_SECONDS)

    def _report(self, report: StepReport) -> None:
        with self._changed:
            self._last = report
            waiting = self._waiting.pop(report.step, [])
        for each in waiting:
            _answer(each, report)


def _answer(reply: Future[Any], answer: object) -> None:
    """Set the result, or the error, of a reply that is still waited for."""
    if reply.done() or not reply.set_running_or_notify_cancel():
        return
    if isinstance(answer, BaseException):
        reply.set_exception(answer)
    else:
        reply.set_result(answer)
