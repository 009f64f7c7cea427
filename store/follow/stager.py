"""The background of a follower: one thread that reads the versions which its reader will want, and reports them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from holdfast.comms.errors import HoldfastError, Mismatch, Unsupported
from holdfast.store.catalog import fleet
from holdfast.store.catalog.client import Cancellation, CatalogClient
from holdfast.store.catalog.fleet import Digests, digests_of, needed, preparing, wanted
from holdfast.store.catalog.records import Catalog, Reader
from holdfast.store.errors import FollowFailed, NoSuchVersion, ReaderReplaced
from holdfast.store.follow.staging import StagedVersions, Staging, StagingState

IDLE_SECONDS = 1.0
UNDECIDED_SECONDS = 0.2
"""Seconds between looks at the processes of an undecided switch."""
GRACE_SECONDS = 1.0
"""Seconds that a reader waits beyond the patience of a switch's proposer, before it aborts the switch itself."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Seconds to the next attempt after an error; the pause doubles."""

_log = logging.getLogger("holdfast.store")


class Stager:
    """Stages versions for `reader`. Owns the client."""

    def __init__(self, client: CatalogClient, reader: Reader, staging: Staging) -> None:
        self.client, self.reader, self._staging = client, reader, staging
        self.staged = StagedVersions(staging.new, staging.keeps_before)
        self.failures = 0
        self.failing: HoldfastError | None = None
        self._unfit: dict[int, tuple[Digests, HoldfastError]] = {}
        self._failed_reads: Counter[int] = Counter()
        """How often in a row the read of a version failed; others are read first."""
        self._error: HoldfastError | None = None
        self._over: HoldfastError | None = None
        self._closing = threading.Event()
        self._reading = Cancellation("follow")
        self._watched: tuple[int, float] = (0, 0.0)
        self._thread = threading.Thread(target=self._run, name="holdfast-store-follower", daemon=True)

    def start(self) -> None:
        """Enter the catalogue, and start the thread. Raises `Mismatch` if another process is this reader."""
        self.client.remove_dead_holders()
        self.client.change(lambda now: fleet.register(now, self.reader))
        self._thread.start()

    def close(self) -> None:
        """End the thread, leave the catalogue, and let all versions go. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._reading.cancel()
        try:
            self.client.change(lambda now: fleet.unregister(now, self.reader.id, self.reader.token))
        except HoldfastError as error:
            _log.warning("reader %r left without telling the others: %s", self.reader.id, error)
        self.client.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.staged.clear()

    # -- for the thread that serves

    def check(self) -> None:
        """Raise an error of the background that was not raised yet; always, if this reader is over."""
        self.check_open()
        with self.staged.changed:
            error, self._error = self._over or self._error, None
        if error is not None:
            raise error.again()

    def check_reader(self) -> None:
        """Raise the error that ended this reader, if one did."""
        self.check_open()
        if self._over is not None:
            raise self._over.again()

    def check_open(self) -> None:
        if self._closing.is_set():
            raise Mismatch(f"the follower of reader {self.reader.id!r} is closed; call follow() again")

    def unfit(self, catalog: Catalog, version: int) -> HoldfastError | None:
        """Why this reader cannot take a version, if it has tried."""
        digests, error = self._unfit.get(version, ((), None))
        return error if digests == digests_of(catalog, version) else None

    def acknowledge(self, version: int) -> Catalog:
        """Tell the others that this reader serves a version, and which ones it keeps now.

        The background may not have reported yet that it is ready for it.
        """
        me = self.reader
        return self.client.change(lambda now: fleet.acknowledge(self._report(now, None), me.id, me.token, version))[1]

    # -- in the background

    def _run(self) -> None:
        seen, pause = 0, FIRST_PAUSE
        while not self._closing.is_set():
            try:
                seen, catalog = self.client.wait(seen, self._patience(seen)) or self.client.read()
                self._settle_switch(catalog)
                self._stage_all(catalog)
                pause, self.failing = FIRST_PAUSE, None
            except Exception as error:
                if self._closing.is_set():
                    return
                self._note(error)
                if isinstance(error, ReaderReplaced):
                    return
                self._closing.wait(pause)
                seen, pause = 0, min(2 * pause, LONGEST_PAUSE)
            with self.staged.changed:
                self.staged.changed.notify_all()

    def _note(self, error: Exception) -> None:
        if isinstance(error, HoldfastError):
            found = error
        else:
            _log.error("reader %r goes on trying", self.reader.id, exc_info=error)
            found = FollowFailed(f"reader {self.reader.id!r} cannot stage a version, and goes on trying: {error!r}")
            found.__cause__ = error
        with self.staged.changed:
            self.failures += 1
            self._error = self.failing = found
            if isinstance(error, ReaderReplaced):
                self._over = error
            self.staged.changed.notify_all()

    def _stage_all(self, catalog: Catalog) -> None:
        while not self._closing.is_set():
            me, served = fleet.own(catalog, self.reader.id, self.reader.token), self.staged.served
            if not me.switched and served is not None and served.version not in (None, me.served):
                catalog = self.acknowledge(served.version)  # the register was away at the swap
            planned = self._plan(catalog, me)
            if planned is None:
                return
            version, found = planned
            try:
                if self._announce(version, found):
                    self._read(version, found)
                elif version == self.staged.returning:
                    catalog.need(version)
            except NoSuchVersion:
                if version == self.staged.returning:
                    raise
            finally:
                self.staged.release(found)
            catalog = self.client.read()[1]

    def _plan(self, catalog: Catalog, me: Reader) -> tuple[int, StagingState] | None:
        """The next version to stage, and tensors for it."""
        returning = self.staged.returning
        versions = wanted(catalog, me) if returning is None else (returning,)
        self._failed_reads = Counter({version: self._failed_reads[version] for version in versions})
        versions = tuple(sorted(versions, key=self._failed_reads.__getitem__))
        urgent = needed(catalog, me)
        for place, version in enumerate(versions):
            digests = digests_of(catalog, version)
            if not digests and returning is None:
                continue  # its last replica is gone: no read can bring it
            if self.staged.find(version, digests) or self.staged.refuses(version) or self.unfit(catalog, version):
                continue
            room = self.staged.room_for(versions[: place + 1], urgent)
            if room is not None:
                return version, room
        return None

    def _announce(self, version: int, found: StagingState) -> bool:
        """Ask the catalogue to keep the version for this reader; if it does, the tensors are to be overwritten.

        It does not if the version is gone, or if a switch has meanwhile asked for what the tensors hold.
        """
        at, catalog = self.client.change(lambda now: self._report(now, version))
        keeps = version in fleet.own(catalog, self.reader.id, self.reader.token).pinned
        if keeps:
            self.staged.fill(found, version, digests_of(catalog, version), at)
        return keeps

    def _report(self, catalog: Catalog, version: int | None) -> Catalog:
        pinned, ready = self.staged.holdings(version)
        return fleet.report(catalog, self.reader.id, self.reader.token, pinned, ready)

    def _read(self, version: int, found: StagingState) -> None:
        self._failed_reads[version] += 1
        try:
            with self._reading.scope():
                self._staging.read(version, found)
        except (Mismatch, Unsupported) as error:
            self._unfit[version] = (found.digests, error)
            self._settle_switch(self.client.read()[1])
            raise
        del self._failed_reads[version]
        if digests_of(self.client.read()[1], version) in (found.digests, ()):
            self.failing = None
            self.staged.complete(found)
            self.client.change(lambda now: self._report(now, None))

    # -- undecided switches

    def _patience(self, seen: int) -> float:
        if seen and preparing(self.client.newest()[1]) is not None:
            return UNDECIDED_SECONDS
        return IDLE_SECONDS

    def _settle_switch(self, catalog: Catalog) -> None:
        """Refuse a switch to a version that does not fit.

        Abort an undecided switch if its proposer is dead or took too long.
        """
        proposed, me = preparing(catalog), self.reader
        if proposed is None or not me.switched:
            return
        self.client.remove_dead_holders()
        if error := self.unfit(catalog, proposed.version):
            why = str(error)
            self.client.change(lambda now: fleet.refuse(now, me.id, me.token, proposed.version, why))
        now = time.monotonic()
        if self._watched[0] != proposed.serial:
            self._watched = (proposed.serial, now)
        elif now - self._watched[1] > proposed.patience + GRACE_SECONDS:
            why = f"its proposer, process {proposed.proposer.pid}, did not decide it in {proposed.patience:.3g} s"
            self.client.change(lambda now: fleet.abort(now, proposed.token, why))
