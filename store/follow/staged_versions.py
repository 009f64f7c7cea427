"""The versions that a follower has staged: which tensors hold them, which are served, and which may be overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.comms.errors import Mismatch
from holdfast.store.catalog.fleet_targets import Digests, digests_of
from holdfast.store.catalog.records import Catalog
from holdfast.store.follow.staging import StagingState

SETS = 3
"""The most sets of tensors: for the version that is served, the one before it, and the next one."""


@dataclass(frozen=True, slots=True)
class Return:
    """A reader went back from version `left` to `to`; it takes no version after that up to `newest`."""

    left: int
    to: int
    newest: int

    def refuses(self, version: int) -> bool:
        return version == self.left or self.to < version <= self.newest


class StagedVersions:
    """Sets of staging tensors. Safe to use from the thread that serves and from the background at once.

    `changed` is notified when a version becomes ready or is served. Sets are made by `make` when they are first needed,
    then used again; with `keeps_before` one keeps the version that was served before.
    """

    def __init__(self, make: Callable[[], StagingState], keeps_before: bool = True) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.served: StagingState | None = None
        self.before: int | None = None
        self.returning: int | None = None
        self._make, self._keeps_before = make, keeps_before
        self._sets: list[StagingState] = []
        self._taken: StagingState | None = None
        self._previous: StagingState | None = None
        self._return: Return | None = None

    # -- for the thread that serves

    def find(self, version: int, digests: Digests) -> StagingState | None:
        """The tensors with the bytes of a version."""
        with self.changed:
            return next((each for each in self._sets if each.holds(version, digests)), None)

    def take(self, version: int, digests: Digests) -> StagingState | None:
        """As `find`; the tensors stay as they are until `swapped` or `put_back`."""
        with self.changed:
            self._taken = self.find(version, digests)
            return self._taken

    def find_newest(self, catalog: Catalog) -> StagingState | None:
        """The newest version that is ready, if it was the latest after the one that is served was."""
        latest = catalog.latest
        with self.changed:
            if latest is None or self.refuses(latest):
                return None
            if self.served and self.served.holds(latest, digests_of(catalog, latest)):
                return None
            since = -1 if self.served is None else self.served.seen
            found = [
                each
                for each in self._sets
                if each.version is not None
                and each.holds(each.version, digests_of(catalog, each.version))
                and (each.version == latest or (each.version < latest and each.seen > since))
                and not self.refuses(each.version)
            ]
            return max(found, key=lambda each: (each.version == latest, each.seen), default=None)

    def take_newest(self, catalog: Catalog) -> StagingState | None:
        """As `find_newest`; the tensors stay as they are until `swapped` or `put_back`."""
        with self.changed:
            self._taken = self.find_newest(catalog)
            return self._taken

    def put_back(self) -> None:
        """Give up what was taken; the served version stays."""
        with self.changed:
            self._taken = None

    def swapped(self) -> None:
        """What was taken is served from now on."""
        with self.changed:
            taken, self._taken, self.returning = self._taken, None, None
            if taken is None or taken is self.served:
                return
            self._previous, self.served = self.served, taken
            self.before = None if self._previous is None else self._previous.version
            if self._return is not None and taken.version != self._return.to:
                self._return = None
            elif self._return is not None:
                self.before = None
            if self._previous is not None and not self._keeps_before:
                self._previous.state, self._previous.version, self._previous.complete = {}, None, False
            self.changed.notify_all()

    def go_back(self, reader: str, latest: int | None) -> int:
        """Ask for the version before, and refuse the later ones that are there; returns its number."""
        with self.changed:
            if self.before is None or self.served is None or self.served.version is None:
                raise Mismatch(f"reader {reader!r} has no version to go back to: it has swapped none out")
            left = self.served.version
            self._return = Return(left, self.before, max(left, latest or 0))
            self.returning = self.before
            self.changed.notify_all()
            return self.before

    def stay(self) -> None:
        """Undo a `go_back` that did not succeed."""
        with self.changed:
            self._return = self.returning = None

    def refuses(self, version: int) -> bool:
        """Whether the reader has gone back from this version."""
        return self._return is not None and self._return.refuses(version)

    # -- for the background

    def room_for(self, urgent: Collection[int], beside: Collection[int]) -> StagingState | None:
        """Reserve tensors for another version; None if all hold versions that are needed more.

        Versions of `beside` are never overwritten. `urgent` says in which order others are to be kept.
        """
        with self.changed:
            if len(self._sets) < SETS:
                found = self._make()
                self._sets.append(found)
            else:
                free = [each for each in self._sets if each not in (self.served, self._taken)]
                free = [each for each in free if not (each.complete and each.version in beside)]
                if not free:
                    return None
                found = min(free, key=lambda each: self._worth(each, urgent))
            found.reserved = True
            return found

    def _worth(self, each: StagingState, urgent: Collection[int]) -> tuple[int, int]:
        if not each.complete or each.version is None:
            return (0, 0)
        if each is self._previous:
            return (2, each.seen)
        return (3 if each.version in urgent or self._follows(each) else 1, each.seen)

    def fill(self, found: StagingState, version: int, digests: Digests, seen: int) -> None:
        """The background overwrites a reserved set from now on."""
        with self.changed:
            found.version, found.digests, found.seen = version, digests, seen
            found.complete = found.reserved = False
            if found is self._previous:
                self._previous = None

    def release(self, found: StagingState) -> None:
        """A reserved set is not overwritten after all."""
        with self.changed:
            found.reserved = False

    def complete(self, found: StagingState) -> None:
        with self.changed:
            found.complete = True
            self.changed.notify_all()

    def holdings(self, version: int | None = None) -> tuple[set[int], dict[int, Digests]]:
        """The versions to keep in the store (and `version`), and those with their bytes here."""
        with self.changed:
            sets = [each for each in self._sets if not each.reserved]
            pinned = {each.version for each in sets if each is self.served or not each.complete or self._follows(each)}
            ready = {each.version: each.digests for each in sets if each.complete and each.version is not None}
        return {number for number in (*pinned, version) if number is not None}, ready

    def _follows(self, each: StagingState) -> bool:
        """Whether a version was wanted after the one that is served."""
        return each is not self._previous and (self.served is None or each.seen > self.served.seen)

    def clear(self) -> None:
        with self.changed:
            self._sets, self.served, self._previous, self._taken = [], None, None, None
            self.changed.notify_all()
