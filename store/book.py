"""The catalogue in its register cell: reads, compare-and-set changes, waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, this_host
from holdfast.ft.registers import RegisterAway, open_cell
from holdfast.store import transitions
from holdfast.store.catalog import Catalog

CELL = "store"
CHANGE_SECONDS = 30.0
"""Seconds for which a change is retried against concurrent changes; one try takes microseconds."""


class Book:
    """The catalogue at a register URL. Safe to use from several threads.

    Every method raises `RegisterAway` while the register cannot be reached, and `CorruptData` if its cell holds no
    catalogue. A change that raises `RegisterAway` may have been made; transitions may be applied again.
    `changed(before, after)` is called for each change that is known to have been made.
    """

    def __init__(self, url: str, changed: Callable[[Catalog, Catalog], None]) -> None:
        self.url, self._changed = url, changed
        self._cell = open_cell(url, CELL)
        self._lock = threading.Lock()
        self._newest: tuple[int, Catalog] = (0, Catalog())

    def read(self) -> tuple[int, Catalog]:
        """The newest catalogue, and its version in the register."""
        return self._note(*self._cell.read())

    def newest(self) -> tuple[int, Catalog]:
        """The newest catalogue seen so far, without a read of the register."""
        with self._lock:
            return self._newest

    def change(self, transition: Callable[[Catalog], Catalog]) -> tuple[int, Catalog]:
        """Apply a transition; returns the version and the catalogue after it. An error of the transition changes
        nothing.
        """
        deadline = time.monotonic() + CHANGE_SECONDS
        while time.monotonic() < deadline:
            version, before = self.read()
            after = transition(before)
            if after == before:
                return version, before
            if self._cell.compare_and_set(version, after.encode()):
                self._changed(before, after)
                return version + 1, after
        raise RegisterAway(self.url, f"no change got through in {CHANGE_SECONDS:g} s against those of others")

    def wait(self, newer_than: int, timeout: float) -> tuple[int, Catalog] | None:
        """The newest catalogue once it is newer than `newer_than`; None after `timeout` seconds."""
        found = self._cell.wait(newer_than, max(0.0, timeout))
        return self._note(*found) if found else None

    def bury_dead(self) -> tuple[int, Catalog]:
        """Remove the dead processes of this host from the catalogue."""
        version, catalog = self.read()
        dead = gone(catalog.peers())
        return self.change(lambda now: transitions.bury(now, dead)) if dead else (version, catalog)

    def close(self) -> None:
        """Close the register. Idempotent."""
        self._cell.close()

    def _note(self, version: int, value: bytes) -> tuple[int, Catalog]:
        with self._lock:
            if self._newest[0] == version:
                return self._newest
        decoded = version, Catalog.decode(value) if version else Catalog()
        with self._lock:
            if decoded[0] > self._newest[0]:
                self._newest = decoded
        return decoded


def gone(peers: Iterable[Peer]) -> frozenset[Peer]:
    """The processes of `peers` that are on this host and have ended."""
    return frozenset(peer for peer in peers if peer.host == this_host() and is_gone(peer))
