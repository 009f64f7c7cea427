"""A worker and its connections to other processes, used by the communicators of successive epochs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.farewells import Tags
from holdfast.backends.ucx.worker import Endpoint, Transports, UcxWorker
from holdfast.comms.errors import HoldfastError
from holdfast.comms.transport.base import Peer

_EPOCHS = 8
"""The number of past epochs. Their late messages are removed from the queue."""
_SENT_BYTES = 1 << 24
"""The most memory of unfinished sends with which a worker is kept for the next epoch."""
_DEAD = 64
"""The number of dead endpoints at which a worker is given up."""


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A connection to another process. `key`: this worker's number for it; `worker`: the name of the other worker."""

    key: int
    endpoint: Endpoint
    worker: bytes


def name_of(address: bytes) -> bytes:
    """A short name for the worker with this address."""
    return hashlib.blake2b(address, digest_size=8).digest()


class Connections:
    """Used by one communicator at a time, under its lock. `broken`: key -> reason, for links that failed."""

    def __init__(self, over: Transports) -> None:
        self.broken: dict[int, str] = {}
        self.links: dict[Peer, PeerLink] = {}
        self._keys = itertools.count()
        self._tags: deque[Tags] = deque(maxlen=_EPOCHS)
        self._sent: list[tuple[int, torch.Tensor]] = []
        self._dead = 0
        self.worker = UcxWorker(libucp.FEATURE_TAG, over, self._broke)
        self.name = name_of(self.worker.address)
        self._info = self.worker.lib.ffi.new("ucp_tag_recv_info_t *")

    def _broke(self, key: int, why: str) -> None:
        self.broken.setdefault(key, why)

    def link(self, address: bytes) -> PeerLink:
        """Connect to the worker at `address`. Raises `UcxError`."""
        key = next(self._keys)
        return PeerLink(key, self.worker.connect(address, key), name_of(address))

    def drop(self, link: PeerLink) -> None:
        """Drop a link. If UCX would not report the link's failure, the link is destroyed with the worker."""
        if self.worker.reports_failures:
            self.worker.disconnect(link.endpoint)
        else:
            self._dead += 1

    def keep(self, links: Mapping[Peer, PeerLink], lost: Collection[PeerLink]) -> bool:
        """Keep `links` for the next epoch, drop the `lost`.

        False if dead endpoints or unfinished sends have become too many.
        """
        self.links = {peer: link for peer, link in links.items() if link.key not in self.broken}
        for link in [*lost, *(link for link in links.values() if link.key in self.broken)]:
            self.drop(link)
        self.worker.take_ended(self._sent)
        return sum(tensor.nbytes for _, tensor in self._sent) <= _SENT_BYTES and self._dead <= _DEAD

    def abandon_send(self, request: int, tensor: torch.Tensor) -> None:
        """Abandon an unfinished send; keep `tensor` alive while UCX may read it."""
        self._sent.append((request, tensor))

    # -- messages of earlier epochs

    def begin(self, tags: Tags) -> None:
        """Begin an epoch: messages with these tags belong to it."""
        self._tags.append(tags)

    def sweep(self, now: bool = False) -> None:
        """Remove messages of earlier epochs from the queue (`now`: of this one too)."""
        call, handle = self.worker.lib.call, self.worker.handle
        for tags in list(self._tags) if now else list(self._tags)[:-1]:
            while message := call.ucp_tag_probe_nb(handle, tags.any, tags.mask, 1, self._info):
                request = call.ucp_tag_msg_recv_nbx(handle, 0, 0, message, self.worker.plain)
                if request > 0:
                    call.ucp_request_free(request)

    def settle(self, requests: Collection[int], seconds: float) -> bool:
        """Progress until all `requests` are done, for at most `seconds`."""
        check, limit = self.worker.lib.call.ucp_request_check_status, time.monotonic() + seconds

        def done() -> bool:
            return all(check(request) != libucp.IN_PROGRESS for request in requests)

        while not done():
            self.sweep(now=True)
            if time.monotonic() > limit:
                self.worker.drain()
                return done()
            self.worker.progress()
        return True

    def close(self) -> None:
        """Release the worker and all links. Idempotent."""
        self.links = {}
        if self.worker.handle:
            while self._sent and not self.worker.lost_descriptors:
                self.worker.give_up(*self._sent.pop())
            self.worker.close()


def warm_up() -> None:
    """Make a worker and drop it: UCX loads its transports for the first one, which takes four times as long."""
    with contextlib.suppress(HoldfastError):  # connecting reports an error that still holds
        UcxWorker(libucp.FEATURE_TAG, Transports.choose(one_host=True), lambda key, why: None).close()
