"""Threads that watch the other holders: the processes of this host, and the beats of other hosts."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import Liveness, is_gone, is_stopped, this_host
from holdfast.store.catalog import transitions
from holdfast.store.catalog.client import CatalogClient, CellClient, open_beats
from holdfast.store.catalog.failure_domains import BeatCounter, HostBeats, with_beat
from holdfast.store.catalog.records import Catalog, Holder

RETRY_SECONDS, LONGER_PAUSE = 0.1, 1.0
_log = logging.getLogger("holdfast.store")


def keep_trying(turn: Callable[[], object], closing: threading.Event, what: str, pause: float = RETRY_SECONDS) -> None:
    """Call `turn` again and again until `closing`, with a pause after an error.

    Of `HoldfastError` and OSError the first in a row is logged, of others each, after which the pause is longer.
    """
    failing = False
    while not closing.is_set():
        try:
            turn()
            failing = False
        except (HoldfastError, OSError) as error:
            if not (failing or closing.is_set()):
                _log.warning("%s goes on trying: %s", what, error)
            failing = True
            closing.wait(pause)
        except Exception:
            _log.exception("%s goes on trying", what)
            closing.wait(max(pause, LONGER_PAUSE))


class DeathWatcher:
    """Calls `report` with processes that have ended, again until it does not raise a `HoldfastError`.

    The thread sleeps in the kernel until a process ends or `watch` is called.
    """

    def __init__(self, report: Callable[[frozenset[Peer]], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._wanted: frozenset[Peer] = frozenset()
        self._closing = threading.Event()
        self._wake = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._thread = threading.Thread(target=self._run, name="holdfast-store-deaths", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, peers: Iterable[Peer]) -> None:
        """Watch the processes of `peers` that are on this host, except this one, in place of those watched so far."""
        wanted = frozenset(peer for peer in peers if peer.host == this_host() and peer.pid != os.getpid())
        with self._lock:
            if wanted != self._wanted and not self._closing.is_set():
                self._wanted = wanted
                self._wake.wake()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._wake.wake()
        if self._thread.ident is None:
            self._wake.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            keep_trying(self._turn, self._closing, "the watch of the store's processes")
        finally:
            with self._lock:
                self._closing.set()
                self._wake.close()

    def _turn(self) -> None:
        """Report the processes that end, until others are watched."""
        wanted, reported = self._wanted, set[Peer]()
        peers = tuple(wanted)
        with contextlib.closing(Liveness(peers, -1)) as processes:
            while self._wanted is wanted and not self._closing.is_set():
                try:
                    ended = {peers[number] for number in processes.dead()} - reported
                except OSError:  # out of descriptors: a look at a process needs only one, for a moment
                    if gone := frozenset(filter(is_gone, peers)):
                        self._report(gone)
                    raise
                if ended:
                    self._report(frozenset(ended))
                    reported |= ended
                processes.wait(self._wake)
                if self._wake.ours:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)


BEAT_SECONDS = 1.0
"""Seconds between two beats of a host. One of its processes beats for all: one read and one write of a cell each."""


class HostWatcher:
    """Beats while holders are on several hosts. `holder` is the store of this process.

    The first holder of a host beats, in the catalogue's order, that has not ended and is not stopped.
    """

    def __init__(self, client: CatalogClient, holder: Holder) -> None:
        self._catalog_client, self._holder = client, holder
        self._beats: CellClient[HostBeats] | None = None
        self._counter = BeatCounter()
        self._lock = threading.Lock()
        self._catalog = Catalog()
        self._several = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-store-hosts", daemon=True)

    def follow(self, catalog: Catalog) -> None:
        """Watch the hosts of the catalogue's holders from now on. The thread begins once there are several."""
        with self._lock:
            self._catalog = catalog
            if self._closing.is_set():
                return
            if len(_hosts(catalog)) > 1 or catalog.away:
                self._several.set()
                if self._thread.ident is None:
                    self._thread.start()
            else:
                self._several.clear()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._closing.set()
            self._several.set()
            if self._beats is not None:
                self._beats.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        keep_trying(self._turn, self._closing, "the beat of this host in the store's register", BEAT_SECONDS)

    def _turn(self) -> None:
        self._several.wait()
        self._beat()
        self._closing.wait(BEAT_SECONDS)

    def _beat(self) -> None:
        with self._lock:
            catalog = self._catalog
            if self._closing.is_set() or not _beats_for_host(catalog, self._holder):
                return
            client = self._beats = self._beats or open_beats(self._catalog_client.url, self._catalog_client.name)
        me, hosts = self._holder.peer.host, _hosts(catalog)
        _, beats = client.change(lambda now: with_beat(now, me, {*hosts, *catalog.away}))
        away = self._counter.turn(beats, hosts - {me, *catalog.away})
        if me in catalog.away:
            self._catalog_client.change(lambda now: transitions.host_back(now, me))
        if away:
            _, after = self._catalog_client.change(lambda now: transitions.hosts_away(now, away))
            _log.warning(
                "no beat of host %s in %d turns: it is away, and replicas are spread over %d hosts",
                ", ".join(sorted(away)),
                *(len(_hosts(after)), len(after.hosts())),
            )


def _hosts(catalog: Catalog) -> frozenset[str]:
    """The hosts of all holders that are not leaving: these beat."""
    return frozenset(holder.peer.host for holder in catalog.holders if not holder.leaving)


def _beats_for_host(catalog: Catalog, me: Holder) -> bool:
    """Whether this store is the one that beats for its host."""
    for holder in catalog.holders:
        if holder.id == me.id:
            return True
        if holder.peer.host != me.peer.host or holder.leaving:
            continue
        if holder.pid == os.getpid() or not (is_gone(holder.peer) or is_stopped(holder.pid)):
            return False
    return False
