"""The calls of members that change or ask the first member's rendezvous table: up the tree, and down it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from holdfast.comms.errors import Revoked
from holdfast.ft.control.rpc import Handler
from holdfast.ft.membership.view import Member
from holdfast.ft.node.table_sharing import TableSharing
from holdfast.ft.rendezvous import handlers
from holdfast.ft.rendezvous.messages import FORGET, KeysRequest, encode


class CallLinks(Protocol):
    """The connections to other members (`MemberConnections`)."""

    def call(self, member: Member, method: str, body: bytes, timeout: float) -> Awaitable[bytes]: ...


class TableCalls:
    """Serves the calls to the copy `sharing` of one member. `timeout` (seconds) bounds a call to a neighbour."""

    def __init__(self, sharing: TableSharing, links: CallLinks, timeout: float) -> None:
        self._sharing, self._links, self._timeout = sharing, links, timeout

    def handlers(self) -> dict[str, Handler]:
        """The handlers of the methods that `RendezvousClient` calls."""
        return handlers.handlers(self._sharing.table, self.forward, self.delete)

    async def forward(self, epoch: int, method: str, body: bytes) -> bytes | None:
        """Pass a call on towards the first member of `epoch`; None if this process is it.

        Waits until this process has the view of the epoch. Raises `Revoked` if that is over, TimeoutError, and what
        `MemberConnections.call` raises.
        """
        await self._begin_of(epoch)
        if self._sharing.parent is None:
            return None
        self._sharing.flush()
        return await self._links.call(self._sharing.parent, method, body, self._timeout)

    async def delete(self, epoch: int, key: str) -> bool:
        """Remove a key from this copy and those below it, at the first member from all; whether it was there.

        Raises what `forward` raises.
        """
        await self._begin_of(epoch)
        found = self._sharing.table.delete(epoch, key)
        request = encode(KeysRequest(epoch, [key]))
        calls = [self._links.call(member, FORGET, request, self._timeout) for member in self._sharing.below]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return found

    async def _begin_of(self, epoch: int) -> None:
        """Wait until this process has the view of the epoch. Raises `Revoked` if that is over."""
        async with asyncio.timeout(self._timeout):
            while self._sharing.epoch < epoch:
                begun = asyncio.Event()
                self._sharing.when_begun(begun.set)
                await begun.wait()
        if self._sharing.epoch != epoch:
            raise Revoked(epoch, "a later epoch has begun")
