"""Requests and replies over UCX by active messages, where UCX only emulates one-sided ops, as over TCP.

The emulation (UCX 1.22) ends the process: that of an owner which comes to answer a peer that died with two requests
under way, and that of a survivor if its atomic could not leave before the target died. Active messages end with a
status.

UCX calls the handler inside a worker's progress, so an owner is always between two requests.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided.worker import OneSidedWorker
from holdfast.backends.ucx.worker import Endpoint, Transports, UcxWorker
from holdfast.comms.onesided.peer_watch import PeerWatch
from holdfast.comms.onesided.requests import HEAD, REPLY, Channel, Pending, Requests, Source
from holdfast.comms.transport.base import Transport

_MESSAGE = 1
_SOURCE = struct.Struct("<i")
_HEADER_BYTES = _SOURCE.size + HEAD.size
_INLINE_BYTES = 1024
"""Up to this size a body follows its head in one piece: UCX sends that at once, and a separate head 20 us later."""
_NO_RANK = -1
_TURNS = 64
"""Progress calls between two looks at the peers, with the lock held."""


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
        broken: set[Source] | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.broken = set() if broken is None else broken
        self._worker, self._lock, self._requests, self._end = worker, lock, requests, end
        self._rank, self._endpoints, self._source = rank, endpoints, _SOURCE.pack(rank)
        self._ffi, self._call = worker.lib.ffi, worker.lib.call
        self._sending: list[tuple[int, Source, object]] = []
        plain = libucp.AM_EAGER | libucp.AM_COPY_HEADER
        self._plain, self._with_reply = (self._send_params(plain | more) for more in (0, libucp.AM_REPLY))
        self._handler = self._ffi.callback("ucp_am_recv_callback_t", self._on_message)
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

    def _sweep(self) -> None:
        """Release the memory of messages that have left."""
        going = []
        for entry in self._sending:
            status = self._worker.status(entry[0])
            if status == libucp.IN_PROGRESS:
                going.append(entry)
            elif status != libucp.OK:
                self.broken.add(entry[1])
        self._sending = going

    def _on_message(self, _: Any, header: Any, length: int, data: Any, nbytes: int, param: Any) -> int:
        whole = length == 0 and not param.recv_attr & libucp.AM_IS_RENDEZVOUS
        if whole and nbytes >= _HEADER_BYTES:
            text, rest = self._text(data, _HEADER_BYTES), nbytes - _HEADER_BYTES
        elif length == _HEADER_BYTES:
            text, rest = self._text(header, length), nbytes
            if param.recv_attr & libucp.AM_IS_RENDEZVOUS:
                rest = 0  # a request that lacks its bytes is refused
        else:
            return libucp.OK
        (source,) = _SOURCE.unpack_from(text)
        if self._rank == _NO_RANK:
            source = param.reply_ep if param.recv_attr & libucp.AM_HAS_REPLY_ENDPOINT else None
            if (source is None) != (text[_SOURCE.size] == REPLY):
                return libucp.OK
        elif not 0 <= source < len(self._endpoints):
            return libucp.OK
        body = self._ffi.buffer(data + (nbytes - rest), rest) if rest else b""
        self._requests.received(source, text[_SOURCE.size :], body)
        return libucp.OK

    def _text(self, place: Any, nbytes: int) -> bytes:
        return bytes(self._ffi.buffer(place, nbytes))

    def take(self) -> None:
        with self._lock:
            self._sweep()
            while self._worker.progress():
                pass

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
        self._end()


class MessageSide(OneSidedWorker):
    """The one-sided worker of a rank that reaches windows by messages, over `channel`."""

    def __init__(
        self, transport: Transport, over: Transports, watch: PeerWatch, deadline: float, requests: Requests
    ) -> None:
        self._requests = requests
        super().__init__(transport, over, watch, deadline)

    def _make_worker(self, over: Transports) -> UcxWorker:
        worker = UcxWorker(libucp.FEATURE_AM, over, lambda rank, why: self.broken.add(rank))
        self.channel = UcxChannel(worker, self.lock, self._requests, self.rank, self.endpoints, self.broken, self.close)
        return worker
