"""Ranks come together: each gives its offer and takes everybody's, in a numbered meeting that all agree on.

A rank counts the meetings of a name by itself. A meeting in which some rank failed is over for all of them, which is
written in the store: the others pass over it, so that ranks which failed at different times meet again at the next.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, OpTimeout, PeerFailed
from holdfast.comms.rendezvous.fetching import LOOK_SECONDS
from holdfast.comms.rendezvous.meeting_place import MeetingPlace
from holdfast.comms.rendezvous.meeting_store import MeetingStore, StoreLost, StoreSilent
from holdfast.comms.rendezvous.offers import Offer, decode_offer
from holdfast.comms.rendezvous.seal import Seal
from holdfast.comms.transport.liveness import is_gone, this_process

T = TypeVar("T")

_LEFT = "left"
"""Counts the ranks that have given up a meeting; it is over for all once there is one."""

_LINGER_SECONDS, _LATE_SECONDS = 1.0, 0.25
"""How long a rank that serves the store lets the others read why the meeting failed: in time, and at the deadline."""


_FORGED_SECONDS, _PAUSE = 2.0, 0.02
"""How long an offer that does not verify may stand before its rank replaces it, and how often to look."""


connected: set[str] = set()
"""The nonces of the offers by which this process is connected, or connects, now."""


class _MeetingOver(Exception):
    """Another rank has given up this meeting."""


@dataclass(frozen=True, slots=True)
class Meeting(Generic[T]):
    """The offers of all ranks in rank order, what was decided by them, and the store for what the ranks say next."""

    number: int
    offers: tuple[Offer, ...]
    decision: T
    store: MeetingStore


def run_scope() -> str:
    """What sets this run apart at a place that outlives it: torchrun's run, and how often that was restarted."""
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"{run}.{restart}/" if run or restart else ""


@dataclass(slots=True)
class MeetingCount:
    """The number of the next meeting that a rank goes to. A meeting at which its place is taken does not count."""

    number: int = 0


class Gathering:
    """Takes one rank through the meetings of a `name` at a `place`, until `deadline`.

    `count` numbers the meetings. `key` is the job's key, if the job has one. `check_abort` is called during waits, and
    may raise. `renew` finds the place again after the store was lost with the process that served it: that process may
    have been one of an earlier run.
    """

    def __init__(
        self,
        place: MeetingPlace,
        name: str,
        count: MeetingCount,
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
        self._has_joined = False
        self._deadline, self._timeout, self._key, self._check_abort, self._renew = (
            deadline,
            timeout,
            key,
            check_abort,
            renew,
        )

    @contextlib.contextmanager
    def meeting(self, offer: Offer, decide: Callable[[Sequence[Offer]], T]) -> Iterator[Meeting[T]]:
        """Meet, and give up the meeting for all ranks if `decide(offers)` or the body fails.

        Raises `Mismatch` (ranks disagree, or this rank is taken), `OpTimeout` (naming the ranks that did not come),
        `PeerFailed`, `CorruptData`, and what `decide` raises: it must come to the same on all ranks.
        """
        while True:
            number = self._count.number
            prefix = f"holdfast/{run_scope()}{self._name}/{number}"
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
        place = self.place
        self._has_joined = False
        self._take_rank(store, offer)
        self._has_joined = True
        self._count.number = number + 1
        offers: list[Offer] = []
        for rank in range(place.size):
            theirs = offer if rank == place.rank else self._offer_of(rank, store, offers)
            self._compare(rank, theirs, offer)
            offers.append(theirs)
        decision = decide(offers)
        self._check_alive(offers)
        self._check_over(store, offers)
        seal = None
        if self._key is not None:
            seal = Seal(self._key, prefix.encode()).within(b"".join(each.encode() for each in offers))
        return Meeting(number, tuple(offers), decision, self._open(f"{prefix}/transport", seal))

    def _take_rank(self, store: MeetingStore, offer: Offer) -> None:
        """Put the offer where this rank's belongs. What a stranger without the key has put there is replaced."""
        key = f"offer/{self.place.rank}"
        mine = store.sealed(key, offer.encode())
        expected = b""
        for _ in range(3):
            found = store.swap(key, expected, mine)
            if found == mine:
                return
            if store.check([_LEFT]):
                raise _MeetingOver
            try:
                holder = decode_offer(key, store.opened(key, found))
            except CorruptData:
                if self._key is None:
                    raise
                expected = found
            else:
                if holder.peer == this_process() and holder.nonce not in connected:
                    raise _MeetingOver  # this process came here before, through another store object
                raise Mismatch(self._taken_by(holder))
        raise CorruptData(f"strangers keep writing to {key!r} at {self.place.where}; meet where they cannot")

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

    def _offer_of(self, rank: int, store: MeetingStore, known: list[Offer]) -> Offer:
        key, patience = f"offer/{rank}", None
        while True:
            try:
                store.wait([key], timedelta(seconds=LOOK_SECONDS))
                return decode_offer(key, store.read(key))
            except CorruptData:
                patience = patience or min(self._deadline, time.monotonic() + _FORGED_SECONDS)
                if self._key is None or time.monotonic() >= patience:
                    raise
                time.sleep(_PAUSE)
                continue
            except StoreSilent:
                raise
            except TimeoutError:
                pass
            if not store.check([key]):
                self._note_absent(store)
                self._check_over(store, known)
            self._check_alive(known)
            if time.monotonic() >= self._deadline:
                self._note_absent(store)
                raise OpTimeout("connect", 0, self._timeout, sorted(self._absent))

    def _note_absent(self, store: MeetingStore) -> None:
        """Keep in mind which ranks have come to no meeting that this one was at."""
        self._absent = {rank for rank in self._absent if not store.check([f"offer/{rank}"])}

    def _check_over(self, store: MeetingStore, known: Sequence[Offer]) -> None:
        """Raise `_MeetingOver` if a rank has given up, or `PeerFailed` if it did because one of the `known` died."""
        if store.check([_LEFT]):
            self._check_alive(known)
            raise _MeetingOver

    def _check_alive(self, offers: Sequence[Offer]) -> None:
        gone = [rank for rank, offer in enumerate(offers) if is_gone(offer.peer)]
        if gone:
            said = f"its process (pid {offers[gone[0]].peer.pid}) has ended"
            if self.place.file is not None:
                said += f", or {self.place.where} is left over from an earlier run: remove it then"
            raise PeerFailed(gone, said)

    def _compare(self, rank: int, theirs: Offer, mine: Offer) -> None:
        if theirs.size != mine.size:
            raise Mismatch(
                f"rank {rank} connects with size {theirs.size}, rank {self.place.rank} with {mine.size}; "
                "all ranks must pass the same size"
            )
        if theirs.preference != mine.preference:
            raise Mismatch(
                f"rank {rank} asks for backend {','.join(theirs.preference)}, rank {self.place.rank} for "
                f"{','.join(mine.preference)}; all ranks must ask for the same"
            )

    def _give_up(self, store: MeetingStore, error: BaseException) -> None:
        """Say that this meeting is over. The rank that serves the store lets the others read that."""
        if store.lost or isinstance(error, StoreLost) or not self._has_joined:
            return
        try:
            self._check_abort()
        except HoldfastError:  # what the ranks were to be part of is over itself
            return
        now = time.monotonic()
        left = max(0.0, self._deadline - now)
        store.deadline = now + max(min(left, _LINGER_SECONDS), _LATE_SECONDS)
        store.stop_checking()
        with contextlib.suppress(HoldfastError, RuntimeError):
            gone = store.add(_LEFT, 1)
            while isinstance(error, HoldfastError) and self.place.served and gone < self.place.size:
                if time.monotonic() >= store.deadline:
                    return
                time.sleep(_PAUSE)
                gone = store.add(_LEFT, 0)
