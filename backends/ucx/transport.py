"""Messages between ranks by UCP tags. The collectives over them are those of `comms.algorithms.messages`.

Large payloads are read by the receiver, never written by the sender: a rank that was stopped, and goes on after the
others have given up on it, then cannot write into memory that they use for something else. Nothing that UCX offers
over shared memory tells of a peer's death, so a wait looks at the peers' pidfds, at their farewells and at the abort
flag itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from typing import cast

import torch

from holdfast.backends.ucx import libucp, standby
from holdfast.backends.ucx.active_window import ActiveSide, ActiveWindow
from holdfast.backends.ucx.far_window import FarWindow
from holdfast.backends.ucx.farewell import ABORTED, CLOSED, RANK_SHIFT, Farewells
from holdfast.backends.ucx.libucp import UcxError
from holdfast.backends.ucx.near_window import NearWindow
from holdfast.backends.ucx.onesided import OneSided
from holdfast.backends.ucx.progress import ProgressThread
from holdfast.backends.ucx.worker import Endpoint, Transports, Worker
from holdfast.comms.algorithms.cost import DEFAULTS
from holdfast.comms.algorithms.exchange import Posted
from holdfast.comms.algorithms.messages import MessageTransport
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked, Unsupported
from holdfast.comms.journal import Journal
from holdfast.comms.liveness import Liveness
from holdfast.comms.rendezvous import fetch
from holdfast.comms.transport import Context
from holdfast.comms.window import WindowMemory

LINKS = {True: DEFAULTS["ucx/shm"], False: DEFAULTS["ucx/tcp"]}
"""What a message costs over shared memory, and over TCP."""

_TAG_MASK = (1 << RANK_SHIFT) - 1
_EXACT = (1 << 64) - 1
_LOOK_SECONDS = 0.001
_SPINS, _YIELDS = 1000, 200
_FLUSH_SECONDS = 0.5
_GRACE_SECONDS = 0.1
"""How long an op goes on after the abort of a rank that it does not wait for: it may be complete but for us."""
_EAGER_BYTES = 4096
"""Above this a receiver may have read the sender's own memory."""


class Message:
    """A send or receive under way; `request` is 0 once it is complete. Keeps its tensor."""

    __slots__ = ("nbytes", "peer", "receives", "request", "tensor")

    def __init__(self, tensor: torch.Tensor, peer: int, receives: bool) -> None:
        self.tensor, self.peer, self.receives = tensor, peer, receives
        self.nbytes = tensor.nbytes
        self.request = 0


class UcxTransport(MessageTransport):
    """One worker, an endpoint to every peer."""

    def __init__(self, context: Context, worker: Worker) -> None:
        self._worker = worker
        self._call = worker.lib.call
        self._epoch = context.epoch
        self._error: HoldfastError | None = None
        self._lock = threading.RLock()
        self._pending: set[Message] = set()
        self._broken: dict[int, str] = {}
        self._info = worker.lib.ffi.new("ucp_tag_recv_info_t *")
        self._receiving = worker.lib.ffi.new(
            "ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_RECV_INFO, "tag_info": self._info}
        )
        crowded = context.size > len(os.sched_getaffinity(0))
        self._spins, self._yields = (50, 50) if crowded else (_SPINS, _YIELDS)
        self._endpoints: dict[int, Endpoint] = {}
        self._progress: ProgressThread | None = None
        self._peers = context.peers
        self._side: OneSided | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleep = select.poll()
        self._sleep.register(self._wake, select.POLLIN)
        self._sleep.register(worker.event_fd, select.POLLIN)
        self._liveness = Liveness(context.peers, context.rank)
        self._farewells = Farewells(worker, context.rank)
        try:
            self._connect(context)
            super().__init__(context, LINKS[worker.over.local])
        except BaseException:
            self.close()
            raise
        if not worker.over.local:
            self._progress = ProgressThread(worker, self._lock)

    def note_failure(self, rank: int, why: str) -> None:
        """The connection to `rank` broke. Called while the worker is progressed."""
        self._broken.setdefault(rank, why)

    def _connect(self, context: Context) -> None:
        context.store.set(f"ucx/{context.rank}", self._worker.address.hex())
        for step in range(1, context.size):
            peer = (context.rank + step) % context.size
            try:
                address = fetch(context.store, f"ucx/{peer}", context.deadline, self._liveness)
            except TimeoutError as error:
                raise OpTimeout("connect", 0, 0.0, (peer,)) from error
            try:
                self._endpoints[peer] = self._worker.connect(bytes.fromhex(address.decode()), peer)
            except UcxError as error:
                raise PeerFailed((peer,), f"no connection to it: {error}") from error

    def meet(self, deadline: float) -> None:
        """Return once every rank is connected to every other.

        UCX would put it off until the first large message, which the receiver must then help along: nothing from a rank
        that aborts at that moment, its farewell least of all, would arrive.
        """
        connected = Message(torch.empty(0), -1, False)
        with self._lock:
            self._posted(connected, self._call.ucp_worker_flush_nbx(self._worker.handle, self._worker.plain))
        self._complete([connected], deadline, "connect", 0)
        self.barrier(deadline)

    # -- messages

    def _post_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Posted:
        message = Message(tensor, dst, False)
        with self._lock:
            self._check()
            full = self.rank << RANK_SHIFT | tag & _TAG_MASK
            self._posted(
                message,
                self._call.ucp_tag_send_nbx(
                    self._endpoints[dst], tensor.data_ptr(), message.nbytes, full, self._worker.plain
                ),
            )
        return message

    def _post_recv(self, tensor: torch.Tensor, src: int, tag: int) -> Posted:
        message = Message(tensor, src, True)
        with self._lock:
            self._check()
            full = src << RANK_SHIFT | tag & _TAG_MASK
            request = self._call.ucp_tag_recv_nbx(
                self._worker.handle, tensor.data_ptr(), message.nbytes, full, _EXACT, self._receiving
            )
            self._posted(message, request)
            if not request:
                self._check_size(message)
        return message

    def _posted(self, message: Message, request: int) -> None:
        if request:
            if request < 0:
                raise self._explain(message, request)
            message.request = request
            self._pending.add(message)

    def _done(self, message: Message) -> bool:
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
            self._check_size(message)
        return True

    def _check_size(self, message: Message) -> None:
        if self._info.length != message.nbytes:
            raise Mismatch(
                f"rank {message.peer} sent {self._info.length} bytes, where this rank expects {message.nbytes}"
            )

    def _explain(self, message: Message, status: int) -> HoldfastError:
        if status == libucp.ERR_MESSAGE_TRUNCATED:
            return Mismatch(f"rank {message.peer} sent more than the {message.nbytes} bytes that this rank expects")
        return PeerFailed((message.peer,), f"a message failed: {self._worker.lib.text(status)}")

    # -- waiting

    def _complete(self, posted: Sequence[Posted], deadline: float, op: str, seq: int) -> None:
        with self._lock:
            self._rounds += 1
            try:
                messages = cast(Sequence[Message], posted)
                waiting = [each for each in messages if not self._done(each)]
                if waiting:
                    self._wait(waiting, deadline, op, seq)
                if senders := {each.peer for each in messages if each.receives and each.nbytes > _EAGER_BYTES}:
                    self._check_senders(senders)
            except HoldfastError as error:
                self._leave(ABORTED, str(error))
                raise

    def _wait(self, waiting: list[Message], deadline: float, op: str, seq: int) -> None:
        worker, began = self._worker, time.monotonic()
        progress, handle = self._call.ucp_worker_progress, worker.handle
        look_at, turn = began + _LOOK_SECONDS, 0
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
                self._look_at_peers(waiting)
                if self._journal is not None:
                    self._tell(self._journal, waiting)
                if now >= deadline:
                    missing = sorted({each.peer for each in waiting if not self._done(each)} - {-1})
                    raise OpTimeout(op, seq, now - began, missing)
            if turn >= self._spins + self._yields:
                if worker.arm():
                    self._sleep.poll(max(min(look_at, deadline) - time.monotonic(), 0) * 1000)
            elif turn >= self._spins:
                os.sched_yield()

    def _tell(self, journal: Journal, waiting: Sequence[Message]) -> None:
        takes = sorted({each.peer for each in waiting if each.receives})
        journal.waits(takes, sorted({each.peer for each in waiting if not each.receives} - {-1}), self._rounds)

    def _look_at_peers(self, waiting: list[Message]) -> None:
        """Raise if a message that is waited for can never come, or if any rank is gone or aborted."""
        dead = self._liveness.dead()
        while self._worker.progress():
            pass
        self._farewells.look()
        waiting[:] = [each for each in waiting if not self._done(each)]
        left = self._farewells.left
        gone = tuple(rank for rank in dead if rank not in left)
        if gone:
            raise PeerFailed(gone, "the kernel says that the process is gone")
        peers = {each.peer for each in waiting}
        for rank, (kind, why, when) in left.items():
            if kind == ABORTED and (rank in peers or time.monotonic() - when > _GRACE_SECONDS):
                raise Revoked(self._epoch, f"rank {rank} aborted: {why}")
            if rank in peers:
                raise PeerFailed((rank,), f"it left the communicator: {why}")
        for rank, why in self._broken.items():
            if rank not in left:
                raise PeerFailed((rank,), f"its connection broke: {why}")

    def _check_senders(self, ranks: set[int]) -> None:
        """Raise if one of `ranks` has aborted: it says so before it lets its memory go, so what was read before is
        good.
        """
        for _ in range(16):
            if not self._worker.progress():
                break
        self._farewells.look()
        for rank in ranks & self._farewells.left.keys():
            kind, why, _ = self._farewells.left[rank]
            if kind == ABORTED:
                raise Revoked(self._epoch, f"rank {rank} aborted: {why}")

    # -- windows

    def window(self, tensor: torch.Tensor, deadline: float) -> WindowMemory:
        if self._side is None:
            side = ActiveSide if self._worker.over.emulated else OneSided
            self._side = side(self, self._peers, self._worker.over, self._judge, deadline)
        if isinstance(self._side, ActiveSide):
            return ActiveWindow(self._side, self, tensor, deadline)
        kind = NearWindow if self._side.local else FarWindow
        return kind(self._side, self, tensor, deadline)

    def _judge(self) -> Iterable[int]:
        """The ranks whose connection broke. Raises if this communicator has ended, here or elsewhere."""
        self._check()
        if self._lock.acquire(blocking=False):
            try:
                self._worker.progress()
                self._farewells.look()
            finally:
                self._lock.release()
        for rank, (kind, why, _) in list(self._farewells.left.items()):
            if kind == ABORTED:
                raise Revoked(self._epoch, f"rank {rank} aborted: {why}")
        return [rank for rank in list(self._broken) if rank not in self._farewells.left]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        if self._error is None:
            self._error = error
        os.eventfd_write(self._wake, 1)
        if self._lock.acquire(timeout=1.0):
            try:
                self._leave(ABORTED, str(error))
            finally:
                self._lock.release()

    def _leave(self, kind: int, why: str) -> None:
        dead = self._liveness.dead()
        self._farewells.look()
        away = {*dead, *self._farewells.left}
        self._farewells.say([each for rank, each in self._endpoints.items() if rank not in away], kind, why)

    def close(self) -> None:
        if self._side is not None:
            self._side.close()
        if self._progress is not None:
            self._progress.close()
        with self._lock:
            if self._error is None and not self._pending:
                self._leave(CLOSED, "closed")
                if not self._liveness.dead():
                    self._worker.flush(_FLUSH_SECONDS)
            else:
                self._leave(ABORTED, str(self._error))
            self._farewells.close()
            for message in self._pending:
                self._call.ucp_request_cancel(self._worker.handle, message.request)
            self._worker.progress()
            for message in self._pending:
                self._call.ucp_request_free(message.request)
            self._worker.close()
            self._pending.clear()
        self._liveness.close()
        os.close(self._wake)
        standby.left(self._worker.over)


def connect(context: Context) -> UcxTransport:
    """Make a worker and connect it to those of all peers; return once all ranks have."""
    if context.device.type != "cpu":
        raise Unsupported(f"ucx on {context.device}", "use nccl for CUDA tensors, or a CPU device")
    over = Transports.choose(one_host=len({peer.host for peer in context.peers}) == 1)
    made: list[UcxTransport] = []

    def failed(rank: int, why: str) -> None:
        for transport in made:
            transport.note_failure(rank, why)

    transport = UcxTransport(context, standby.take(over, failed))
    made.append(transport)
    try:
        transport.meet(context.deadline)
    except BaseException:
        transport.close()
        raise
    if context.previous is None:
        standby.make(over)
    return transport
