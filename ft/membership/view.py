"""The view: the members of a job in rank order, at one epoch. Processes agree on it through the register."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import fields
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport.base import Peer
from holdfast.ft.timeouts import Timeouts


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
    `degraded_from`, all of whose living members they are. 0: they build one.

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
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"not a view: {error}") from error


_decoder = msgspec.msgpack.Decoder(View)
