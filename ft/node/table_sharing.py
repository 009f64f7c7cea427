"""Keeps the members' copies of the rendezvous table alike.

What a member sets goes to its neighbours in a tree over the members (`relay_tree`), which pass it on. What several
members may change goes up the tree to the first member, after what the caller has set before. A deletion goes up, too,
and then down the tree, and has happened once every copy has answered: what is set under that key after it stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from holdfast.comms.errors import Revoked
from holdfast.ft.detectors.detector import Timer
from holdfast.ft.membership import relay_tree
from holdfast.ft.membership.view import Member, View
from holdfast.ft.node import messages
from holdfast.ft.node.ports import MemberLinks, NodeTime
from holdfast.ft.rendezvous.relay import TreeRelay
from holdfast.ft.rendezvous.table import RendezvousTable

CHUNK_BYTES = 256 << 10
"""The most bytes of values in one message, unless a single value has more."""


class TableSharing:
    """The copy of one member. `epoch` is that of its newest view; `parent` and `below` are next to it in the tree."""

    def __init__(self, identity: str, time: NodeTime, links: MemberLinks) -> None:
        self.table = RendezvousTable(self._changed)
        self.epoch = 0
        self.parent: Member | None = None
        self.below: tuple[Member, ...] = ()
        self._identity, self._time, self._links = identity, time, links
        self._relay: TreeRelay[tuple[str, ...]] = TreeRelay((), pauses=False)
        self._sources: dict[int, dict[str, str]] = {}
        self._timer: Timer | None = None
        self._waiting: list[Callable[[], None]] = []

    def begin(self, view: View) -> None:
        """Share with the members of `view`: also what was set or received for its epoch before."""
        self.drop_before(view.epoch)
        rank = view.rank_of(self._identity)
        next_to = () if rank is None else neighbours(view, rank)
        self.parent = next_to[0] if rank else None
        self.below = next_to[1:] if rank else next_to
        pauses = len(view.members) > relay_tree.ARITY + 1
        self._relay = TreeRelay([member.id for member in next_to], pauses)
        self.epoch = view.epoch
        sources = self._sources.get(view.epoch, {})
        with contextlib.suppress(Revoked):
            for key in self.table.items(view.epoch):
                self._relay.add((key,), sources.get(key))
        self._flush_later()
        waiting, self._waiting = self._waiting, []
        for begun in waiting:
            begun()

    def when_begun(self, begun: Callable[[], None]) -> None:
        """Call `begun` when the next view begins."""
        self._waiting.append(begun)

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
                self._links.notify(neighbour, *messages.share(self.epoch, items))


def neighbours(view: View, rank: int) -> tuple[Member, ...]:
    """The members next to `rank` in the tree of `view`. The first is the one above it, but for rank 0."""
    return tuple(view.members[each] for each in relay_tree.neighbours(view, rank))


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
