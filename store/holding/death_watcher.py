"""A thread that waits for processes of this host to end, and reports them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, open_pidfd, this_host

RETRY_SECONDS = 0.1
_IDLE_SECONDS = 0.5
"""The longest time between two checks that the pidfds are still ours."""
_log = logging.getLogger("holdfast.store")


class DeathWatcher:
    """Calls `report` with processes that have ended, again until it does not raise a `HoldfastError`.

    The thread sleeps in the kernel until a process ends or `watch` is called.
    """

    def __init__(self, report: Callable[[frozenset[Peer]], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._wanted: frozenset[Peer] = frozenset()
        self._closing = False
        self._wake = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._thread = threading.Thread(target=self._run, name="holdfast-store-deaths", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, peers: Iterable[Peer]) -> None:
        """Watch the processes of `peers` that are on this host, except this one, in place of those watched so far."""
        wanted = frozenset(peer for peer in peers if peer.host == this_host() and peer.pid != os.getpid())
        with self._lock:
            if wanted != self._wanted and not self._closing:
                self._wanted = wanted
                self._wake.wake()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._wake.wake()
        if self._thread.ident is None:
            self._wake.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        watched: dict[OwnedDescriptor, Peer] = {}
        looked_at: set[Peer] = set()
        unreported: set[Peer] = set()
        try:
            while True:
                poll.poll(1000 * (RETRY_SECONDS if unreported or looked_at else _IDLE_SECONDS))
                if self._wake.ours:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    time.sleep(RETRY_SECONDS)  # closed by others: poll would return at once, or never
                unreported |= self._take_ended(watched, looked_at, poll)
                with self._lock:
                    if self._closing:
                        return
                    wanted = self._wanted
                looked_at &= wanted
                ended = {peer for peer in looked_at if is_gone(peer)}
                looked_at -= ended
                unreported |= ended | self._adjust(wanted - looked_at, watched, looked_at, poll)
                if unreported:
                    self._tell(unreported)
        finally:
            with self._lock:
                self._closing = True
            for descriptor in (*watched, self._wake):  # no other thread polls them now
                descriptor.close()

    def _take_ended(self, watched: dict[OwnedDescriptor, Peer], looked_at: set[Peer], poll: select.poll) -> set[Peer]:
        """The watched processes that have ended. One whose pidfd was closed by others is looked at from now on."""
        ended = set()
        ready = {descriptor for descriptor, mask in poll.poll(0) if mask & select.POLLIN}
        for descriptor in list(watched):
            if not descriptor.ours:
                looked_at.add(self._forget(descriptor, watched, poll))
            elif descriptor in ready:
                ended.add(self._forget(descriptor, watched, poll))
        return ended

    def _adjust(
        self, wanted: frozenset[Peer], watched: dict[OwnedDescriptor, Peer], looked_at: set[Peer], poll: select.poll
    ) -> set[Peer]:
        """Watch the `wanted` processes by pidfd, else add them to `looked_at`; returns those that have ended."""
        for descriptor in [descriptor for descriptor, peer in watched.items() if peer not in wanted]:
            self._forget(descriptor, watched, poll)
        ended = set()
        for peer in wanted.difference(watched.values()):
            try:
                pidfd = open_pidfd(peer)
            except OSError as error:  # not allowed, or out of descriptors
                _log.debug("process %d is looked at from time to time: %s", peer.pid, error)
                looked_at.add(peer)
                continue
            if pidfd is None:
                ended.add(peer)
            else:
                watched[OwnedDescriptor(pidfd)] = peer
                poll.register(pidfd, select.POLLIN)
        return ended

    def _forget(self, descriptor: OwnedDescriptor, watched: dict[OwnedDescriptor, Peer], poll: select.poll) -> Peer:
        poll.unregister(descriptor)
        descriptor.close()
        return watched.pop(descriptor)

    def _tell(self, unreported: set[Peer]) -> None:
        try:
            self._report(frozenset(unreported))
        except HoldfastError as error:
            _log.warning("cannot report the end of %d processes yet: %s", len(unreported), error)
        else:
            unreported.clear()
