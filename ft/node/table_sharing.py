"""Keeps the members' copies of the rendezvous table alike.

What a member sets goes to its neighbours in a tree over the members, which pass it on. What several members may change
goes up the tree to the first member, after what the caller has set before.

Hosts form a tree by their first members, in the order of the view; the members of a host hang below its first one, in a
tree again. Each member has at most `2 * ARITY` below it, and the depth grows with the logarithm of the members. What a
member gets from one neighbour goes to all its others, so every batch crosses each edge once (`TreeRelay`). Batches for
a neighbour wait for each other: the first goes at once, and the pause to the next message doubles from one to the next,
up to a limit. So the messages of a member grow with the logarithm of the time that a meeting takes, and not with the
number of members, and what is passed on is late by no more than the time that has passed already.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from holdfast.comms.errors import Revoked
from holdfast.ft.control.rpc import Handler
from holdfast.ft.membership.view import Member, View
from holdfast.ft.node import messages
from holdfast.ft.node.rendezvous import RendezvousTable, handlers
from holdfast.ft.ports import MemberLinks, Time, Timer

CHUNK_BYTES = 256 << 10
"""The most bytes of values in one message, unless a single value has more."""


ARITY = 8

Batch = TypeVar("Batch")

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.004
"""Seconds between two messages to a neighbour."""


class TreeRelay(Generic[Batch]):
    """The part of one member. `neighbours` are the ids of those next to it; `pauses` is False in small jobs."""

    __slots__ = ("_next", "_pause", "_pauses", "_pending")

    def __init__(self, neighbours: Iterable[str], pauses: bool) -> None:
        self._pending: dict[str, list[Batch]] = {each: [] for each in neighbours}
        self._pauses, self._pause, self._next = pauses, FIRST_PAUSE, 0.0

    def add(self, batch: Batch, source: str | None) -> None:
        """Pass a batch on that was set here (`source` None), or came from a neighbour."""
        for neighbour, batches in self._pending.items():
            if neighbour != source:
                batches.append(batch)

    def add_for(self, neighbour: str, batch: Batch) -> None:
        """Pass a batch on to one neighbour: the connection to it is new."""
        if neighbour in self._pending:
            self._pending[neighbour].append(batch)

    def wake_at(self, now: float) -> float | None:
        """When `take` is to be called next; None if there is nothing to send."""
        return max(now, self._next) if any(self._pending.values()) else None

    def take(self, now: float) -> list[tuple[str, list[Batch]]]:
        """The batches to send to each neighbour now. Call it when `wake_at` says so, or to send all at the end."""
        due = [(neighbour, batches) for neighbour, batches in self._pending.items() if batches]
        for neighbour, _ in due:
            self._pending[neighbour] = []
        if due and self._pauses:
            if now > self._next + LONGEST_PAUSE:
                self._pause = FIRST_PAUSE
            self._next, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return due


class TableSharing:
    """The copy of one member. `epoch` is that of its newest view; `parent` is above it in the tree."""

    def __init__(self, identity: str, time: Time, links: MemberLinks) -> None:
        self.table = RendezvousTable(self._changed)
        self.epoch = 0
        self.parent: Member | None = None
        self._identity, self._time, self._links = identity, time, links
        self._relay: TreeRelay[tuple[str, ...]] = TreeRelay((), pauses=False)
        self._sources: dict[int, dict[str, str]] = {}
        self._timer: Timer | None = None
        self._waiting: list[asyncio.Event] = []

    def begin(self, view: View) -> None:
        """Share with the members of `view`: also what was set or received for its epoch before."""
        self.drop_before(view.epoch)
        rank = view.rank_of(self._identity)
        next_to = () if rank is None else neighbours(view, rank)
        self.parent = next_to[0] if rank else None
        pauses = len(view.members) > ARITY + 1
        self._relay = TreeRelay([member.id for member in next_to], pauses)
        self.epoch = view.epoch
        sources = self._sources.get(view.epoch, {})
        with contextlib.suppress(Revoked):
            for key in self.table.items(view.epoch):
                self._relay.add((key,), sources.get(key))
        self._flush_later()
        waiting, self._waiting = self._waiting, []
        for begun in waiting:
            begun.set()

    def handlers(
        self, call: Callable[[Member, str, bytes, float], Awaitable[bytes]], timeout: float
    ) -> dict[str, Handler]:
        """The handlers of the remote calls of `RendezvousStore`, which pass them on towards the first member.

        `call(member, method, body, timeout)` calls a neighbour; `timeout` (seconds) bounds each.
        """

        async def forward(epoch: int, method: str, body: bytes) -> bytes | None:
            async with asyncio.timeout(timeout):
                while self.epoch < epoch:  # the caller has its view before this process
                    begun = asyncio.Event()
                    self._waiting.append(begun)
                    await begun.wait()
            if self.epoch != epoch:
                raise Revoked(epoch, "a later epoch has begun")
            if self.parent is None:
                return None
            self.flush()
            return await call(self.parent, method, body, timeout)

        return handlers(self.table, forward)

    def drop_before(self, epoch: int, reason: str = "a later epoch has begun") -> None:
        """Drop what was set in all epochs before `epoch`."""
        self.table.drop_before(epoch, reason)
        self._sources = {each: sources for each, sources in self._sources.items() if each >= epoch}

    def received(self, peer: str, epoch: int, items: Mapping[str, bytes]) -> None:
        """Set what a neighbour has passed on, and pass it on to the others."""
        with contextlib.suppress(Revoked):  # the epoch is over here
            self.table.receive(epoch, items)
            self._sources.setdefault(epoch, {}).update(dict.fromkeys(items, peer))
            if epoch == self.epoch:
                self._relay.add(tuple(items), peer)
                self._flush_later()

    def linked(self, peer: str) -> None:
        """Send all again over a new connection: what was sent over the one before may be lost."""
        sources = self._sources.get(self.epoch, {})
        with contextlib.suppress(Revoked):
            keys = tuple(key for key in self.table.items(self.epoch) if sources.get(key) != peer)
            if keys:
                self._relay.add_for(peer, keys)
                self._flush_later()

    def flush(self) -> None:
        """Send what waits."""
        for neighbour, batches in self._relay.take(self._time.time()):
            self._send(neighbour, {key: None for batch in batches for key in batch})
        self._flush_later()

    def _changed(self, epoch: int, keys: tuple[str, ...]) -> None:
        """Pass on what was set here. Thread-safe."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process has left
            self._time.call_soon_threadsafe(self._pass_on, epoch, keys)

    def _pass_on(self, epoch: int, keys: tuple[str, ...]) -> None:
        for key in keys:
            self._sources.get(epoch, {}).pop(key, None)
        if epoch == self.epoch:
            self._relay.add(keys, None)
            self._flush_later()

    def _flush_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._relay.wake_at(self._time.time())
        if at is not None:
            self._timer = self._time.call_later(at - self._time.time(), self.flush)

    def _send(self, neighbour: str, keys: Mapping[str, None]) -> None:
        """Send the newest values of `keys`."""
        with contextlib.suppress(Revoked):
            for items in chunks(self.table.values(self.epoch, keys)):
                self._links.notify(neighbour, *messages.notice(messages.Share(self.epoch, items)))


def neighbour_ranks(view: View, rank: int) -> tuple[int, ...]:
    """The ranks next to `rank` in the tree. The one above it is first; rank 0 has none above."""
    hosts = view.remember("relay hosts", view.members, lambda: _Hosts(view))
    name = view.members[rank].peer.host
    here = view.hosts[name]
    place = bisect_left(here, rank)
    host = hosts.places[name]
    found: list[int] = []
    if place:
        found.append(here[(place - 1) // ARITY])
    elif host:
        found.append(hosts.first[(host - 1) // ARITY])
    found += here[place * ARITY + 1 : place * ARITY + 1 + ARITY]
    if not place:
        found += hosts.first[host * ARITY + 1 : host * ARITY + 1 + ARITY]
    return tuple(found)


class _Hosts:
    """`first`: the first rank of each host, in order; `places`: the position of each host in it."""

    def __init__(self, view: View) -> None:
        order = sorted(view.hosts, key=lambda name: view.hosts[name][0])
        self.first = [view.hosts[name][0] for name in order]
        self.places = {name: place for place, name in enumerate(order)}


def neighbours(view: View, rank: int) -> tuple[Member, ...]:
    """The members next to `rank` in the tree of `view`. The first is the one above it, but for rank 0."""
    return tuple(view.members[each] for each in neighbour_ranks(view, rank))


def chunks(items: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """The items in as many parts as messages are needed for them."""
    part: dict[str, bytes] = {}
    size = 0
    for key, value in items.items():
        if part and size + len(key) + len(value) > CHUNK_BYTES:
            yield part
            part, size = {}, 0
        part[key] = value
        size += len(key) + len(value)
    if part:
        yield part
