"""The replay buffer between generation and training: bounded staleness, every prompt exactly once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from holdfast.rl.data.buffer_state import BufferState, Permit, StalenessRule, even_edges
from holdfast.rl.data.episode import Group
from holdfast.rl.data.errors import BufferStalled

Result = TypeVar("Result")


class FailedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The number of a prompt that has no or one episode left, since the others failed, and why."""

    number: int
    reasons: tuple[str, ...]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one batch. Its first update is `step`; `after` is the buffer once it is trained.

    A trainer that saves `after` together with its weights resumes without training a group twice, or skipping one.
    """

    step: int
    groups: tuple[Group, ...]
    after: BufferState

    @property
    def staleness(self) -> tuple[int, ...]:
        """How many versions behind the weights each group's oldest token is, at the update that trains the group."""
        edges = even_edges(len(self.groups), self.after.rule.updates)
        updates = [self.step + update for update, (begin, end) in enumerate(edges) for _ in range(begin, end)]
        return tuple(update - group.version for update, group in zip(updates, self.groups, strict=True))


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a trained batch gave: the weights' version after it, and named figures such as `loss`."""

    step: int
    version: int
    figures: Mapping[str, float] = msgspec.field(default_factory=dict)


class ReplayBuffer:
    """A `BufferState` that tasks of one event loop wait on.

    A change wakes the trainer once its batch may be full, and as many generations as may begin: each wake costs a turn
    of the loop. Waits end with `BufferStalled` if nothing happened to the buffer for `patience` seconds.
    """

    def __init__(self, rule: StalenessRule, patience: float = 600.0) -> None:
        self._state = BufferState(rule=rule)
        self._patience = patience
        self._changed = time.monotonic()
        self._generations: deque[asyncio.Future[bool]] = deque()
        self._takers: deque[asyncio.Future[bool]] = deque()
        self._woken = 0

    @classmethod
    def from_state(cls, state: BufferState, patience: float = 600.0) -> ReplayBuffer:
        """The buffer of a run that goes on: prompts that were in flight begin anew."""
        buffer = cls(state.rule, patience)
        buffer._state = state.resumed()
        return buffer

    def state(self) -> BufferState:
        """The buffer now; a batch that is being trained counts as not trained (see `Batch.after`)."""
        return self._state

    @property
    def admissible(self) -> int:
        """How many groups may begin now."""
        return self._state.admissible

    @property
    def required_version(self) -> int | None:
        """The exact version that groups must be drawn with; None if any from their permit's on will do."""
        rule = self._state.rule
        return self._state.served if rule.bound < rule.updates else None

    async def admit(self) -> Permit:
        """Wait until a group may begin, and begin it."""
        state, permit = await self._until(lambda: self._state.begin(), self._generations, "a generation waits to begin")
        self._set(state)
        return permit

    async def add(self, group: Group | FailedGroup) -> None:
        """Add the group of a prompt that was begun. Raises `StaleGroup`."""
        if isinstance(group, FailedGroup):
            self._set(self._state.fail(group.number))
        else:
            self._set(self._state.finish(group))

    def lose(self, number: int) -> None:
        """The generation of a prompt is lost: the next permit is for it."""
        self._set(self._state.lose(number))

    async def take(self, step: int) -> Batch:
        """Wait for the groups of the batch that begins with update `step`. Taking it again gives the same batch."""
        number = step // self._state.rule.updates
        state = await self._until(lambda: self._state.take(number), self._takers, f"step {step} waits for its groups")
        self._set(state)
        return Batch(step=step, groups=state.batch_groups(), after=state.commit())

    def commit(self) -> None:
        """The batch that was taken is trained, or given to the trainers."""
        self._set(self._state.commit())

    def serve(self, version: int) -> None:
        """All generators have reached `version`."""
        self._set(self._state.serve(version))

    def _set(self, state: BufferState) -> None:
        if state is not self._state:
            self._state, self._changed = state, time.monotonic()
            self._wake()

    def _wake(self) -> None:
        if self._generations:
            admissible = self._state.admissible
            while self._generations and self._woken < admissible:
                self._woken += _settle(self._generations.popleft(), True)
        if self._takers and len(self._state.ready) >= self._state.rule.groups:
            while self._takers:
                _settle(self._takers.popleft(), True)

    async def _until(
        self, attempt: Callable[[], Result | None], queue: deque[asyncio.Future[bool]], waiting: str
    ) -> Result:
        began = time.monotonic()
        while (result := attempt()) is None:
            left = max(began, self._changed) + self._patience - time.monotonic()
            if left <= 0:
                raise BufferStalled(waiting, self._patience, self._describe())
            await self._turn(queue, left)
        return result

    async def _turn(self, queue: deque[asyncio.Future[bool]], seconds: float) -> None:
        """Wait in `queue` until woken, at most so long."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        queue.append(woken)
        late = loop.call_later(seconds, _settle, woken, False)
        try:
            await woken
        except asyncio.CancelledError:
            if self._left(queue, woken):  # its turn is the next one's
                self._wake()
            raise
        finally:
            late.cancel()
        self._left(queue, woken)

    def _left(self, queue: deque[asyncio.Future[bool]], woken: asyncio.Future[bool]) -> bool:
        """Take `woken` out of `queue`; True if it was woken."""
        if woken.done() and not woken.cancelled() and woken.result():
            self._woken -= queue is self._generations
            return True
        if woken in queue:
            queue.remove(woken)
        return False

    def _describe(self) -> str:
        state = self._state
        return (
            f"batch {state.batch} is next, version {state.served} is served, {len(state.in_flight)} in flight, "
            f"{len(state.ready)} ready, {len(state.again)} to begin again"
        )


def _settle(waiting: asyncio.Future[bool], woken: bool) -> bool:
    """Let the task that waits for this go on; False if it does so already."""
    if waiting.done():
        return False
    waiting.set_result(woken)
    return True
