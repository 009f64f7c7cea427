"""Read, write and add to a peer's memory by active messages, as over TCP, where UCX only emulates one-sided ops.

The emulation (UCX 1.22) ends the process: that of an owner which comes to answer a peer that died with two requests
under way, and that of a survivor if its atomic could not leave before the target died. Active messages end with a
status.

The requester sends a header, and the bytes of a write. The owner's handler, called inside its progress, carries out the
request and replies. So an owner is always between two requests: memory that it withdraws is not touched any more, and
an answer to a forgotten request never reaches the requester's memory.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.worker import Endpoint, UcxWorker
from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.cpu_wait import change
from holdfast.comms.tensors.exposed import ExposedMemory

PIECE_BYTES = 1 << 20
"""Bytes of one message."""
PIECES = 4
"""Messages under way at once, in one read or write."""

WAITING, DONE, GONE, REFUSED, BROKEN = range(5)
"""The states of a request. GONE: the region does not exist any more. REFUSED: outside it, or read-only. BROKEN: not
sent.
"""
READ, WRITE, ADD, SWAP, NOTE = range(5)
_REQUEST, _REPLY = 1, 2
_HEADER = struct.Struct("<BBHIQQQqq")
"""Kind, width of an integer, padding, sender, token, region, offset, two values."""
_ANSWER = struct.Struct("<QqB")
"""Token, value, status."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request of this process. `into` is the address for the bytes of a read, `value` the result of an atomic."""

    token: int
    into: int = 0
    nbytes: int = 0
    status: int = WAITING
    value: int = 0
    sent: bool = False


def in_pieces(
    nbytes: int,
    begin: Callable[[int, int], ActiveRequest],
    finish: Callable[[ActiveRequest], None],
    forget: Callable[[ActiveRequest], None],
) -> None:
    """Run `begin(start, length)` for each piece, several under way at a time; one empty piece for no bytes.

    `finish` returns when a piece was answered; when this returns, all were. If it raises, those under way are
    forgotten.
    """
    pending: deque[ActiveRequest] = deque()
    try:
        for start in range(0, nbytes, PIECE_BYTES) or (0,):
            pending.append(begin(start, min(PIECE_BYTES, nbytes - start)))
            if len(pending) == PIECES:
                finish(pending[0])
                pending.popleft()
        while pending:
            finish(pending[0])
            pending.popleft()
    except HoldfastError:
        for ask in pending:
            forget(ask)
        raise


@dataclass(slots=True, eq=False)
class ExposedRange:
    """Memory that peers may access, with two callbacks for what they wrote or noted.

    Each gets the number under which the sender sent it; `noted(sender, word, value, after)` returns whether it accepts
    that.
    """

    memory: ExposedMemory
    writable: bool
    wrote: Callable[[int], None] = field(default=lambda sender: None)
    noted: Callable[[int, int, int, int], bool] = field(default=lambda sender, word, value, after: False)


class ActiveMessages:
    """Both sides of a worker: its requests to others, and their requests to it. Not thread-safe, like the worker."""

    def __init__(self, worker: UcxWorker) -> None:
        self._worker = worker
        self._ffi, self._call = worker.lib.ffi, worker.lib.call
        self._exposed: dict[int, ExposedRange] = {}
        self._asked: dict[int, ActiveRequest] = {}
        self._tokens = itertools.count(1)
        self._sending: list[tuple[int, ActiveRequest | None, object]] = []
        flags = libucp.AM_EAGER | libucp.AM_COPY_HEADER
        self._asking, self._answering = (self._send_params(flags | reply) for reply in (libucp.AM_REPLY, 0))
        self._handlers = [
            self._handle(_REQUEST, self._on_request),
            self._handle(_REPLY, self._on_reply),
        ]

    def _send_params(self, flags: int) -> Any:
        return self._ffi.new("ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_FLAGS, "flags": flags})

    def _handle(self, number: int, handler: Callable[..., int]) -> Any:
        callback = self._ffi.callback("ucp_am_recv_callback_t", handler)
        params = self._ffi.new(
            "ucp_am_handler_param_t *", {"field_mask": 0b0111, "id": number, "flags": libucp.AM_WHOLE, "cb": callback}
        )
        self._worker.lib.check(
            self._call.ucp_worker_set_am_recv_handler(self._worker.handle, params), "setting a message handler"
        )
        return callback

    # -- exposed regions

    def expose(self, region: int, exposed: ExposedRange) -> None:
        self._exposed[region] = exposed

    def withdraw(self, region: int) -> None:
        """Withdraw a region: no request touches its memory any more."""
        self._exposed.pop(region, None)

    # -- requests

    def read(self, endpoint: Endpoint, region: int, offset: int, into: int, nbytes: int) -> ActiveRequest:
        ask = ActiveRequest(next(self._tokens), into, nbytes)
        return self._request(endpoint, ask, (READ, 0, 0), region, offset, (nbytes, 0))

    def write(
        self, endpoint: Endpoint, region: int, offset: int, source: int, nbytes: int, keep: object, sender: int = 0
    ) -> ActiveRequest:
        """Write from `source`, which must not change until the request is `sent`; `keep` is kept until then."""
        ask = ActiveRequest(next(self._tokens), source, nbytes)
        return self._request(endpoint, ask, (WRITE, 0, sender), region, offset, (nbytes, 0), source, keep)

    def update(
        self, endpoint: Endpoint, kind: int, region: int, offset: int, width: int, values: tuple[int, int]
    ) -> ActiveRequest:
        """ADD the first value to an integer of `width` bytes; or SWAP in the second if it equals the first."""
        return self._request(endpoint, ActiveRequest(next(self._tokens)), (kind, width, 0), region, offset, values)

    def note(self, endpoint: Endpoint, region: int, sender: int, word: int, value: int, after: int) -> ActiveRequest:
        """Send the owner a value, valid once `after` writes of this sender have taken effect."""
        return self._request(
            endpoint, ActiveRequest(next(self._tokens)), (NOTE, 0, sender), region, word, (value, after)
        )

    def _request(
        self,
        endpoint: Endpoint,
        ask: ActiveRequest,
        what: tuple[int, int, int],
        region: int,
        offset: int,
        values: tuple[int, int],
        source: int = 0,
        keep: object = None,
    ) -> ActiveRequest:
        kind, width, sender = what
        header = _HEADER.pack(kind, width, 0, sender, ask.token, region, offset, *values)
        self._asked[ask.token] = ask
        nbytes = ask.nbytes if kind == WRITE else 0
        self._send(endpoint, _REQUEST, header, source, nbytes, self._asking, ask, keep)
        return ask

    def forget(self, ask: ActiveRequest) -> None:
        """Forget a request: a late answer is discarded."""
        self._asked.pop(ask.token, None)

    # -- sending

    def _send(
        self,
        endpoint: Endpoint,
        number: int,
        header: bytes,
        source: int,
        nbytes: int,
        params: Any,
        ask: ActiveRequest | None,
        keep: object,
    ) -> None:
        self.sweep()
        request = int(self._call.ucp_am_send_nbx(endpoint, number, header, len(header), source, nbytes, params))
        if request > 0:
            self._sending.append((request, ask, keep))
        elif ask is not None:
            self._sent(ask, request)

    def sweep(self) -> None:
        """Release the memory of sent messages."""
        if not self._sending:
            return
        going = []
        for entry in self._sending:
            request, ask, _ = entry
            status = self._call.ucp_request_check_status(request)
            if status == libucp.IN_PROGRESS:
                going.append(entry)
                continue
            self._call.ucp_request_free(request)
            if ask is not None:
                self._sent(ask, status)
        self._sending = going

    def _sent(self, ask: ActiveRequest, status: int) -> None:
        ask.sent = True
        if status != libucp.OK and ask.status == WAITING:
            ask.status = BROKEN
            self.forget(ask)

    # -- handlers: they are called by UCX, and nothing may be raised there

    def _on_reply(self, _: Any, header: Any, length: int, data: Any, nbytes: int, param: Any) -> int:
        if length != _ANSWER.size or param.recv_attr & libucp.AM_IS_RENDEZVOUS:
            return libucp.OK
        token, value, status = _ANSWER.unpack(bytes(self._ffi.buffer(header, length)))
        ask = self._asked.pop(token, None)
        if ask is not None:
            if nbytes and status == DONE and nbytes == ask.nbytes:
                ctypes.memmove(ask.into, int(self._ffi.cast("uintptr_t", data)), nbytes)
            ask.value, ask.status = value, status
        return libucp.OK

    def _on_request(self, _: Any, header: Any, length: int, data: Any, nbytes: int, param: Any) -> int:
        if length != _HEADER.size or not param.recv_attr & libucp.AM_HAS_REPLY_ENDPOINT:
            return libucp.OK
        kind, width, _none, sender, token, region, offset, first, second = _HEADER.unpack(
            bytes(self._ffi.buffer(header, length))
        )
        exposed = self._exposed.get(region)
        status, value, payload = REFUSED, 0, b""
        if exposed is None or exposed.memory.moved:
            status = GONE
        elif param.recv_attr & libucp.AM_IS_RENDEZVOUS:
            pass
        elif kind == NOTE:
            status = DONE if exposed.noted(sender, offset, first, second) else REFUSED
        elif kind == READ and nbytes == 0 <= first <= exposed.memory.nbytes - offset:
            status, payload = DONE, ctypes.string_at(exposed.memory.address + offset, first) if first else b""
        elif kind == WRITE and exposed.writable and nbytes == first <= exposed.memory.nbytes - offset:
            ctypes.memmove(exposed.memory.address + offset, int(self._ffi.cast("uintptr_t", data)), nbytes)
            exposed.wrote(sender)
            status = DONE
        elif kind in (ADD, SWAP) and exposed.writable and width in (4, 8) and offset <= exposed.memory.nbytes - width:
            status, value = DONE, change(exposed.memory.address + offset, width, kind == ADD, first, second)
        answer = _ANSWER.pack(token, value, status)
        source = self._ffi.from_buffer(payload)
        at = int(self._ffi.cast("uintptr_t", source))
        self._send(param.reply_ep, _REPLY, answer, at, len(payload), self._answering, None, source)
        return libucp.OK
