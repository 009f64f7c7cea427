"""The replay buffer between generation and training: a pure state machine, and the tasks that wait on it.

The state machine decides admission of groups, choice of batches, and the staleness bound.

**Claim.** If a group's oldest token has version v, no update s with s - v > `bound` trains the group, in any order of
`begin`, `finish`, `fail`, `serve`, `take` and `commit`; and a batch that waits is filled once the generators
have finished what they began.

With b the next batch, and D(t) the number of groups in flight or ready with a deadline <= t, all steps keep:

  (1) begun - failed <= (deadline(served) + 1) * groups.
  (2) D(t) <= (t + 1 - b) * groups for every t >= b - 1.

`docs/concepts/staleness.md` has the proof.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

import msgspec

from holdfast.rl.data.episode import Group
from holdfast.rl.errors import BufferStalled, OutOfOrder, StaleGroup, StalenessUnreachable

_ready_age = attrgetter("version", "group.prompt.number")


class StalenessRule(msgspec.Struct, frozen=True, kw_only=True):
    """A batch has `groups`, each trained at most `bound` updates after its oldest token's version.

    A batch is used for `updates` updates of the weights.
    """

    groups: int
    bound: int = 0
    updates: int = 1

    def __post_init__(self) -> None:
        if self.groups < 1 or self.updates < 1 or self.bound < 0:
            raise StalenessUnreachable(f"{self}: groups and updates must be at least 1, the bound at least 0")
        if self.bound < self.updates - 1:
            raise StalenessUnreachable(
                f"the last of updates={self.updates} of a batch is {self.updates - 1} after the newest possible "
                f"version, and bound={self.bound}; raise the bound to at least {self.updates - 1}"
            )

    def deadline(self, version: int) -> int:
        """The last batch that may hold a group of this version."""
        return (version + self.bound + 1) // self.updates - 1


class Permit(msgspec.Struct, frozen=True):
    """Leave to generate the group of prompt `number` with weights of `version` or later."""

    number: int
    version: int


class ReadyGroup(msgspec.Struct, frozen=True):
    """A group that waits to be trained, and the version that its staleness counts from."""

    group: Group
    version: int


class BufferState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole buffer; methods return the next state. Encoded, it is what a run resumes from.

    `served` is the version that all generators have reached, `batch` the next batch to train, `begun` the lowest prompt
    number that was never begun, `failed` the count of prompts without a usable group. `again` are prompts that a driver
    before was generating, `in_flight` those being generated with the versions of their permits, `ready` the groups by
    the numbers of their prompts, and `taken` the prompts of the batch that is being trained.
    """

    rule: StalenessRule
    served: int = 0
    batch: int = 0
    begun: int = 0
    failed: int = 0
    again: tuple[int, ...] = ()
    in_flight: Mapping[int, int] = msgspec.field(default_factory=dict)
    ready: Mapping[int, ReadyGroup] = msgspec.field(default_factory=dict)
    taken: tuple[int, ...] = ()

    @property
    def admissible(self) -> int:
        """How many groups may begin now."""
        fresh = (self.rule.deadline(self.served) + 1) * self.rule.groups - (self.begun - self.failed)
        return len(self.again) + max(0, fresh)

    def begin(self) -> tuple[BufferState, Permit] | None:
        """Begin the next prompt, those of `again` first; None while no group may begin."""
        if not self.admissible:
            return None
        number = self.again[0] if self.again else self.begun
        in_flight, begun = {**self.in_flight, number: self.served}, max(self.begun, number + 1)
        return self._replace(again=self.again[1:], begun=begun, in_flight=in_flight), Permit(number, self.served)

    def finish(self, group: Group) -> BufferState:
        """Add the group of a prompt in flight. Raises `StaleGroup`: it is then still in flight."""
        number, version = group.prompt.number, group.version
        rest = self._without(number)
        if version < (permitted := self.in_flight[number]):
            raise StaleGroup(number, version, permitted)
        return self._replace(in_flight=rest, ready={**self.ready, number: ReadyGroup(group, version)})

    def fail(self, number: int) -> BufferState:
        """A prompt in flight gives no group, now or later."""
        return self._replace(in_flight=self._without(number), failed=self.failed + 1)

    def serve(self, version: int) -> BufferState:
        """All generators have reached the weights of `version`."""
        if version < self.served:
            raise OutOfOrder(f"version {version} is served after version {self.served}: versions do not go back")
        return self._replace(served=version)

    def take(self, batch: int) -> BufferState | None:
        """Choose the groups of `batch`, the next one; None while they must be waited for.

        Choosing again changes nothing.
        """
        if batch != self.batch:
            raise OutOfOrder(f"batch {batch} is taken, and the next one is {self.batch}: commit each before the next")
        if self.taken:
            return self
        oldest = sorted(self.ready.values(), key=_ready_age)[: self.rule.groups]
        chosen = {each.group.prompt.number for each in oldest}
        if len(chosen) < self.rule.groups or not self._feasible_without(chosen):
            return None
        return self._replace(taken=tuple(sorted(chosen)))

    def batch_groups(self) -> tuple[Group, ...]:
        """The groups of the batch that was taken, in the order of their prompts."""
        return tuple(self.ready[number].group for number in self.taken)

    def commit(self) -> BufferState:
        """The batch that was taken is trained, by all of its updates."""
        if not self.taken:
            raise OutOfOrder(f"batch {self.batch} is committed, and was not taken")
        taken = set(self.taken)
        rest = {number: each for number, each in self.ready.items() if number not in taken}
        return self._replace(batch=self.batch + 1, ready=rest, taken=())

    def resumed(self) -> BufferState:
        """The state for a new process: what was in flight, or taken, begins anew."""
        return self._replace(again=tuple(sorted((*self.again, *self.in_flight))), in_flight={}, taken=())

    def _feasible_without(self, chosen: set[int]) -> bool:
        """Whether every other group can still be trained in time, after this batch: invariant (2)."""
        versions = [each.version for number, each in self.ready.items() if number not in chosen]
        deadlines = sorted(self.rule.deadline(each) for each in (*versions, *self.in_flight.values()))
        return all(
            count <= (deadline - self.batch) * self.rule.groups for count, deadline in enumerate(deadlines, start=1)
        )

    def _without(self, number: int) -> dict[int, int]:
        """What is in flight but a prompt."""
        if number not in self.in_flight:
            raise OutOfOrder(f"prompt {number} is not in flight: it was not begun, or it is over already")
        return {each: version for each, version in self.in_flight.items() if each != number}

    def _replace(self, **fields: object) -> BufferState:
        return msgspec.structs.replace(self, **fields)


def even_edges(count: int, parts: int) -> list[tuple[int, int]]:
    """The edges of `parts` consecutive parts of `count` things, as even as possible."""
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


Result = TypeVar("Result")
Queue = deque["asyncio.Future[None]"]


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
        self._generations, self._takers = Queue(), Queue()

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
        self._set(state, wake=False)
        return permit

    async def add(self, group: Group | FailedGroup) -> None:
        """Add the group of a prompt that was begun. Raises `StaleGroup`."""
        if isinstance(group, FailedGroup):
            self._set(self._state.fail(group.number))
        else:
            self._set(self._state.finish(group))

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

    def _set(self, state: BufferState, *, wake: bool = True) -> None:
        if state is not self._state:
            self._state, self._changed = state, time.monotonic()
            if wake:
                self._wake()

    def _wake(self) -> None:
        state = self._state
        woken = [self._generations.popleft() for _ in range(min(state.admissible, len(self._generations)))]
        if len(state.ready) >= state.rule.groups:
            woken += self._takers
            self._takers.clear()
        for each in woken:
            each.set_result(None)

    async def _until(self, attempt: Callable[[], Result | None], queue: Queue, waiting: str) -> Result:
        began = time.monotonic()
        while (result := attempt()) is None:
            left = max(began, self._changed) + self._patience - time.monotonic()
            if left <= 0:
                raise BufferStalled(waiting, self._patience, self._describe())
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append(woken)
            try:
                await asyncio.wait([woken], timeout=left)
            except asyncio.CancelledError:
                if woken.done():  # its turn is the next one's
                    self._wake()
                raise
            finally:
                with suppress(ValueError):
                    queue.remove(woken)
        return result

    def _describe(self) -> str:
        state = self._state
        return (
            f"batch {state.batch} is next, version {state.served} is served, {len(state.in_flight)} in flight, "
            f"{len(state.ready)} ready, {len(state.again)} to begin again"
        )
