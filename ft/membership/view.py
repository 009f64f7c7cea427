"""The view: the members of a job in rank order, at one epoch. Processes agree on it through the register.

Members of a large job send each other a `ViewDelta`: a view of N members has O(N) bytes, and the loss of a host changes
a few ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError
from holdfast.comms.quantities import seconds
from holdfast.comms.transport.base import Peer


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds.

    `heartbeat`: the interval of a process's signs of life. `suspect`: how long it may be silent before it is checked.
    `operation`: the longest that one collective may take, and that members may wait for a member that still computes.
    `rebuild`: the longest from a failure to the next epoch. `join`: how long a job waits for members that it needs.

    Raises ValueError, with the reason, for values that cannot work together.
    """

    heartbeat: float = 0.1
    suspect: float = 0.5
    operation: float = 30.0
    rebuild: float = 10.0
    join: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            try:
                value = seconds(given, f"timeout {field.name}")
            except TypeError as error:
                raise ValueError(str(error)) from None
            except ValueError:
                value = 0.0
            if not value > 0:
                raise ValueError(f"timeout {field.name}={given!r} must be finite and above 0 seconds")
            object.__setattr__(self, field.name, value)
        if self.suspect < 2 * self.heartbeat:
            raise ValueError(
                f"suspect={self.suspect} s must be at least twice heartbeat={self.heartbeat} s: "
                "one late heartbeat would make a healthy process suspect"
            )
        if self.rebuild <= self.suspect:
            raise ValueError(
                f"rebuild={self.rebuild} s must exceed suspect={self.suspect} s: "
                "a second failure during a rebuild could not be noticed in time"
            )
        if self.operation <= self.suspect:
            raise ValueError(
                f"operation={self.operation} s must exceed suspect={self.suspect} s: "
                "operations would time out before a stopped peer is found"
            )
        if self.join <= self.heartbeat:
            raise ValueError(f"join={self.join} s must exceed heartbeat={self.heartbeat} s: nobody could join in time")


class StepError(msgspec.Struct, frozen=True):
    """An exception in step `step` on rank `rank`: its type, its message, and where it was raised."""

    step: int
    rank: int
    kind: str
    message: str
    place: str

    def repeats(self, earlier: StepError) -> bool:
        """Whether it is the same exception again, on any rank, in the same step or the next.

        The next step counts, because a step is committed without the rank that raised if all others had done their
        part.
        """
        alike = msgspec.structs.replace(self, step=earlier.step, rank=earlier.rank) == earlier
        return alike and self.step - earlier.step in (0, 1)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} (step {self.step}, rank {self.rank}, {self.place})"


class StepFailed(HoldfastError):
    """The user's code raised `error` on another rank, and the job has ended with it."""

    def __init__(self, job: str, reason: str, error: StepError) -> None:
        self.job, self.error = job, error
        super().__init__(f"job {job!r} has ended: {reason}")


T = TypeVar("T")

Phase = Literal["forming", "running", "finished", "failed"]

OnDeath = Literal["rebuild", "finish_step", "go_on"]
"""What the living do when a member dies: see `ft.Session`."""

MESH = 64
"""The largest number of members at which each knows all others, unless HOLDFAST_MESH says otherwise."""


class Member(msgspec.Struct, frozen=True):
    """A process that takes part. Its `id` is unique for ever: a process that comes back has another one.

    `address` is its control endpoint, "host:port". `threads` are the kernel's numbers of threads that live as long as
    the process takes part: the end of one is the first sign of its end.
    """

    id: str
    address: str
    peer: Peer
    threads: tuple[int, ...] = ()


class JobIdentity(msgspec.Struct, frozen=True):
    """What tells one job from another, and whether two processes run the same holdfast.

    `key_check` only tells a wrong key from the right one. `version` is that of holdfast ("": unknown).
    """

    name: str
    key_check: str
    version: str

    def conflict(self, there: JobIdentity) -> str | None:
        """Why a process that wants this job cannot be in the job `there`; None if it can."""
        if self.name != there.name:
            return f"it belongs to job {there.name!r}, not to {self.name!r}; use another register"
        if self.key_check != there.key_check:
            return f"it belongs to job {self.name!r} with another key than this one"
        if self.version and there.version and self.version != there.version:
            return (
                f"job {self.name!r} runs on holdfast {there.version}, this process has {self.version}; install the "
                "same version on all hosts"
            )
        return None


class Job(msgspec.Struct, frozen=True):
    """What all members of a job have in common; it does not change from the first running epoch on.

    `size` is the number of members that the job wants, `min_size` the fewest that it can run with. `shards` is the
    number of shards of a step, whatever the size. `backends` are the names that every candidate so far can run, in
    order of preference, and `backend` the one chosen when the job was formed ("" before). By `timeouts` and `mesh` (see
    `Shape`) the members judge each other: with other values a member would be taken for dead, or would not be watched.
    `on_death`: see `ft.Session`. `key_check` and `version`: see `JobIdentity`.
    """

    name: str
    size: int
    min_size: int
    shards: int
    backends: tuple[str, ...]
    backend: str = ""
    key_check: str = ""
    asked: str = "auto"
    timeouts: Timeouts = Timeouts()
    mesh: int = MESH
    on_death: OnDeath = "rebuild"
    version: str = ""

    @property
    def identity(self) -> JobIdentity:
        return JobIdentity(self.name, self.key_check, self.version)

    def conflict(self, there: Job) -> str | None:
        """Why a process that wants this job cannot be in the job `there`; None if it can."""
        if (difference := self.identity.conflict(there.identity)) is not None:
            return difference
        alike = ("size", "min_size", "shards", "mesh", "on_death")
        terms = [(what, getattr(self, what), getattr(there, what)) for what in alike]
        times = [field.name for field in fields(Timeouts)]
        terms += [(what, getattr(self.timeouts, what), getattr(there.timeouts, what)) for what in times]
        for what, mine, theirs in terms:
            if mine != theirs:
                return (
                    f"job {self.name!r} is in use with {what}={theirs}, not {mine}; use another name or the same {what}"
                )
        if self.asked not in ("auto", there.asked, there.backend):
            return f"job {self.name!r} is in use with backend={there.asked!r}, not {self.asked!r}"
        return None


class View(msgspec.Struct, frozen=True, dict=True):
    """One epoch. Rank equals position in `members`; `reason` says in words why this view was made.

    A job is `forming` until it has its members, then `running`, and ends `finished` (all steps committed, or all
    members `stopped` before the last one) or `failed` (it cannot go on, for `reason`; `error` is the user's exception
    if that is the cause).

    A view is degraded if its members build no communicator, but go on with what is left of that of an earlier epoch,
    `degraded_from`, of which they are all living members. 0: they build one.

    What is derived from a view is computed once and kept with it (`remember`), so that a question about one member
    takes no time that grows with their number.
    """

    epoch: int
    phase: Phase
    members: tuple[Member, ...]
    job: Job
    reason: str
    stopped: bool = False
    error: StepError | None = None
    degraded_from: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise ValueError(f"epoch {self.epoch} of a view is not positive")
        if len(self.ranks) != len(self.members):
            raise ValueError("a member is twice in the view")

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """The rank of each member, by its id."""
        return MappingProxyType({member.id: rank for rank, member in enumerate(self.members)})

    @cached_property
    def hosts(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks on each host, ascending; hosts in the order of their first ranks."""
        hosts: dict[str, list[int]] = {}
        for rank, member in enumerate(self.members):
            hosts.setdefault(member.peer.host, []).append(rank)
        return MappingProxyType({host: tuple(ranks) for host, ranks in hosts.items()})

    def rank_of(self, member_id: str) -> int | None:
        """The rank of a member; None for one that is not in this view."""
        return self.ranks.get(member_id)

    def before(self, member_id: str, gone: Set[str]) -> int:
        """The number of members before this one, which is in the view, without those in `gone`."""
        rank = self.ranks[member_id]
        return rank - sum(self.ranks.get(each, rank) < rank for each in gone)

    def left_since(self, old: View) -> tuple[Member, ...]:
        """The members of `old` that are not in this view, in rank order."""

        def work_out() -> tuple[Member, ...]:
            return tuple(m for m in old.members if m.id not in self.ranks)

        return self.remember("left since", old.members, work_out)

    def remember(self, name: str, of: object, work_out: Callable[[], T]) -> T:
        """The cached result of `work_out` for `name` and `of`; computed anew if the cached one is for another `of`.

        Thread-safe: the result and its `of` are replaced together, and never changed.
        """
        kept: tuple[object, T] | None = self.__dict__.get(name)
        if kept is None or (kept[0] is not of and kept[0] != of):
            kept = self.__dict__[name] = (of, work_out())
        return kept[1]

    def recall(self, name: str) -> object:
        """The cached result for `name`; None if there is none."""
        kept: tuple[object, object] | None = self.__dict__.get(name)
        return None if kept is None else kept[1]

    def encode(self) -> bytes:
        return self.remember("encoded", None, lambda: msgspec.msgpack.encode(self))

    @staticmethod
    def decode(data: bytes) -> View:
        """Raises `CorruptData` for anything that is not an encoded view."""
        try:
            return _decoder.decode(data)
        except UNDECODABLE as error:
            raise CorruptData(f"not a view: {error}") from error


_decoder = msgspec.msgpack.Decoder(View)


class ViewDelta(msgspec.Struct, frozen=True):
    """The step from the view of epoch `epoch` - 1 to that of `epoch`.

    `gone` are ranks of the old view that are not filled again, `placed` the ranks that newcomers take over, and
    `joined` the newcomers that come last. `job` is None if it stays as it is. `stopped`, `error` and
    `degraded_from` are those of the new view.
    """

    epoch: int
    phase: Phase
    gone: tuple[int, ...]
    placed: tuple[tuple[int, Member], ...]
    joined: tuple[Member, ...]
    reason: str
    job: Job | None = None
    stopped: bool = False
    error: StepError | None = None
    degraded_from: int = 0

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> ViewDelta:
        """Raises `CorruptData` for anything that is not an encoded delta."""
        try:
            return _delta_decoder.decode(data)
        except UNDECODABLE as error:
            raise CorruptData(f"not a change of a view: {error}") from error


_CHANGE = "change"
"""The name under which a view keeps the delta that led to it."""

_delta_decoder = msgspec.msgpack.Decoder(ViewDelta)


def last_delta(view: View) -> ViewDelta | None:
    """The delta that led to this view, if it is known here."""
    change = view.recall(_CHANGE)
    return change if isinstance(change, ViewDelta) else None


def delta_between(old: View, new: View) -> ViewDelta | None:
    """The delta from `old` to `new`.

    None if `new` is not the next view, or survivors have not kept their order.
    """
    if new.epoch != old.epoch + 1:
        return None
    return new.remember(_CHANGE, old.epoch, lambda: _work_out(old, new))


def _work_out(old: View, new: View) -> ViewDelta | None:
    gone: list[int] = []
    placed: list[tuple[int, Member]] = []
    at = 0
    for rank, member in enumerate(old.members):
        there = new.members[at] if at < len(new.members) else None
        if there is not None and there.id == member.id:
            at += 1
        elif member.id in new.ranks:
            return None
        elif there is not None and there.id not in old.ranks:
            placed.append((rank, there))
            at += 1
        else:
            gone.append(rank)
    joined = new.members[at:]
    job = None if new.job == old.job else new.job
    return ViewDelta(
        new.epoch,
        new.phase,
        tuple(gone),
        tuple(placed),
        joined,
        new.reason,
        job,
        new.stopped,
        new.error,
        new.degraded_from,
    )


def apply_delta(old: View, change: ViewDelta) -> View:
    """The view that `change` makes of `old`. Raises `CorruptData` if they do not belong together."""
    if change.epoch != old.epoch + 1:
        raise CorruptData(f"a change to epoch {change.epoch} does not follow epoch {old.epoch}")
    return old.remember("applied", change, lambda: _make(old, change))


def _make(old: View, change: ViewDelta) -> View:
    members: list[Member | None] = list(old.members)
    try:
        if any(rank < 0 for rank in (*change.gone, *(rank for rank, _ in change.placed))):
            raise ValueError("a rank is negative")
        for rank, member in change.placed:
            members[rank] = member
        for rank in change.gone:
            members[rank] = None
        kept = tuple(member for member in members if member is not None)
        job = old.job if change.job is None else change.job
        members_now = (*kept, *change.joined)
        new = View(
            change.epoch,
            change.phase,
            members_now,
            job,
            change.reason,
            change.stopped,
            change.error,
            change.degraded_from,
        )
    except (IndexError, ValueError) as error:
        raise CorruptData(f"a change to epoch {change.epoch} makes no view: {error}") from error
    new.remember(_CHANGE, old.epoch, lambda: change)
    return new
