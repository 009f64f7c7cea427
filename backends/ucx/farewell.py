"""How ranks learn that one of them has left or aborted: a last message from each to all, beside the tagged messages.

Messages from one rank arrive in order, so a farewell comes after everything that its rank sent before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.worker import Worker

CLOSED, ABORTED = 0, 1
FAREWELL_TAG = 1 << 63
RANK_SHIFT = 40
"""A tag is: the farewell bit, the sender's rank in 23 bits, and 40 bits of the user's or an op's."""
_NOTE_BYTES = 1024
_SEND_SECONDS = 0.02


class Farewells:
    """Sends this rank's, once; receives the others' into `left`: rank -> (CLOSED or ABORTED, why, when)."""

    def __init__(self, worker: Worker, rank: int) -> None:
        self._worker, self._rank = worker, rank
        self._call, ffi = worker.lib.call, worker.lib.ffi
        self._buffer = ffi.new("char[]", _NOTE_BYTES)
        self._address = int(ffi.cast("uintptr_t", self._buffer))
        self._ffi = ffi
        self._info = ffi.new("ucp_tag_recv_info_t *")
        self._param = ffi.new("ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_RECV_INFO, "tag_info": self._info})
        self._said = False
        self._request = 0
        self.left: dict[int, tuple[int, str, float]] = {}
        self._listen()

    def _listen(self) -> None:
        """Wait for the next; take those that are there already."""
        call, handle = self._call, self._worker.handle
        while True:
            self._request = call.ucp_tag_recv_nbx(
                handle, self._address, _NOTE_BYTES, FAREWELL_TAG, FAREWELL_TAG, self._param
            )
            self._worker.lib.check(self._request, "listening to peers")
            if self._request:
                return
            self._note()

    def look(self) -> None:
        """Take what has come."""
        if self._request:
            status = self._call.ucp_tag_recv_request_test(self._request, self._info)
            if status != libucp.IN_PROGRESS:
                self._call.ucp_request_free(self._request)
                self._request = 0
                if status == libucp.OK:
                    self._note()
                self._listen()

    def _note(self) -> None:
        rank = (self._info.sender_tag & ~FAREWELL_TAG) >> RANK_SHIFT
        text = bytes(self._ffi.buffer(self._buffer, self._info.length))
        self.left[int(rank)] = (text[0], text[1:].decode(errors="replace"), time.monotonic())

    def say(self, endpoints: Sequence[Any], kind: int, why: str) -> None:
        """Tell every peer that this rank leaves, and why; only the first time. Returns within milliseconds."""
        if self._said:
            return
        self._said = True
        text = bytes([kind]) + why.encode()[: _NOTE_BYTES - 64]
        kept = self._ffi.from_buffer(text)
        address = int(self._ffi.cast("uintptr_t", kept))
        tag = FAREWELL_TAG | self._rank << RANK_SHIFT
        requests = [
            self._call.ucp_tag_send_nbx(endpoint, address, len(text), tag, self._worker.plain) for endpoint in endpoints
        ]
        self._worker.progress()
        for request in requests:
            self._worker.finish(request, _SEND_SECONDS / len(requests))

    def close(self) -> None:
        """Stop listening."""
        if self._request > 0:
            self._call.ucp_request_cancel(self._worker.handle, self._request)
            self._worker.finish(self._request, _SEND_SECONDS)
            self._request = 0
