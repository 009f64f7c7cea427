"""Exchanges the offers of all ranks through the store, in numbered meetings.

Each rank counts the meetings of a name itself. If a rank fails in a meeting, it marks the meeting in the store as over;
the other ranks then skip to the next number. So ranks that failed at different times meet again in the same meeting.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Generic, TypeVar

import msgspec

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, OpTimeout, PeerFailed
from holdfast.comms.rendezvous.meeting_place import MeetingPlace
from holdfast.comms.rendezvous.meeting_store import (
    MAX_BYTES,
    MeetingStore,
    StoreLost,
    StoreSilent,
    decode,
)
from holdfast.comms.system.keys import Seal
from holdfast.comms.system.waiting import Wait
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, this_process

T = TypeVar("T")

_LEFT = "left"
"""Key of the number of ranks that gave up a meeting. One is enough: the meeting is over for all ranks."""

_LINGER_SECONDS, _LATE_SECONDS = 1.0, 0.25
"""How long a failed rank that serves the store keeps it up for the others: normally, and at the deadline."""


_LOOK_SECONDS = 0.25
"""How long a rank waits for the others before it looks whether they still live, and whether the meeting is over."""

_FORGED_SECONDS, _PAUSE = 2.0, 0.02
"""How long to wait for a rank to replace an offer that does not verify, and how often to read it again."""


_REMEMBERED = 256
"""Keys of `meeting_counters`."""

connected_ranks: dict[tuple[str, str, int], str] = {}
"""The ranks that this process is, by rendezvous, name and number, each with the nonce of its offer."""


_REASON_CHARACTERS = 500

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Reason = Annotated[str, msgspec.Meta(max_length=_REASON_CHARACTERS)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's process, its arguments of `connect`, and why it cannot run some backends.

    `nonce` is new for every offer. `preference` is the requested backends in order, which with `auto` are those that
    this rank has; `unavailable` maps those that this rank cannot run to the reason. `check`: agreement checks are on at
    this rank. `agreed` is what else must be equal on all ranks: by what name (hints, members), its value.
    """

    nonce: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    peer: Peer
    size: Annotated[int, msgspec.Meta(ge=1)]
    preference: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=32)]
    unavailable: Annotated[dict[Name, Reason], msgspec.Meta(max_length=32)]
    check: bool
    auto: bool = False
    agreed: Annotated[dict[Name, Text], msgspec.Meta(max_length=64)] = {}

    @property
    def asked(self) -> str:
        """The backend that this rank passed to `connect`."""
        return "auto" if self.auto else ",".join(self.preference)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def shorten(reasons: dict[str, str]) -> dict[str, str]:
    """Cut reasons to the length that fits an offer."""
    return {name: reason[:_REASON_CHARACTERS] for name, reason in reasons.items()}


def decode_offer(key: str, data: bytes) -> Offer:
    """Decode the offer in `data`, found under `key`. Raises `CorruptData`."""
    if len(data) > MAX_BYTES:
        raise CorruptData(f"{key!r} at the rendezvous has {len(data)} bytes, more than {MAX_BYTES}")
    offer = decode(key, data, Offer)
    peer = offer.peer
    if not (0 < peer.pid < 1 << 31 and 0 <= peer.started < 1 << 63 and 0 < len(peer.host) <= 500):
        raise CorruptData(f"{key!r} at the rendezvous names no process: {str(peer)[:200]}")
    return offer


class _MeetingOver(Exception):
    """Another rank gave up this meeting."""


@dataclass(frozen=True, slots=True)
class Meeting(Generic[T]):
    """A successful meeting: all offers in rank order, the decision, and the store for the transport's keys."""

    number: int
    offers: tuple[Offer, ...]
    decision: T
    store: MeetingStore


@dataclass(slots=True)
class MeetingCounter:
    """The number of a rank's next meeting. A meeting where the rank was already taken does not advance it."""

    number: int = 0


def meeting_counters() -> Callable[[Hashable], MeetingCounter]:
    """Counters by key; of many keys, only those of the newest.

    A rank whose counter is gone begins at 0 again, and finds in the store which meetings it has been to.
    """
    return functools.lru_cache(_REMEMBERED)(lambda key: MeetingCounter())


class OfferExchange:
    """Takes one rank through the meetings of a `name` at a `place`, until `deadline`.

    `count` numbers the meetings. `key` is the job's key, if the job has one. Waits call `check_abort`, which may raise.
    If the store is lost with the process that served it, `renew` resolves the place again: the server may have belonged
    to an earlier run.
    """

    def __init__(
        self,
        place: MeetingPlace,
        name: str,
        count: MeetingCounter,
        *,
        deadline: float,
        timeout: float,
        key: bytes | None = None,
        check_abort: Callable[[], None] = lambda: None,
        renew: Callable[[], MeetingPlace] | None = None,
    ) -> None:
        self.place = place
        self._name, self._count = name, count
        self._absent = set(range(place.size)) - {place.rank}
        self._newest: dict[int, Offer] = {}
        """By rank, its newest offer, of this meeting or of one that is over."""
        self._has_joined = False
        self._deadline, self._timeout, self._key = deadline, timeout, key
        self._check_abort, self._renew = check_abort, renew

    @contextlib.contextmanager
    def meeting(self, offer: Offer, decide: Callable[[Sequence[Offer]], T]) -> Iterator[Meeting[T]]:
        """Meet all ranks. If `decide(offers)` or the body fails, give up the meeting for all of them.

        `decide` must reach the same result on all ranks. Raises `Mismatch` (ranks disagree, or this rank is taken),
        `OpTimeout` (naming the missing ranks), `PeerFailed`, `CorruptData`, and what `decide` raises.
        """
        while True:
            number = self._count.number
            prefix = f"holdfast/{self.place.scope}{self._name}/{number}"
            store = self._open(prefix, None if self._key is None else Seal(self._key, prefix.encode()))
            try:
                meeting = self._meet(store, number, prefix, offer, decide)
                break
            except _MeetingOver:
                self._count.number = number + 1
            except StoreLost:
                self._count.number = number
                if self._renew is None or time.monotonic() >= self._deadline:
                    raise
                self.place = self._renew()
            except BaseException as error:
                self._give_up(store, error)
                raise
        try:
            yield meeting
        except BaseException as error:
            self._give_up(store, error)
            raise
        meeting.store.deadline = None

    def _open(self, prefix: str, seal: Seal | None) -> MeetingStore:
        return MeetingStore(
            self.place.store,
            prefix,
            where=self.place.where,
            timeout=self._timeout,
            deadline=self._deadline,
            seal=seal,
            serving_rank=0 if self.place.by_rank_0 and not self.place.served else None,
            check_abort=self._check_abort,
        )

    def _meet(
        self, store: MeetingStore, number: int, prefix: str, offer: Offer, decide: Callable[[Sequence[Offer]], T]
    ) -> Meeting[T]:
        self._has_joined = False
        self._take_rank(store, offer)
        self._has_joined = True
        self._count.number = number + 1
        offers = self._offers_of_all(store, offer)
        decision = decide(offers)
        self._check_alive()
        self._check_over(store)
        seal = None
        if self._key is not None:
            seal = Seal(self._key, prefix.encode()).bound_to(b"".join(each.encode() for each in offers))
        return Meeting(number, tuple(offers), decision, self._open(f"{prefix}/transport", seal))

    def _take_rank(self, store: MeetingStore, offer: Offer) -> None:
        """Write this rank's offer to the store. Replaces a value that was written without the job's key."""
        key = f"offer/{self.place.rank}"
        sealed_offer = store.wrap(key, offer.encode())
        expected = b""
        for _ in range(3):
            found = store.swap(key, expected, sealed_offer)
            if found == sealed_offer:
                return
            if store.check([_LEFT]):
                raise _MeetingOver
            try:
                holder = decode_offer(key, store.unwrap(key, found))
            except CorruptData:
                if self._key is None:
                    raise
                expected = found
            else:
                if holder.peer == this_process() and holder.nonce not in connected_ranks.values():
                    raise _MeetingOver  # this process was here before, through another store object
                raise Mismatch(self._taken_by(holder))
        raise CorruptData(f"other programs write to {key!r} at {self.place.where}; pass another rendezvous")

    def _taken_by(self, holder: Offer) -> str:
        rank, where, pid = self.place.rank, self.place.where, holder.peer.pid
        if is_gone(holder.peer):
            advice = "give every run, and every restart, a place of its own"
            if self.place.file is not None:
                advice = f"remove it, or name a fresh file for every run: rm {self.place.file}"
            return (
                f"rank {rank} is taken by another process (pid {pid}), which has ended: {where} is left over from an "
                f"earlier run; {advice}"
            )
        return (
            f"rank {rank} is taken by another process (pid {pid}); every process needs a rank of its own (check RANK), "
            "or a name of its own"
        )

    def _offers_of_all(self, store: MeetingStore, mine: Offer) -> list[Offer]:
        """Wait for the offers of all ranks; compares each that has come with this rank's own."""
        self._newest[self.place.rank] = mine
        offers = {self.place.rank: mine}
        keys = {f"offer/{rank}": rank for rank in range(self.place.size) if rank != self.place.rank}
        patience = 0.0
        while keys:
            try:
                store.wait(list(keys), timedelta(seconds=_LOOK_SECONDS))
                come = list(keys)
            except StoreSilent:
                raise
            except TimeoutError:
                come = store.present(list(keys))
            for key, data in zip(come, store.read_all(come), strict=True):
                try:
                    offers[keys[key]] = self._newest[keys[key]] = decode_offer(key, store.unwrap(key, data))
                except CorruptData:  # another program may have written it, and the rank replaces it
                    patience = patience or min(self._deadline, time.monotonic() + _FORGED_SECONDS)
                    if self._key is None or time.monotonic() >= patience:
                        raise
                    time.sleep(_PAUSE)
                    continue
                self._absent.discard(rank := keys.pop(key))
                self._compare(rank, offers[rank], mine)
            if keys and not come:
                self._check_over(store)
            if keys:
                self._check_alive()
                if time.monotonic() >= self._deadline:
                    raise OpTimeout("connect", 0, self._timeout, sorted(self._absent))
        return [offers[rank] for rank in range(self.place.size)]

    def _check_over(self, store: MeetingStore) -> None:
        """If a rank gave up this meeting, raise `PeerFailed` if a rank has died, else `_MeetingOver`."""
        if store.check([_LEFT]):
            self._check_alive()
            raise _MeetingOver

    def _check_alive(self) -> None:
        """Raise `PeerFailed` if a rank of this meeting, or of an earlier one but not of this, has died.

        A process that ends closes its connections before the kernel calls it gone: another rank may have given up a
        meeting because of it while it still seemed alive here.
        """
        gone = [rank for rank, offer in sorted(self._newest.items()) if is_gone(offer.peer)]
        if gone:
            said = f"its process (pid {self._newest[gone[0]].peer.pid}) has ended"
            if self.place.file is not None:
                said += f", or {self.place.where} is left over from an earlier run: remove it then"
            raise PeerFailed(gone, said)

    def _compare(self, rank: int, theirs: Offer, mine: Offer) -> None:
        if theirs.size != mine.size:
            raise Mismatch(
                f"rank {rank} connects with size {theirs.size}, rank {self.place.rank} with {mine.size}; "
                "all ranks must pass the same size"
            )
        for what in sorted(theirs.agreed.keys() | mine.agreed.keys()):
            here, there = (offer.agreed.get(what, "not at all") for offer in (mine, theirs))
            if here != there:
                raise Mismatch(
                    f"rank {rank} passes {what} {there}, rank {self.place.rank} {here}; all ranks must pass the same"
                )
        if theirs.auto != mine.auto or (theirs.preference != mine.preference and not mine.auto):
            raise Mismatch(
                f"rank {rank} asks for backend {theirs.asked}, rank {self.place.rank} for {mine.asked}; all ranks must "
                "ask for the same"
            )

    def _give_up(self, store: MeetingStore, error: BaseException) -> None:
        """Mark this meeting as over. A rank that serves the store keeps it up until the others have read that."""
        if store.lost or isinstance(error, StoreLost) or not self._has_joined:
            return
        try:
            self._check_abort()
        except HoldfastError:  # the communicator that is being split has ended: its ranks know
            return
        now = time.monotonic()
        left = max(0.0, self._deadline - now)
        store.deadline = now + max(min(left, _LINGER_SECONDS), _LATE_SECONDS)
        store.stop_checking()
        with contextlib.suppress(HoldfastError, RuntimeError):
            store.add(_LEFT, 1)
            if isinstance(error, HoldfastError) and self.place.served:
                wait = Wait(yields=0, sleep_seconds=_PAUSE)
                wait.reaches(lambda: store.add(_LEFT, 0) >= self.place.size, store.deadline)
