"""A rank's worker for one-sided access, beside that for messages, connected to all other ranks.

It is separate so that a window's ops do not wait while another thread is inside a collective, nor the reverse. Where
the target has to help (TCP), its progress thread does: it may compute or sleep, but not be stopped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.progress import ProgressThread
from holdfast.backends.ucx.worker import Endpoint, Transports, UcxWorker, explain
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone
from holdfast.comms.onesided.peer_watch import PeerWatch, gone
from holdfast.comms.system.cpu_wait import Wait
from holdfast.comms.transport.base import Transport

FEATURES = libucp.FEATURE_RMA | libucp.FEATURE_AMO32 | libucp.FEATURE_AMO64
_CARD_BYTES = 4096
_TURNS = 64
"""Progress calls between two checks of clock and peers, with the lock held."""
_YIELDS, _CROWDED_YIELDS = 220, 200
"""The number of such rounds before a wait begins to sleep; it yields after each."""
_SLEEP_SECONDS = 0.0001


class OneSidedWorker:
    """The one-sided side of a communicator's rank."""

    def __init__(self, transport: Transport, over: Transports, watch: PeerWatch, deadline: float) -> None:
        self.rank, self.size, self._watch = transport.rank, transport.size, watch
        self.lock = threading.RLock()
        self._kept: list[Callable[[bool], bool]] = []
        self._crowded = transport.size > len(os.sched_getaffinity(0))
        self._wait = Wait(yields=_CROWDED_YIELDS if self._crowded else _YIELDS, sleep_seconds=_SLEEP_SECONDS)
        self._progress: ProgressThread | None = None
        self.broken: set[int] = set()
        self.endpoints: list[Endpoint] = []
        self.worker = self._make_worker(over)
        try:
            self._connect(transport, deadline)
        except BaseException:
            self.close()
            raise

    def _make_worker(self, over: Transports) -> UcxWorker:
        return UcxWorker(FEATURES, over)

    def _connect(self, transport: Transport, deadline: float) -> None:
        """Wait until every rank is connected to every other, and progresses where it has to."""
        addresses = exchange(transport, self.worker.address, deadline)
        for rank, address in enumerate(addresses):
            try:
                self.endpoints.append(self.worker.connect(address, rank))
            except libucp.UcxError as error:
                raise explain(error, rank, self.worker.over) from error
        self._progress = ProgressThread(self.worker, self.lock, eager=not self._crowded)
        for rank in range(self.size):
            self.flush(rank, deadline, "window")
        transport.barrier(deadline)

    # -- liveness

    def check(self, rank: int, now: bool = False) -> None:
        """Raise if the communicator has ended, or `rank`'s process (as of a millisecond ago at most, or now)."""
        if now:
            self._watch.look()
        self._watch.check(rank)
        if rank in self.broken:
            raise gone(rank)

    def find_dead(self) -> frozenset[int]:
        """The dead ranks, as of now. Raises if the communicator has ended."""
        return self._watch.look() | self.broken

    # -- requests

    def start(self, request: int, rank: int, op: str) -> int:
        """Return `request`, the result of an `_nbx` call; raises if it is an error."""
        if libucp.ERR_LAST <= request < 0:
            self._explain(request, rank, op)
        return request

    def wait(self, request: int, rank: int, deadline: float, op: str, keep: object = None) -> None:
        """Wait for `request`, which was made with the lock held.

        Raises `RegionGone` if it failed or `rank` is gone, `OpTimeout`: it may still be carried out then, and `keep` is
        kept for it.
        """
        if not request:
            return
        call, handle = self.worker.lib.call, self.worker.handle
        self.start(request, rank, op)
        with self.lock:
            call.ucp_worker_progress(handle)
            if call.ucp_request_check_status(request) == libucp.OK:
                call.ucp_request_free(request)
                return
        try:
            self.until(lambda: call.ucp_request_check_status(request) != libucp.IN_PROGRESS, rank, deadline, op)
        except HoldfastError:
            with self.lock:
                self.worker.give_up(request, keep)
            raise
        with self.lock:
            status = call.ucp_request_check_status(request)
            call.ucp_request_free(request)
        if status != libucp.OK:
            self._explain(status, rank, op)

    def until(self, done: Callable[[], bool], rank: int, deadline: float, op: str) -> None:
        """Progress until `done()`, called with the lock held. Raises `RegionGone` if `rank` is gone, `OpTimeout`."""
        progress, handle = self.worker.lib.call.ucp_worker_progress, self.worker.handle

        def progressed() -> bool:
            with self.lock:
                for _ in range(_TURNS):
                    if done():
                        return True
                    progress(handle)
            return False

        self._wait.until(
            progressed, lambda: self.check(rank), deadline, lambda seconds: OpTimeout(op, 0, seconds, (rank,))
        )

    def flush(self, rank: int, deadline: float, op: str) -> None:
        """Wait until all that was issued to `rank` has taken effect there."""
        with self.lock:
            request = self.worker.lib.call.ucp_ep_flush_nbx(self.endpoints[rank], self.worker.plain)
        self.wait(request, rank, deadline, op)

    def _explain(self, status: int, rank: int, op: str) -> None:
        self.check(rank, now=True)
        raise RegionGone(f"{op}: the memory of rank {rank} cannot be reached: {self.worker.lib.text(status)}")

    # -- keys

    def unpack(self, rank: int, key: bytes) -> Any:
        """The key to a registered memory of `rank`."""
        lib, ffi = self.worker.lib, self.worker.lib.ffi
        made = ffi.new("ucp_rkey_h *")
        lib.check(lib.call.ucp_ep_rkey_unpack(self.endpoints[rank], ffi.from_buffer(key), made), "unpacking a key")
        return made[0]

    # -- the end

    def keep(self, release: Callable[[bool], bool]) -> None:
        """Call `release(False)` repeatedly until it returns true; `release(True)` when nothing arrives any more."""
        self._kept.append(release)

    def sweep(self) -> None:
        self._kept = [release for release in self._kept if not release(False)]

    def _release(self) -> None:
        for release in self._kept:
            release(True)
        self._kept.clear()

    def close(self) -> None:
        """Release everything; requests under way end here. All windows are closed before."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        self.worker.close(self._release)


def exchange(transport: Transport, card: bytes, deadline: float) -> list[bytes]:
    """Gather the `card` of every rank, in rank order; collective."""
    if len(card) > _CARD_BYTES - 4:
        raise HoldfastError(f"a card of {len(card)} bytes is too long")
    padded = bytearray((len(card).to_bytes(4, "little") + card).ljust(_CARD_BYTES, b"\0"))
    cards = [torch.zeros(_CARD_BYTES, dtype=torch.uint8, device="cpu") for _ in range(transport.size)]
    transport.all_gather(cards, torch.frombuffer(padded, dtype=torch.uint8), deadline)
    texts = [bytes(each.numpy()) for each in cards]
    return [text[4 : 4 + int.from_bytes(text[:4], "little")] for text in texts]
