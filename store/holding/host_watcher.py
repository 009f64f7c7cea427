"""A thread that beats for this host in the register, and marks other hosts with ended beats as away."""

from __future__ import annotations

import logging
import os
import threading

from holdfast.comms.transport.liveness import is_gone, is_stopped
from holdfast.store.catalog import transitions
from holdfast.store.catalog.client import BeatsClient, CatalogClient
from holdfast.store.catalog.failure_domains import BeatCounter, with_beat
from holdfast.store.catalog.records import Catalog, Holder
from holdfast.store.holding.keep_trying import keep_trying

BEAT_SECONDS = 1.0
"""Seconds between two beats of a host. One of its processes beats for all: one read and one write of a cell each."""
_log = logging.getLogger("holdfast.store")


class HostWatcher:
    """Beats while holders are on several hosts. `holder` is the store of this process.

    The first holder of a host beats, in the catalogue's order, that has not ended and is not stopped.
    """

    def __init__(self, client: CatalogClient, holder: Holder) -> None:
        self._catalog_client, self._holder = client, holder
        self._beats: BeatsClient | None = None
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
        keep_trying(
            self._turn, self._closing, "the beat of this host in the store's register", BEAT_SECONDS, BEAT_SECONDS
        )

    def _turn(self) -> None:
        self._several.wait()
        self._beat()
        self._closing.wait(BEAT_SECONDS)

    def _beat(self) -> None:
        client = self._opened()
        with self._lock:
            catalog = self._catalog
        if client is None or not _beats_for_host(catalog, self._holder):
            return
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

    def _opened(self) -> BeatsClient | None:
        """The client of the beats, opened on first use; None once this is closing."""
        with self._lock:
            if self._beats is None and not self._closing.is_set():
                self._beats = BeatsClient(self._catalog_client.url, self._catalog_client.name)
            return self._beats


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
