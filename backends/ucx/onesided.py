"""Requests and replies over UCX by active messages, for windows and the memory plane between hosts.

UCX only emulates one-sided ops where the network has none, as over TCP. The emulation (UCX 1.22) ends the process: that
of an owner which comes to answer a peer that died with two requests under way, and that of a survivor if its atomic
could not leave before the target died. Active messages end with a status. Over a network with RDMA, UCX moves a large
body by that: the receiver reads it where it lies (a rendezvous).

UCX calls the handlers inside a worker's progress, so an owner is always between two requests.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.worker import Endpoint, ProgressThread, Transports, UcxWorker, explain
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone
from holdfast.comms.onesided.requests import HEAD, PIECE_BYTES, REPLY, Channel, Pending, Requests, Source
from holdfast.comms.system.waiting import Wait
from holdfast.comms.transport.base import Transport, gather_bytes
from holdfast.comms.transport.liveness import PeerWatch

_MESSAGE = 1
_SOURCE = struct.Struct("<i")
_HEADER_BYTES = _SOURCE.size + HEAD.size
_INLINE_BYTES = 1024
"""Up to this size a body follows its head in one piece: UCX sends that at once, and a separate head 20 us later."""
_NO_RANK = -1
_TURNS = 64
"""Progress calls between two looks at the peers, with the lock held."""
_CARD_BYTES = 4096
_WAIT = Wait(yields=200, sleep_seconds=0.0001)


class UcxChannel(Channel):
    """See the module. `worker` is used with `lock` held.

    Between ranks, `endpoints` reach them. Without ranks a request goes to an endpoint, and its reply back where it came
    from.
    """

    posted_bytes: ClassVar[int] = 64 << 10

    def __init__(
        self,
        worker: UcxWorker,
        lock: threading.RLock,
        requests: Requests,
        rank: int = _NO_RANK,
        endpoints: Sequence[Endpoint] = (),
    ) -> None:
        self.broken: set[Source] = set()
        self._worker, self._lock, self._requests = worker, lock, requests
        self._rank, self._endpoints, self._source = rank, endpoints, _SOURCE.pack(rank)
        self._ffi, self._call = worker.lib.ffi, worker.lib.call
        self._sending: list[tuple[int, Source, object]] = []
        self._arriving: dict[int, tuple[Source, bytes, Any]] = {}
        """The bodies that UCX is reading from their senders now."""
        self._bodies = itertools.count(1)
        plain = libucp.AM_COPY_HEADER | (libucp.AM_EAGER if worker.over.emulated else 0)
        self._plain, self._with_reply = (self._send_params(plain | more) for more in (0, libucp.AM_REPLY))
        self._handler = self._ffi.callback("ucp_am_recv_callback_t", self._on_message)
        self._body_handler = self._ffi.callback("ucp_am_recv_data_nbx_callback_t", self._on_body)
        params = self._ffi.new(
            "ucp_am_handler_param_t *",
            {"field_mask": 0b0111, "id": _MESSAGE, "flags": libucp.AM_WHOLE, "cb": self._handler},
        )
        worker.lib.check(self._call.ucp_worker_set_am_recv_handler(worker.handle, params), "setting a message handler")

    def _send_params(self, flags: int) -> Any:
        return self._ffi.new("ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_FLAGS, "flags": flags})

    def send(self, to: Source, head: bytes, body: bytes | memoryview = b"") -> None:
        header, between_ranks = self._source + head, self._rank != _NO_RANK
        if len(body) <= _INLINE_BYTES:
            header, body = b"", b"".join((header, body))
        kept = self._ffi.from_buffer(body)
        with self._lock:
            if self._sending:
                self._sweep()
            self._worker.keep(kept)
            request = int(
                self._call.ucp_am_send_nbx(
                    self._endpoints[to] if between_ranks else to,
                    _MESSAGE,
                    header,
                    len(header),
                    int(self._ffi.cast("uintptr_t", kept)),
                    len(body),
                    self._plain if between_ranks or head[0] == REPLY else self._with_reply,
                )
            )
            if request > 0:
                self._sending.append((request, to, kept))
            elif request < 0:
                self.broken.add(to)
            self._worker.release(kept)

    def _sweep(self) -> None:
        """Release the memory of messages that have left."""
        for (_, to, _), status in self._worker.take_ended(self._sending):
            if status != libucp.OK:
                self.broken.add(to)

    # -- what arrives

    def _on_message(self, _: Any, header: Any, length: int, data: Any, nbytes: int, param: Any) -> int:
        to_come = bool(param.recv_attr & libucp.AM_IS_RENDEZVOUS)
        if length == 0 and not to_come and nbytes >= _HEADER_BYTES:
            text, rest = self._text(data, _HEADER_BYTES), nbytes - _HEADER_BYTES
        elif length == _HEADER_BYTES:
            text, rest = self._text(header, length), nbytes
        else:
            return libucp.OK
        (source,) = _SOURCE.unpack_from(text)
        if self._rank == _NO_RANK:
            source = param.reply_ep if param.recv_attr & libucp.AM_HAS_REPLY_ENDPOINT else None
            if (source is None) != (text[_SOURCE.size] == REPLY):
                return libucp.OK
        elif not 0 <= source < len(self._endpoints):
            return libucp.OK
        head = text[_SOURCE.size :]
        if to_come and 0 < rest <= PIECE_BYTES:
            self._receive_body(source, head, data, rest)
        else:  # one that is too long stays with its sender, and the request without its bytes is refused
            body = self._ffi.buffer(data + (nbytes - rest), rest) if rest and not to_come else b""
            self._requests.received(source, head, body)
        return libucp.OK

    def _receive_body(self, source: Source, head: bytes, data: Any, nbytes: int) -> None:
        """Begin to read a body from its sender, into the memory that it is for or one of ours."""
        body = self._requests.room(source, head, nbytes) or memoryview(bytearray(nbytes))
        number = next(self._bodies)
        self._arriving[number] = source, head, body
        params = self._ffi.new(
            "ucp_request_param_t *",
            {
                "op_attr_mask": libucp.ATTR_CALLBACK | libucp.ATTR_USER_DATA,
                "cb": self._body_handler,
                "user_data": self._ffi.cast("void *", number),
            },
        )
        place = int(self._ffi.cast("uintptr_t", self._ffi.from_buffer(body)))
        request = int(self._call.ucp_am_recv_data_nbx(self._worker.handle, data, place, nbytes, params))
        if request <= 0:
            self._end_body(number, request)

    def _on_body(self, request: Any, status: int, length: int, number: Any) -> None:
        self._call.ucp_request_free(int(self._ffi.cast("intptr_t", request)))
        self._end_body(int(self._ffi.cast("intptr_t", number)), status)

    def _end_body(self, number: int, status: int) -> None:
        source, head, body = self._arriving.pop(number)
        if status == libucp.OK:
            self._requests.received(source, head, body)

    def _text(self, place: Any, nbytes: int) -> bytes:
        return bytes(self._ffi.buffer(place, nbytes))

    def take(self) -> None:
        with self._lock:
            self._sweep()
            self._worker.drain()

    def bell(self) -> None:
        return None

    def poll(self, pending: Pending) -> bool:
        progress, handle = self._call.ucp_worker_progress, self._worker.handle
        with self._lock:
            for _ in range(_TURNS):
                if pending.answered:
                    return True
                progress(handle)
            if self._sending:
                self._sweep()
        return pending.answered

    def close(self) -> None:
        """Does nothing: the worker is its owner's."""


class RankChannel(UcxChannel):
    """Between the ranks of a communicator, over a worker of its own: a window's calls do not wait for collectives.

    Its progress thread answers for this rank, which may compute or sleep, but not be stopped.
    """

    def __init__(
        self, transport: Transport, over: Transports, watch: PeerWatch, deadline: float, requests: Requests
    ) -> None:
        lock, self._to_ranks = threading.RLock(), list[Endpoint]()
        worker = UcxWorker(libucp.FEATURE_AM, over, lambda rank, why: self.broken.add(rank))
        self._progress: ProgressThread | None = None
        super().__init__(worker, lock, requests, transport.rank, self._to_ranks)
        try:
            self._connect(transport, watch, deadline)
        except BaseException:
            self.close()
            raise

    def _connect(self, transport: Transport, watch: PeerWatch, deadline: float) -> None:
        """Wait until every rank is connected to every other, and progresses."""
        worker = self._worker
        for rank, address in enumerate(_exchange(transport, worker.address, deadline)):
            try:
                self._to_ranks.append(worker.connect(address, rank))
            except libucp.UcxError as error:
                raise explain(error, rank, worker.over) from error
        eager = transport.size <= len(os.sched_getaffinity(0))
        self._progress = ProgressThread(worker, self._lock, eager=eager)
        for rank in range(transport.size):
            self._flush(rank, watch, deadline)
        transport.barrier(deadline)

    def _flush(self, rank: int, watch: PeerWatch, deadline: float) -> None:
        """Wait until the connection to a rank is made."""
        worker = self._worker
        with self._lock:
            request = int(self._call.ucp_ep_flush_nbx(self._to_ranks[rank], worker.plain))
        status = libucp.IN_PROGRESS

        def ended() -> bool:
            nonlocal status
            with self._lock:
                worker.progress()
                status = worker.status(request)
            return status != libucp.IN_PROGRESS

        try:
            _WAIT.until(ended, lambda: watch.check(rank), deadline, lambda late: OpTimeout("window", 0, late, (rank,)))
        except HoldfastError:
            with self._lock:
                worker.give_up(request, None)
            raise
        if status != libucp.OK:
            watch.look()
            watch.check(rank)
            raise RegionGone(f"rank {rank} cannot be reached for a window: {worker.lib.text(status)}; connect anew")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        self._worker.close()


def _exchange(transport: Transport, card: bytes, deadline: float) -> list[bytes]:
    """Gather the `card` of every rank, in rank order; collective."""
    if len(card) > _CARD_BYTES - 4:
        raise HoldfastError(
            f"UCX's address of this process has {len(card)} bytes; set UCX_NET_DEVICES to fewer devices"
        )
    padded = (len(card).to_bytes(4, "little") + card).ljust(_CARD_BYTES, b"\0")
    texts = gather_bytes(transport, padded, deadline)
    return [text[4 : 4 + int.from_bytes(text[:4], "little")] for text in texts]
