"""Keeps one connection open to each other process of a job, so that urgent messages go out at once.

A newcomer dials the members that are there already. A member that is not dialled within `LATE_SECONDS` dials itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from holdfast.comms.errors import ResourceExhausted
from holdfast.ft.control.errors import ConnectionLost, ConnectionRefused, ControlError
from holdfast.ft.control.rpc import AsyncRpcServer, Handler, RpcConnection, dial_rpc
from holdfast.ft.membership.view import Member

LATE_SECONDS = 0.5
"""How long to wait for the other side's dial before dialling it."""
REDIAL_SECONDS = 0.005
"""Delay from the end of a connection to the first new dial."""
RETRY_SECONDS = 0.1
DIAL_SECONDS = 5.0
CLOSE_SECONDS = 1.0
"""How long the others may take to close their ends."""

_log = logging.getLogger("holdfast.ft")


class MemberConnections:
    """The connections of one process. Belongs to one event loop.

    `handlers` serve the calls of others; `on_link(member_id)` is called for each new connection,
    `on_refused(member_id)` whenever the member's host answers that no process listens at its address any more.
    """

    def __init__(
        self,
        identity: str,
        *,
        key: bytes,
        job: str,
        handlers: Mapping[str, Handler],
        on_link: Callable[[str], None],
        on_refused: Callable[[str], None] = lambda member_id: None,
    ) -> None:
        self._identity, self._key, self._job = identity, key, job
        self._handlers, self._on_link, self._on_refused = handlers, on_link, on_refused
        self._server = AsyncRpcServer(key=key, job=job, identity=identity, handlers=handlers, on_connect=self._linked)
        self._links: dict[str, RpcConnection] = {}
        self._wanted: dict[str, Member] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, list[asyncio.Future[RpcConnection]]] = {}
        self._dialled: list[RpcConnection] = []
        self._undelivered: dict[str, list[tuple[str, bytes]]] = {}
        self._delivering: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, host: str) -> str:
        """Listen on an interface; returns the address for others."""
        await self._server.start(host, 0)
        return self._server.address

    def follow(self, at_once: Iterable[Member], later: Iterable[Member]) -> None:
        """Keep connections to exactly these members: dial `at_once` now, the others if they do not dial first."""
        now = {member.id: member for member in at_once}
        self._wanted = {**{member.id: member for member in later}, **now}
        for member_id in self._dials.keys() - self._wanted.keys():
            self._dials.pop(member_id).cancel()
        for member_id in self._links.keys() - self._wanted.keys():
            if self._links[member_id] in self._dialled:
                self._links.pop(member_id).close()
        for member in self._wanted.values():
            if member.id not in self._links and member.id not in self._dials:
                self._dial(member, 0.0 if member.id in now else LATE_SECONDS)

    def notify(self, member_id: str, method: str, body: bytes) -> bool:
        """Send without waiting; False if there is no connection."""
        link = self._links.get(member_id)
        if link is None:
            return False
        try:
            link.notify(method, body)
        except ControlError:
            return False
        return True

    def deliver(self, member: Member, method: str, body: bytes) -> None:
        """Send without waiting, to any member. An undeliverable message is lost.

        A connection to a member that is not followed is dialled for it, and kept until `follow` is called again.
        """
        if self.notify(member.id, method, body) or member.id in self._wanted or self._closed:
            return
        waiting = self._undelivered.setdefault(member.id, [])
        waiting.append((method, body))
        if len(waiting) == 1:
            task = asyncio.get_running_loop().create_task(self._deliver_pending(member))
            self._delivering.add(task)
            task.add_done_callback(self._delivering.discard)

    async def _deliver_pending(self, member: Member) -> None:
        link: RpcConnection | None = None
        try:
            link = await self._dialled_link(member)
        except (ControlError, ResourceExhausted) as error:
            _log.debug("%s cannot reach %s at %s: %s", self._identity, member.id, member.address, error)
        finally:
            waiting = self._undelivered.pop(member.id, [])
        if link is None:
            return
        self._dialled.append(link)
        self._linked(link)
        for method, body in waiting:
            self.notify(member.id, method, body)

    def notify_all(self, method: str, body: bytes, but: Collection[str] = ()) -> None:
        """Send to every connected member, but those of some ids."""
        for member_id in list(self._links):
            if member_id not in but:
                self.notify(member_id, method, body)

    async def call(self, member: Member, method: str, body: bytes, timeout: float) -> bytes:
        """Call a followed member; waits for the connection to it if there is none yet.

        Raises what `RpcConnection.call` raises, and `ConnectionLost` if there is no connection in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        link = self._links.get(member.id)
        if link is None:
            future: asyncio.Future[RpcConnection] = loop.create_future()
            self._waiting.setdefault(member.id, []).append(future)
            try:
                async with asyncio.timeout(timeout):
                    link = await future
            except TimeoutError as error:
                raise ConnectionLost(member.id, f"no connection came to stand within {timeout:.3g} s") from error
        return await link.call(method, body, deadline - loop.time())

    async def close(self) -> None:
        """Send what is pending and end every connection. Idempotent."""
        self._closed = True
        for task in (*self._dials.values(), *self._delivering):
            task.cancel()
        dialled = list(self._dialled)  # a link that ends leaves the list at once
        for link in [*self._links.values(), *dialled]:
            link.close()
        ends = {asyncio.ensure_future(link.wait_closed()): link for link in dialled}
        if ends:
            _, late = await asyncio.wait(ends, timeout=CLOSE_SECONDS)  # of all at once: some hosts may be gone
            for end in late:
                end.cancel()
                ends[end].abort()
        await self._server.close()

    def _linked(self, link: RpcConnection) -> None:
        if self._closed:
            link.close()
            return
        self._links[link.peer] = link
        link.on_lost(self._lost)
        for future in self._waiting.pop(link.peer, []):
            if not future.done():
                future.set_result(link)
        self._on_link(link.peer)

    def _lost(self, link: RpcConnection, reason: ControlError) -> None:
        if link in self._dialled:
            self._dialled.remove(link)
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        member = self._wanted.get(link.peer)
        if member is not None and not self._closed and member.id not in self._dials:
            self._dial(member, REDIAL_SECONDS)

    def _dial(self, member: Member, delay: float) -> None:
        task = asyncio.get_running_loop().create_task(self._dial_until_linked(member, delay))
        self._dials[member.id] = task
        task.add_done_callback(lambda done: self._dials.pop(member.id) if self._dials.get(member.id) is done else None)

    async def _dial_until_linked(self, member: Member, delay: float) -> None:
        while True:
            await asyncio.sleep(delay)
            if member.id in self._links:
                return
            try:
                link = await self._dialled_link(member)
            except ControlError as error:
                _log.debug("%s cannot reach %s at %s: %s", self._identity, member.id, member.address, error)
                if isinstance(error, ConnectionRefused):
                    self._on_refused(member.id)
                delay = RETRY_SECONDS
                continue
            except ResourceExhausted as error:
                _log.warning("%s cannot connect to %s: %s", self._identity, member.id, error)
                for future in self._waiting.pop(member.id, []):
                    if not future.done():
                        future.set_exception(error.again())
                delay = RETRY_SECONDS
                continue
            if link is None:
                self._on_refused(member.id)
                delay = RETRY_SECONDS
                continue
            self._dialled.append(link)
            self._linked(link)
            return

    async def _dialled_link(self, member: Member) -> RpcConnection | None:
        """A connection to `member`; None if another process has its port now. Raises what `dial_rpc` raises."""
        link = await dial_rpc(
            member.address,
            key=self._key,
            job=self._job,
            identity=self._identity,
            handlers=self._handlers,
            timeout=DIAL_SECONDS,
        )
        if link.peer == member.id:
            return link
        link.close()
        return None
