"""Messages between ranks by UCP tags, for the collectives of `MessageTransport`; `handshake` connects the ranks.

The receiver reads large payloads, the sender never writes them. So a rank that was stopped, and continues after the
others have given up on it, cannot write into memory that they have reused. Over shared memory UCX never reports a
peer's death, so a wait checks the pidfds of the peers, their farewells and the abort flag itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import cast

import torch

from holdfast.backends.common.process_memory import permit_peers
from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.endpoints import Connections, PeerLink
from holdfast.backends.ucx.farewells import Notices, Tags
from holdfast.backends.ucx.onesided import RankChannel
from holdfast.backends.ucx.worker import TURNS, ProgressThread
from holdfast.comms.algorithms.message_passing.exchange import Posted
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.comms.onesided.mapped import make_window
from holdfast.comms.onesided.requests import RequestService
from holdfast.comms.ops import Journal
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.system.waiting import yield_cpu
from holdfast.comms.transport.base import Context, Link, Peer, WindowMemory
from holdfast.comms.transport.liveness import Liveness, PeerWatch, this_host

_REASON_SECONDS = 0.5
_LOOK_SECONDS = 0.001
_SPINS, _YIELDS = 1000, 200
_FIRST_ROUNDS = 20
"""After a failure, this many waits sleep instead of yielding: the kernel still frees the memory of the dead process."""
_FLUSH_SECONDS = 0.5
_GRACE_SECONDS = 0.1
"""How long an op continues after a rank that it does not wait for has aborted: it may be about to complete."""
_SETTLE_SECONDS = 0.02
"""How long messages under way at the end of an epoch may take, before its connections are given up."""
_EAGER_BYTES = 4096
"""Above this size a receiver may have read the memory of the sender directly."""


def announced_link(context: Context, local: bool) -> Link:
    """The cost of a message over shared memory, or over TCP."""
    return context.link("ucx/shm" if local else "ucx/tcp")


class PendingMessage:
    """A send or receive under way. Keeps its tensor. `request`: 0 once it is complete, or if its call was cut short."""

    __slots__ = ("nbytes", "peer", "receives", "request", "tensor")

    def __init__(self, tensor: torch.Tensor, peer: int, receives: bool) -> None:
        self.tensor, self.peer, self.receives = tensor, peer, receives
        self.nbytes = tensor.nbytes
        self.request = 0


class UcxTransport(MessageTransport):
    """One worker, and a link to every peer. Made by `handshake.connect`."""

    def __init__(self, context: Context, connections: Connections) -> None:
        self.connections: Connections | None = connections
        self._returned: Connections | None = None
        self._worker = worker = connections.worker
        self._call = worker.lib.call
        self.epoch = context.epoch
        self._error: HoldfastError | None = None
        self._lock = threading.RLock()
        self._pending: set[PendingMessage] = set()
        self._info = worker.lib.ffi.new("ucp_tag_recv_info_t *")
        self._receiving = worker.lib.ffi.new(
            "ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_RECV_INFO, "tag_info": self._info}
        )
        crowded = context.size > len(os.sched_getaffinity(0))
        self._spins, self._yields = (50, 50) if crowded else (_SPINS, _YIELDS)
        self._first_rounds = 0 if context.previous is None else _FIRST_ROUNDS
        self.links: dict[int, PeerLink] = {}
        self._progress: ProgressThread | None = None
        self._peers = context.peers
        self._service: RequestService | None = None
        self._wake = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._events = select.poll()
        self._events.register(self._wake, select.POLLIN)
        assert worker.event_fd is not None
        self._events.register(worker.event_fd, select.POLLIN)
        self.liveness = Liveness(context.peers, context.rank)
        self._watch = PeerWatch(self.liveness, self._check_live)
        self._tags = Tags(context.epoch)
        connections.begin(self._tags)
        self.notices = Notices(worker, context.rank, self._tags)
        super().__init__(context, announced_link(context, worker.over.local))
        self.medium = worker.over.tls

    def _agree(self, context: Context, link: Link) -> Link:
        """Return `link` for now: the constants of rank 0 come with its hello."""
        return link

    def begin(self, link: Link, connect_payloads: Sequence[tuple[int, ...]]) -> None:
        """Begin to accept ops: all ranks are connected. `link` is the cost of a message, the same on every rank."""
        self._link, self.connect_payloads = link, connect_payloads
        if not self._worker.over.local:
            self._progress = ProgressThread(self._worker, self._lock)

    # -- messages

    def _post_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Posted:
        message = PendingMessage(tensor, dst, False)
        with self._lock:
            self._check()
            self._pending.add(message)  # before UCX has its memory: see worker.py
            request = self._call.ucp_tag_send_nbx(
                self.links[dst].endpoint,
                tensor.data_ptr(),
                message.nbytes,
                self._tags.of(self.rank, tag, tensor.dtype),
                self._worker.plain,
            )
            self._posted(message, request)
        return message

    def _post_recv(self, tensor: torch.Tensor, src: int, tag: int) -> Posted:
        message = PendingMessage(tensor, src, True)
        with self._lock:
            self._check()
            self._pending.add(message)
            request = self._call.ucp_tag_recv_nbx(
                self._worker.handle,
                tensor.data_ptr(),
                message.nbytes,
                self._tags.of(src, tag, tensor.dtype),
                self._tags.any_dtype,
                self._receiving,
            )
            self._posted(message, request)
            if not request:
                self._check_alike(message)
        return message

    def _posted(self, message: PendingMessage, request: int) -> None:
        if request > 0:
            message.request = request
            return
        self._pending.discard(message)
        if request < 0:
            raise self._explain(message, request)

    def _done(self, message: PendingMessage) -> bool:
        """Whether a message is complete; raises if it failed."""
        request = message.request
        if not request:
            return True
        if message.receives:
            status = self._call.ucp_tag_recv_request_test(request, self._info)
        else:
            status = self._call.ucp_request_check_status(request)
        if status == libucp.IN_PROGRESS:
            return False
        message.request = 0
        self._pending.discard(message)
        self._call.ucp_request_free(request)
        if status != libucp.OK:
            raise self._explain(message, status)
        if message.receives:
            self._check_alike(message)
        return True

    def _check_alike(self, message: PendingMessage) -> None:
        dtype = self._tags.dtype(self._info.sender_tag)
        if self._info.length != message.nbytes or dtype is not message.tensor.dtype:
            raise Mismatch(
                f"rank {message.peer} sent {self._info.length} bytes of {dtype}, where this rank expects "
                f"{message.nbytes} of {message.tensor.dtype}; both must pass the same shape and dtype"
            )

    def _explain(self, message: PendingMessage, status: int) -> HoldfastError:
        if status == libucp.ERR_MESSAGE_TRUNCATED:
            return Mismatch(f"rank {message.peer} sent more than the {message.nbytes} bytes that this rank expects")
        self._check_reason(message.peer)
        return PeerFailed((message.peer,), f"a message failed: {self._worker.lib.text(status)}")

    def _check_reason(self, peer: int) -> None:
        """Raise the reason for which `peer` broke a connection, if it or the kernel gives one.

        A rank that leaves because another died resets its connections, and would be blamed itself. Its farewell can be
        lost behind a large message, so on this host, where both ends are seen to live or not, the death is waited for.
        """
        local = self._peers[peer].host == this_host()
        deadline = time.monotonic() + (_REASON_SECONDS if local else 0.0)
        while True:
            self._take_in()
            self.check_live(self.liveness.dead(), {peer})
            if time.monotonic() >= deadline:
                return
            self.sleep(_REASON_SECONDS / 50)

    # -- waiting

    def _complete(self, posted: Sequence[Posted], deadline: float, op: str, seq: int) -> None:
        with self._lock:
            self._rounds += 1
            try:
                messages = cast(Sequence[PendingMessage], posted)
                waiting = [each for each in messages if not self._done(each)]
                if waiting:
                    self._wait(waiting, deadline, op, seq)
                if senders := {each.peer for each in messages if each.receives and each.nbytes > _EAGER_BYTES}:
                    # a rank sends its farewell before it releases its memory: what was read before that is good
                    self._take_in(turns=16)
                    self._check_aborted(senders)
            except HoldfastError as error:
                self._leave(True, str(error))
                raise

    def _wait(self, waiting: list[PendingMessage], deadline: float, op: str, seq: int) -> None:
        worker, began = self._worker, time.monotonic()
        progress, handle = self._call.ucp_worker_progress, worker.handle
        look_at, turn = began + _LOOK_SECONDS, 0
        patience = self._spins + (0 if self._rounds <= self._first_rounds else self._yields)
        while True:
            progress(handle)
            while waiting and self._done(waiting[-1]):
                waiting.pop()
            if not waiting:
                return
            turn += 1
            if turn < self._spins and turn & 63:
                continue
            self._check()
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_SECONDS
                self._check_peers(waiting)
                if self._journal is not None:
                    self._notify(self._journal, waiting)
                if now >= deadline:
                    missing = sorted({each.peer for each in waiting if not self._done(each)})
                    raise OpTimeout(op, seq, now - began, missing)
            if turn >= patience:
                self.sleep(min(look_at, deadline) - time.monotonic())
            elif turn >= self._spins:
                yield_cpu()

    def sleep(self, seconds: float) -> None:
        """Sleep until there is work for `progress`, or an abort; for at most `seconds`. The lock is held."""
        self._worker.check_descriptors()
        if self._worker.arm():
            self._events.poll(max(seconds, 0) * 1000)

    def _notify(self, journal: Journal, waiting: Sequence[PendingMessage]) -> None:
        takes = sorted({each.peer for each in waiting if each.receives})
        journal.waits(takes, sorted({each.peer for each in waiting if not each.receives}), self._rounds)

    def _check_peers(self, waiting: list[PendingMessage]) -> None:
        """Raise if a message that is waited for can never come, or if any rank is gone or aborted."""
        self._worker.check_descriptors()
        dead = self.liveness.dead()
        self._take_in()
        waiting[:] = [each for each in waiting if not self._done(each)]
        self.check_live(dead, {each.peer for each in waiting})

    def check_live(self, dead: Iterable[int], missing: Iterable[int]) -> None:
        """Raise if any rank is dead or aborted, or one that is `missing` has left."""
        self.notices.check()
        left = self.notices.left
        gone = tuple(rank for rank in dead if rank not in left)
        if gone:
            raise PeerFailed(gone, "the kernel says that the process is gone")
        for rank, (farewell, when) in left.items():
            if farewell.aborted and (rank in missing or time.monotonic() - when > _GRACE_SECONDS):
                raise Revoked(self.epoch, f"rank {rank} aborted: {farewell.why}")
            if rank in missing:
                raise PeerFailed((rank,), f"it left the communicator: {farewell.why}")
        for rank, why in self._broken():
            raise PeerFailed((rank,), f"its connection broke: {why}")

    def _take_in(self, turns: int = TURNS) -> None:
        """Take in what has arrived, in at most `turns` calls of UCX, and the farewells in it."""
        self._worker.drain(turns)
        self.notices.poll()

    def _check_aborted(self, ranks: Iterable[int]) -> None:
        """Raise if one of `ranks` has said that it aborted."""
        self.notices.check()
        for rank in ranks:
            if (left := self.notices.left.get(rank)) is not None and left[0].aborted:
                raise Revoked(self.epoch, f"rank {rank} aborted: {left[0].why}")

    def _broken(self) -> list[tuple[int, str]]:
        """The ranks that lost their connection before they left, and why."""
        if self.connections is None or not (broken := self.connections.broken):
            return []
        return [
            (rank, broken[link.key])
            for rank, link in self.links.items()
            if link.key in broken and rank not in self.notices.left
        ]

    # -- windows

    def window(self, tensor: torch.Tensor, deadline: float) -> WindowMemory:
        if self._worker.over.local:
            permit_peers()
            return make_window("ucx", self, self._peers, tensor, deadline, self._watch.check)
        if self._service is None:
            open_channel = partial(RankChannel, self, self._worker.over, self._watch, deadline)
            self._service = RequestService(self.rank, self.size, self._watch, open_channel)
        return self._service.window(self, tensor, deadline)

    def _check_live(self) -> Iterable[int]:
        """The ranks that lost their connection. Raises if this communicator has ended, here or elsewhere."""
        self._check()
        if self._lock.acquire(blocking=False):
            try:
                if self.connections is not None:
                    self._worker.progress()
                    self.notices.poll()
            finally:
                self._lock.release()
        self._check_aborted(range(self.size))
        return [rank for rank, _ in self._broken()]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        if self._error is None:
            self._error = error
        self._wake.wake()
        if self._lock.acquire(timeout=1.0):
            try:
                self._leave(True, str(error))
            finally:
                self._lock.release()

    def _leave(self, aborted: bool, why: str) -> None:
        if self.connections is None or self._worker.lost_descriptors:
            return
        dead = self.liveness.dead()
        self.notices.poll()
        away = {*dead, *self.notices.left}
        self.notices.send_farewell(
            [link.endpoint for rank, link in self.links.items() if rank not in away], aborted, why
        )

    def hand_over(self, peers: Collection[Peer]) -> Connections | None:
        """Hand over the connections to the next epoch of `peers`, with nothing of this one under way.

        None if messages do not end within milliseconds, or the connections are gone already. The ops of this transport
        have ended; it is left without connections.
        """
        self._stop_progress()
        with self._lock:
            if (returned := self._returned) is not None:
                self._returned = None
                if returned.keep({}, returned.links.values()):  # some links may be half connected
                    return returned
                returned.close()
                return None
            connections = self.connections
            if connections is None:
                return None
            self.notices.close()
            settled = self._settle(connections, peers)
            self.connections = None
            if not settled:
                self._destroy(connections)
                return None
        return connections

    def _settle(self, connections: Connections, peers: Collection[Peer]) -> bool:
        """End all that could write to memory of this epoch; whether that is done."""
        if not all(message.request for message in self._pending):
            return False  # calls were cut short, and nobody knows what they have begun
        receives = [message.request for message in self._pending if message.receives]
        for request in receives:
            self._call.ucp_request_cancel(self._worker.handle, request)
        if not connections.settle(receives, _SETTLE_SECONDS):
            return False
        for message in tuple(self._pending):
            request, message.request = message.request, 0
            if message.receives:
                self._call.ucp_request_free(request)
            else:
                connections.abandon_send(request, message.tensor)
            self._pending.discard(message)
        links, self.links = self.links, {}
        kept = {self._peers[rank]: link for rank, link in links.items() if self._peers[rank] in peers}
        return connections.keep(kept, [link for rank, link in links.items() if self._peers[rank] not in peers])

    def take_back(self, connections: Connections) -> None:
        """Take back connections that `hand_over` gave out, or their replacement, for the next attempt."""
        self._returned = connections

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        self._stop_progress()
        with self._lock:
            if self.connections is not None:
                self._disconnect(self.connections)
                self.connections = None
            if self._returned is not None:
                self._returned.close()
                self._returned = None
        self.liveness.close()
        self._wake.close()

    def _disconnect(self, connections: Connections) -> None:
        if self._worker.lost_descriptors:
            connections.close()
            return
        if self._error is None and not self._pending:
            self._leave(False, "closed")
            if not self.liveness.dead():
                self._worker.flush([link.endpoint for link in self.links.values()], _FLUSH_SECONDS)
        else:
            self._leave(True, str(self._error))
        self.notices.close()
        self._destroy(connections)

    def _destroy(self, connections: Connections) -> None:
        """Close the connections. What is pending ends with them."""
        begun = [message for message in self._pending if message.request]
        for message in begun:
            self._call.ucp_request_cancel(self._worker.handle, message.request)
        self._worker.progress()
        for message in begun:
            request, message.request = message.request, 0
            self._call.ucp_request_free(request)
        connections.close()
        self._pending.clear()
