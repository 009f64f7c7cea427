"""Connect the ranks of a communicator over ucx: each sends hello to every other, and waits for theirs.

Ranks that were connected in the epoch before use the existing links and exchange no addresses. A link is good if both
ranks have it from the same epoch. If a hello does not come, or names another epoch, both sides make a new link, with
the other's address from the store. Over a new link the lower rank then confirms the hello, and waits until the other
has received that: this connects both directions. UCX would delay it until the first large message, which the receiver
would then have to progress: nothing from a rank that aborts at that moment would arrive, not even its farewell.
"""

from __future__ import annotations

import time

import msgspec

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.endpoints import Connections, name_of
from holdfast.backends.ucx.farewells import WORDS, HelloReceived, WorkerHello
from holdfast.backends.ucx.libucp import UcxError
from holdfast.backends.ucx.transport import UcxTransport, announced_link
from holdfast.backends.ucx.worker import Transports, explain
from holdfast.comms.algorithms.message_passing import cost
from holdfast.comms.errors import CorruptData, HoldfastError, OpTimeout, PeerFailed, Unsupported, again
from holdfast.comms.rendezvous import fetch
from holdfast.comms.transport.base import Context

_PATIENCE_SECONDS = 0.003
"""How long to wait for the hello of a connected peer before looking up its address."""
_LOOK_SECONDS = 0.001
_NEW = -1
"""Given instead of an epoch: the link was made in this handshake."""


def connect(context: Context) -> UcxTransport:
    """Connect to all peers, over links of the epoch before or new ones; wait until all ranks have."""
    if context.device.type != "cpu":
        raise Unsupported(f"ucx on {context.device}", "use nccl for CUDA tensors, or a CPU device")
    one_host = len({peer.host for peer in context.peers}) == 1
    over = Transports.choose(one_host, loopback=one_host)
    previous = context.previous if isinstance(context.previous, UcxTransport) else None
    connections = _kept(context, previous, over) or Connections(over)
    try:
        transport = UcxTransport(context, connections)
    except BaseException:
        connections.close()
        raise
    try:
        _Handshake(context, transport, _NEW if previous is None else previous.epoch).run()
    except BaseException:
        if previous is not None and (kept := transport.hand_over(context.peers)) is not None:
            previous.take_back(kept)
        transport.close()
        raise
    return transport


def _kept(context: Context, previous: UcxTransport | None, over: Transports) -> Connections | None:
    """The connections of the epoch before, if their transports fit and every rank is a separate process."""
    if previous is None or len(set(context.peers)) < context.size:
        return None
    kept = previous.hand_over(context.peers)
    if kept is not None and kept.worker.over != over:
        kept.close()
        return None
    return kept


class _Handshake:
    """One rank's part in the handshake."""

    def __init__(self, context: Context, transport: UcxTransport, since: int) -> None:
        assert transport.connections is not None
        self._context, self._transport = context, transport
        self._connections, self._notices = transport.connections, transport.notices
        self._worker = self._connections.worker
        self._missing = [(context.rank + step) % context.size for step in range(1, context.size)]
        self._met_requests: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self._published = False
        self._unreached: HoldfastError | None = None
        self._began = time.monotonic()
        self._hello = self._notices.hellos[context.rank] = self._own_hello()
        for rank in self._missing:
            if (link := self._connections.links.get(context.peers[rank])) is not None:
                transport.links[rank] = link
                self._send_hello(rank, since)

    def _own_hello(self) -> WorkerHello:
        link, broken = announced_link(self._context, self._worker.over.local), ""
        if self._context.rank == 0:
            try:
                link = cost.here(link)
            except CorruptData as error:
                broken = str(error)[-WORDS:]
        return WorkerHello(_NEW, self._connections.name, self._context.connect_payload, link, broken)

    def _send_hello(self, rank: int, since: int = _NEW) -> None:
        self._since[rank] = since
        hello = msgspec.structs.replace(self._hello, since=since)
        self._notices.send_hello(self._transport.links[rank].endpoint, hello)

    def run(self) -> None:
        """Wait until this rank has every hello, and every peer has its own. Raises as `Transport` ops do."""
        look_at = self._began + _PATIENCE_SECONDS
        while self._pending():
            now = time.monotonic()
            self._check_live(now)
            looks = now >= look_at or any(rank not in self._transport.links for rank in self._missing)
            if not (looks and self._exchange_addresses()):
                self._transport.sleep(_LOOK_SECONDS)
        hellos = [self._notices.hellos[rank] for rank in range(self._context.size)]
        if hellos[0].broken:
            raise CorruptData(f"on rank 0 {hellos[0].broken}")
        self._transport.begin(hellos[0].link, [hello.connect_payload for hello in hellos])

    def _pending(self) -> list[int]:
        """The ranks with which the handshake is not complete; handles notices, and sends hellos where possible."""
        self._worker.drain()
        self._connections.sweep()
        self._notices.poll()
        links, hellos = self._transport.links, self._notices.hellos
        for rank in [rank for rank in self._missing if rank in links]:
            if links[rank].key in self._connections.broken:
                self._drop(rank)
            elif (hello := hellos.get(rank)) is None:
                continue
            elif hello.worker == links[rank].worker and hello.since == self._since[rank]:
                if self._since[rank] != _NEW or self._met(rank):
                    self._missing.remove(rank)
            elif self._since[rank] != _NEW:
                self._drop(rank)
        return self._missing

    def _met(self, rank: int) -> bool:
        """Whether a new link works both ways, after the hello of `rank` came; the lower rank confirms that."""
        if rank < self._context.rank:
            met = self._notices.mets.get(rank)
            return met is not None and met.worker == self._transport.links[rank].worker
        if rank not in self._met_requests:
            self._met_requests[rank] = self._notices.send_met(
                self._transport.links[rank].endpoint, HelloReceived(self._connections.name)
            )
        status = self._worker.status(self._met_requests[rank])
        if status == libucp.IN_PROGRESS:
            return False
        del self._met_requests[rank]
        if status != libucp.OK:
            raise PeerFailed((rank,), f"UCX cannot connect to it: {self._worker.lib.text(status)}")
        return True

    def _drop(self, rank: int) -> None:
        self._connections.drop(self._transport.links.pop(rank))
        self._met_requests.pop(rank, None)

    def _check_live(self, now: float) -> None:
        """Raise if the handshake can no longer succeed."""
        if (error := self._context.over()) is not None:
            raise again(error)
        self._transport.check_live(self._transport.liveness.dead(), self._missing)
        if now >= self._context.deadline:
            raise OpTimeout("connect", 0, now - self._began, self._missing) from self._unreached

    def _exchange_addresses(self) -> bool:
        """Publish this rank's address, and look up that of a missing rank; whether it was found."""
        store = self._context.store
        if not self._published:
            self._published = True
            store.set(f"ucx/{self._context.rank}", self._worker.address.hex())
        rank = next((rank for rank in self._missing if rank not in self._transport.links), self._missing[0])
        self._missing.remove(rank)
        self._missing.append(rank)
        try:
            address = _address(fetch(store, f"ucx/{rank}", time.monotonic() + _LOOK_SECONDS, None), rank)
        except TimeoutError:
            return False
        link = self._transport.links.get(rank)
        if link is not None and link.worker == name_of(address):
            return False
        if link is not None:
            self._drop(rank)
        try:
            self._transport.links[rank] = self._connections.link(address)
        except UcxError as error:
            explained = explain(error, rank, self._worker.over)
            if error.status != libucp.ERR_UNREACHABLE:
                # The shared memory of a rank that gave up is gone: name the death for which it did.
                self._check_live(time.monotonic())
                raise explained from error
            self._unreached = explained  # the worker may be gone; its rank may still publish a new address
            return False
        self._send_hello(rank)
        return True


def _address(told: bytes, rank: int) -> bytes:
    """Decode the address of a worker from the rendezvous. Raises `CorruptData`."""
    try:
        return bytes.fromhex(told.decode())
    except ValueError as error:
        raise CorruptData(f"the address of rank {rank} at the rendezvous cannot be read: {error}") from error
