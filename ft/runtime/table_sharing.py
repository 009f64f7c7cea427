"""Keeps the members' copies of the rendezvous table alike.

What a member sets goes to its neighbours in a tree over the members (`relay_tree`), which pass it on. What several
members may change goes up the tree to the first member, after what the caller has set before. A deletion goes up, too,
and then down the tree, and has happened once every copy has answered: what is set under that key after it stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from holdfast.comms.errors import Revoked
from holdfast.ft.membership import relay_tree
from holdfast.ft.membership.view import Member, View
from holdfast.ft.rendezvous.messages import FORGET, KeysRequest, encode
from holdfast.ft.rendezvous.relay import TreeRelay
from holdfast.ft.rendezvous.table import RendezvousTable
from holdfast.ft.runtime import messages

CHUNK_BYTES = 256 << 10
"""The most bytes of values in one message, unless a single value has more."""


class SharingLinks(Protocol):
    """The connections to other members (`MemberConnections`)."""

    def notify(self, member_id: str, method: str, body: bytes) -> bool: ...

    async def call(self, member: Member, method: str, body: bytes, timeout: float) -> bytes: ...


class TableSharing:
    """The copy of one member, in its event loop. `timeout` (seconds) bounds a call up the tree."""

    def __init__(self, identity: str, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.table = RendezvousTable(self._changed)
        self._identity, self._loop, self._timeout = identity, loop, timeout
        self._links: SharingLinks | None = None
        self._epoch = 0
        self._parent: Member | None = None
        self._below: tuple[Member, ...] = ()
        self._relay: TreeRelay[tuple[str, ...]] = TreeRelay((), pauses=False)
        self._sources: dict[int, dict[str, str]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._begun = asyncio.Event()

    def use(self, links: SharingLinks) -> None:
        """Send over these connections from now on."""
        self._links = links

    def begin(self, view: View) -> None:
        """Share with the members of `view`: also what was set or received for its epoch before."""
        self.drop_before(view.epoch)
        rank = view.rank_of(self._identity)
        next_to = () if rank is None else neighbours(view, rank)
        self._parent = next_to[0] if rank else None
        self._below = next_to[1:] if rank else next_to
        pauses = len(view.members) > relay_tree.ARITY + 1
        self._relay = TreeRelay([member.id for member in next_to], pauses)
        self._epoch = view.epoch
        sources = self._sources.get(view.epoch, {})
        with contextlib.suppress(Revoked):
            for key in self.table.items(view.epoch):
                self._relay.add((key,), sources.get(key))
        self._flush_later()
        self._begun.set()
        self._begun = asyncio.Event()

    def drop_before(self, epoch: int, reason: str = "a later epoch has begun") -> None:
        """Drop what was set in all epochs before `epoch`."""
        self.table.drop_before(epoch, reason)
        self._sources = {each: sources for each, sources in self._sources.items() if each >= epoch}

    def received(self, peer: str, epoch: int, items: Mapping[str, bytes]) -> None:
        """Set what a neighbour has passed on, and pass it on to the others."""
        with contextlib.suppress(Revoked):  # the epoch is over here
            self.table.receive(epoch, items)
            self._sources.setdefault(epoch, {}).update(dict.fromkeys(items, peer))
            if epoch == self._epoch:
                self._relay.add(tuple(items), peer)
                self._flush_later()

    def linked(self, peer: str) -> None:
        """Send all again over a new connection: what was sent over the one before may be lost."""
        sources = self._sources.get(self._epoch, {})
        with contextlib.suppress(Revoked):
            keys = tuple(key for key in self.table.items(self._epoch) if sources.get(key) != peer)
            if keys:
                self._relay.add_for(peer, keys)
                self._flush_later()

    def flush(self) -> None:
        """Send what waits."""
        for neighbour, batches in self._relay.take(self._loop.time()):
            self._send(neighbour, {key: None for batch in batches for key in batch})
        self._flush_later()

    async def forward(self, epoch: int, method: str, body: bytes) -> bytes | None:
        """Pass a call on towards the first member of `epoch`; None if this process is it.

        Waits until this process has the view of the epoch. Raises `Revoked` if that is over, TimeoutError, and what
        `SharingLinks.call` raises.
        """
        await self._begin_of(epoch)
        if self._parent is None:
            return None
        assert self._links is not None
        self.flush()
        return await self._links.call(self._parent, method, body, self._timeout)

    async def delete(self, epoch: int, key: str) -> bool:
        """Remove a key from this copy and those below it, at the first member from all; whether it was there.

        Raises what `forward` raises.
        """
        await self._begin_of(epoch)
        found = self.table.delete(epoch, key)
        assert self._links is not None
        request = encode(KeysRequest(epoch, [key]))
        calls = [self._links.call(member, FORGET, request, self._timeout) for member in self._below]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return found

    async def _begin_of(self, epoch: int) -> None:
        """Wait until this process has the view of the epoch. Raises `Revoked` if that is over."""
        async with asyncio.timeout(self._timeout):
            while self._epoch < epoch:
                await self._begun.wait()
        if self._epoch != epoch:
            raise Revoked(epoch, "a later epoch has begun")

    def _changed(self, epoch: int, keys: tuple[str, ...]) -> None:
        """Pass on what was set here. Thread-safe."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process has left
            self._loop.call_soon_threadsafe(self._pass_on, epoch, keys)

    def _pass_on(self, epoch: int, keys: tuple[str, ...]) -> None:
        for key in keys:
            self._sources.get(epoch, {}).pop(key, None)
        if epoch == self._epoch:
            self._relay.add(keys, None)
            self._flush_later()

    def _flush_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._relay.wake_at(self._loop.time())
        if at is not None:
            self._timer = self._loop.call_at(at, self.flush)

    def _send(self, neighbour: str, keys: Mapping[str, None]) -> None:
        """Send the newest values of `keys`."""
        assert self._links is not None
        with contextlib.suppress(Revoked):
            for items in chunks(self.table.values(self._epoch, keys)):
                self._links.notify(neighbour, *messages.share(self._epoch, items))


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
