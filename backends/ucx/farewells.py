"""Notices: short messages from each rank to all, beside the tagged messages of ops.

A rank sends hello once it has a link to a peer, met once it has received the hello that came over a new link, and
farewell when it leaves or aborts. Messages from one rank arrive in order, so a farewell follows everything that its
rank sent before.

A tag is: the notice bit, the sender's rank in 17 bits, the epoch in 9, the dtype in 6, and 31 bits of the user's or an
op's tag. Successive epochs may use the same connections; the epoch bits keep their messages apart. A receiver does not
match the dtype, but checks it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.worker import UcxWorker
from holdfast.comms.errors import UNDECODABLE, CorruptData
from holdfast.comms.tensors.packing import DTYPE_CODE, DTYPES
from holdfast.comms.transport.base import Link

_NOTICE = 1 << 63
_RANK_SHIFT, _EPOCH_SHIFT, _DTYPE_SHIFT = 46, 37, 31
_EPOCHS = 1 << _RANK_SHIFT - _EPOCH_SHIFT
_DTYPES = (1 << _EPOCH_SHIFT) - (1 << _DTYPE_SHIFT)
_OP_MASK = (1 << _DTYPE_SHIFT) - 1
_NOTE_BYTES = 1024
WORDS = 200
"""The most characters of an error in a hello. The advice what to do comes last in it."""
_SEND_SECONDS = 0.02
_UNKNOWN = -1
"""The request of a receive that has begun, or not: its call was cut short."""


class WorkerHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a rank.

    `name` is that of its worker. It carries the `Context.connect_payload`, and the cost of a message (`link`; that of
    rank 0 counts), or the error that prevents this. `since`: the epoch from which it has its link to the receiver; -1
    for a new one.
    """

    since: int
    worker: bytes
    connect_payload: tuple[int, ...]
    link: Link
    broken: str


class HelloReceived(msgspec.Struct, frozen=True, tag="met"):
    """The second message over a new link, from the lower of the two ranks. `worker`: the name of its worker."""

    worker: bytes


class WorkerFarewell(msgspec.Struct, frozen=True, tag="farewell"):
    """The last message of a rank. `aborted`: it ends the communicator for all; else it has closed it."""

    aborted: bool
    why: str


Notice = WorkerHello | HelloReceived | WorkerFarewell


class Tags:
    """The tags of an epoch."""

    mask = _EPOCHS - 1 << _EPOCH_SHIFT
    """The mask of an epoch's messages of any kind: their tags equal `any` in these bits."""
    any_dtype = (1 << 64) - 1 - _DTYPES
    """All bits of a tag but the dtype."""

    def __init__(self, epoch: int) -> None:
        self.any = epoch % _EPOCHS << _EPOCH_SHIFT
        self.notice = _NOTICE | self.any

    def of(self, rank: int, tag: int, dtype: torch.dtype) -> int:
        """The tag of a message of an op, or of the user's, from `rank`."""
        return self.any | rank << _RANK_SHIFT | DTYPE_CODE[dtype] << _DTYPE_SHIFT | tag & _OP_MASK

    @staticmethod
    def dtype(tag: int) -> torch.dtype | None:
        """The dtype that the sender sent; None if this torch does not have it."""
        code = (tag & _DTYPES) >> _DTYPE_SHIFT
        return DTYPES[code] if code < len(DTYPES) else None

    def note(self, rank: int) -> int:
        """The tag of a notice from `rank`."""
        return self.notice | rank << _RANK_SHIFT


def _rank_of(tag: int) -> int:
    return (tag & ~_NOTICE) >> _RANK_SHIFT


class Notices:
    """Sends the notices of this rank and receives those of the others.

    `hellos`, `mets` and `left` are by rank; the last also has when a farewell came. A malformed notice is kept as an
    error, which `check` raises: this rank continues to receive, and can still send its farewell.
    """

    def __init__(self, worker: UcxWorker, rank: int, tags: Tags) -> None:
        self._worker, self._tag, self._tags = worker, tags.note(rank), tags
        self._call, ffi = worker.lib.call, worker.lib.ffi
        self._buffer = ffi.new("char[]", _NOTE_BYTES)
        self._address = int(ffi.cast("uintptr_t", self._buffer))
        self._ffi = ffi
        self._info = ffi.new("ucp_tag_recv_info_t *")
        self._param = ffi.new("ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_RECV_INFO, "tag_info": self._info})
        self._said = False
        self._request = 0
        self.hellos: dict[int, WorkerHello] = {}
        self.mets: dict[int, HelloReceived] = {}
        self.left: dict[int, tuple[WorkerFarewell, float]] = {}
        self._corrupt: CorruptData | None = None
        self._listen()

    def _listen(self) -> None:
        """Post a receive for the next notice; handle those that have arrived."""
        call, handle, tags = self._call, self._worker.handle, self._tags
        while True:
            self._request = _UNKNOWN
            self._request = call.ucp_tag_recv_nbx(
                handle, self._address, _NOTE_BYTES, tags.notice, _NOTICE | tags.mask, self._param
            )
            self._worker.lib.check(self._request, "listening to peers")
            if self._request:
                return
            self._note()

    def poll(self) -> None:
        """Handle the notices that have arrived."""
        request = self._request
        if request > 0:
            status = self._call.ucp_tag_recv_request_test(request, self._info)
            if status != libucp.IN_PROGRESS and self._request == request:  # else a signal's handler has polled
                self._request = 0
                self._call.ucp_request_free(request)
                if status == libucp.OK:
                    self._note()
                self._listen()

    def check(self) -> None:
        """Raise `CorruptData` if a malformed notice has arrived."""
        if self._corrupt is not None:
            raise self._corrupt.again()

    def _note(self) -> None:
        rank = int(_rank_of(self._info.sender_tag))
        try:
            notice = parse(bytes(self._ffi.buffer(self._buffer, self._info.length)))
        except CorruptData as error:
            self._corrupt = self._corrupt or error.with_traceback(None)
            return
        if isinstance(notice, WorkerHello):
            self.hellos[rank] = notice
        elif isinstance(notice, HelloReceived):
            self.mets[rank] = notice
        else:
            self.left[rank] = (notice, time.monotonic())

    def send_hello(self, endpoint: Any, hello: WorkerHello) -> None:
        """Send a hello to one peer."""
        kept = self._ffi.from_buffer(msgspec.msgpack.encode(hello))
        request = self._send(endpoint, kept)
        if request > 0:
            self._worker.give_up(request, kept)

    def send_met(self, endpoint: Any, met: HelloReceived) -> int:
        """Confirm the hello of one peer; returns the request, which ends once the peer has received it.

        UCX acknowledges only over a connection that stands in both directions, so this establishes it. Call it only
        after the peer's hello: UCX (1.22) ends a process when a peer that it has no endpoint to asks it to connect and
        the memory of that peer is already gone.
        """
        return self._send(endpoint, self._ffi.from_buffer(msgspec.msgpack.encode(met)), synchronous=True)

    def send_farewell(self, endpoints: Iterable[Any], aborted: bool, why: str) -> None:
        """Tell every peer that this rank leaves, and why; only the first call does. Returns within milliseconds."""
        if self._said:
            return
        self._said = True
        why = why.encode()[: _NOTE_BYTES - 64].decode(errors="ignore")
        text = msgspec.msgpack.encode(WorkerFarewell(aborted, why))
        sent = [(kept, self._send(endpoint, kept)) for endpoint in endpoints for kept in [self._ffi.from_buffer(text)]]
        self._worker.progress()
        for kept, request in sent:
            if self._worker.finish(request, _SEND_SECONDS / len(sent)):
                self._worker.release(kept)

    def _send(self, endpoint: Any, kept: Any, synchronous: bool = False) -> int:
        """Send `kept`, which the worker keeps unless the message has left; returns the request."""
        send = self._call.ucp_tag_send_sync_nbx if synchronous else self._call.ucp_tag_send_nbx
        address = int(self._ffi.cast("uintptr_t", kept))
        self._worker.keep(kept)
        request = int(send(endpoint, address, len(kept), self._tag, self._worker.plain))
        if request <= 0:
            self._worker.release(kept)
        return request

    def close(self) -> None:
        """Stop receiving notices."""
        if self._request:
            self._worker.keep(self._buffer)
            request, self._request = self._request, 0
            if request > 0:
                self._call.ucp_request_cancel(self._worker.handle, request)
                if self._worker.finish(request, _SEND_SECONDS):
                    self._worker.release(self._buffer)


def parse(text: bytes) -> Notice:
    """Parse a notice. Raises `CorruptData`."""
    try:
        notice: Notice = msgspec.msgpack.decode(text, type=Notice)
    except UNDECODABLE as error:
        raise CorruptData(f"a peer sent a notice over ucx that is neither hello nor farewell: {error}") from error
    return notice
