"""`Follower`: the versions of a store in a reader's tensors, swapped between two batches."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.quantities import integer_in, seconds_or
from holdfast.comms.system import forks
from holdfast.store.catalog.client import CatalogClient, check_cancelled, longest_wait
from holdfast.store.catalog.fleet import digests_of, find_reader, may_serve, own, target
from holdfast.store.catalog.records import Catalog, Reader
from holdfast.store.errors import NotCaughtUp, StoreTimeout
from holdfast.store.follow.stager import Stager
from holdfast.store.follow.staging import Staging, StagingState

LOOK_SECONDS = 0.2
"""The longest time that a wait for the background goes without a look at the catalogue."""


class Follower:
    """Keeps a reader's tensors at the newest version of a store; a context manager.

    A thread reads each new version into tensors beside those that are served (up to three sets, in host memory, used
    again and again). The reader's own tensors change in `swap`, `batch`, `catch_up` and `back` only, whole or not at
    all, in the thread that calls. Versions that are served or staged stay in the store meanwhile.

    A reader with a name serves the version that the newest committed `switch` says, and no other. One without a name
    serves the latest version, and follows a `rollback`.

    Each error of the background is raised by the next call, once; the background goes on trying, and `failures` counts
    its errors. One thread at a time may serve.
    """

    def __init__(
        self,
        client: CatalogClient,
        reader: Reader,
        staging: Staging,
        on_version: Callable[[int], object] | None,
        timeout: float,
    ) -> None:
        self._staging, self._on_version, self._timeout = staging, on_version, timeout
        self._stager = Stager(client, reader, staging)
        self._staged = self._stager.staged
        self._serving = threading.Lock()
        self._told: int | None = None
        self._version: int | None = None
        self._stager.start()
        self._ending = weakref.finalize(self, self._stager.close)
        forks.reset_in_children(self)
        forks.refuse_in_children(self, f"the follower of reader {reader.id!r}", ("reader",))

    def reset_in_child(self) -> None:
        self._ending.detach()

    @property
    def reader(self) -> str:
        """The reader's name; one made up for a reader without."""
        return self._stager.reader.id

    @property
    def version(self) -> int | None:
        """The version in the reader's tensors; None before the first, and if a swap was broken off in the middle."""
        return self._version

    @property
    def failures(self) -> int:
        """The number of errors of the background so far."""
        return self._stager.failures

    @property
    def failure(self) -> HoldfastError | None:
        """The error that the background tries to overcome; None if it goes on without one. Raises nothing."""
        return self._stager.failing

    @property
    def changed(self) -> threading.Condition:
        """Notified whenever `swap`, `is_due` or `failure` may have another answer."""
        return self._staged.changed

    # -- looking and waiting

    def is_due(self) -> bool:
        """Whether `swap` would put in other bytes, as far as the background has seen. Reads no register."""
        catalog = self._stager.client.newest()[1]
        if not self._stager.reader.switched:
            return self._staged.find_newest(catalog) is not None
        me = find_reader(catalog, self.reader)
        must = None if me is None else target(catalog, me)
        if must is None:
            return False
        staged = self._staged.find(must.version, digests_of(catalog, must.version))
        return staged is not None and (staged is not self._staged.served or self._version != must.version)

    def is_current(self) -> bool:
        """Whether the version in the reader's tensors is the one to serve now, which a named reader reads up."""
        if not self._stager.reader.switched:
            return self._version is not None and not self.is_due()
        catalog = self._stager.client.read()[1]
        me = own(catalog, self.reader, self._stager.reader.token)
        must = target(catalog, me)
        return must is not None and may_serve(catalog, me) and self._version == must.version

    def ready(self, version: int) -> bool:
        """Whether the bytes of a version are here, so that a swap to it needs no other process."""
        number = integer_in(version, "version", 0)
        return self._staged.find(number, digests_of(self._stager.client.newest()[1], number)) is not None

    def wait_ready(self, version: int, timeout: float | None = None) -> None:
        """Wait until a version is `ready`. Raises `StoreTimeout`, and the error if this reader cannot take it."""
        number = integer_in(version, "version", 0)
        for left in self._wait("follow", number, timeout):
            catalog = self._stager.client.newest()[1]
            if self._staged.find(number, digests_of(catalog, number)) is not None:
                return
            self._stager.check_reader()
            self._raise_unfit(catalog, number)
            left("it is not staged")

    def _wait(self, op: str, version: int, timeout: float | None) -> Iterator[Callable[[str], None]]:
        """Turns of a wait: each gives a function that waits for a change, and raises `StoreTimeout` when time is up."""
        began = time.monotonic()
        deadline = began + seconds_or(timeout, self._timeout)

        def wait(why: str) -> None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout(op, version, time.monotonic() - began, why)
            with self._staged.changed:
                self._staged.changed.wait(longest_wait(min(left, LOOK_SECONDS)))

        while True:
            check_cancelled()
            yield wait

    def _raise_unfit(self, catalog: Catalog, version: int) -> None:
        error = self._stager.unfit(catalog, version)
        if error is not None:
            self._stager.check()
            raise error.again()

    # -- serving

    def swap(self) -> int:
        """Swap in the newest version that is ready and may be served; returns the version to serve.

        Waits for no other process. Then `on_version` is called with the number, if it is another one. Raises
        `NotCaughtUp` if the reader may not serve: it has no version yet, or was left out of a committed switch.
        """
        with self._alone():
            return self._swap()

    def catch_up(self, timeout: float | None = None) -> int:
        """Wait until the reader has the version that it must serve, and swap it in; returns its number.

        That is the one which was the latest when this was called, or a later one. Raises `StoreTimeout`.
        """
        with self._alone():
            return self._catch_up(timeout)

    def next_version(self, timeout: float | None = None) -> int:
        """Wait until another version than the present one may be served, and swap it in. Raises `StoreTimeout`."""
        with self._alone():
            before = self._version
            for wait in self._wait("next_version", 0 if before is None else before, timeout):
                try:
                    version = self._swap()
                except NotCaughtUp as error:
                    why = str(error)
                else:
                    if version != before:
                        return version
                    why = f"version {version} is still the one to serve"
                wait(why)
        raise AssertionError("a wait ends by its deadline")

    @contextmanager
    def batch(self, timeout: float | None = None) -> Iterator[int]:
        """Serve a batch: no swap happens inside. Before it, swap as `swap` does, or `catch_up` if that is needed."""
        with self._alone():
            try:
                version = self._swap()
            except NotCaughtUp:
                version = self._catch_up(timeout)
            yield version

    def back(self, timeout: float | None = None) -> int:
        """Swap the version before in again; returns its number. The reader stays there until a newer one is published.

        Its bytes are still here, unless newer versions needed the room: then they are read again. Raises `Mismatch` if
        there is none, or if this reader follows switches: switch the whole fleet back then.
        """
        with self._alone():
            self._stager.check()
            if self._stager.reader.switched:
                raise Mismatch(f"reader {self.reader!r} serves what its fleet serves: call switch() with that version")
            number = self._staged.go_back(self.reader, self._stager.client.newest()[1].latest)
            try:
                for wait in self._wait("back", number, timeout):
                    catalog = self._stager.client.newest()[1]
                    taken = self._staged.take(number, digests_of(catalog, number))
                    if taken is not None:
                        self._put(taken)
                        return self._tell(number)
                    self._raise_unfit(catalog, number)
                    self._stager.check()
                    wait("the version is being read again")
            except BaseException:
                if self._version != number:
                    self._staged.stay()
                raise
        raise AssertionError("a wait ends by its deadline")

    def close(self) -> None:
        """End the background, and let all versions go; the tensors keep their bytes. Idempotent."""
        if self._ending.detach() is not None:
            self._stager.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._serving.acquire(blocking=False):
            raise Mismatch(f"reader {self.reader!r} serves a batch; swap after it, in the thread that serves")
        try:
            yield
        finally:
            self._serving.release()

    def _catch_up(self, timeout: float | None) -> int:
        self._stager.check_open()
        at, catalog = self._stager.client.read()
        for wait in self._wait("catch_up", catalog.latest or 0, timeout):
            try:
                version = self._swap()
            except NotCaughtUp as error:
                why = str(error)
            else:
                served = self._staged.served
                if self._stager.reader.switched or (served and (served.seen >= at or version == catalog.latest)):
                    return version
                why = f"it serves version {version}, the latest is {catalog.latest}"
            wait(why)
        raise AssertionError("a wait ends by its deadline")

    def _swap(self) -> int:
        self._stager.check()
        if self._stager.reader.switched:
            return self._swap_as_switched()
        taken = self._staged.take_newest(self._stager.client.newest()[1])
        if taken is None and self._version is None:
            taken = self._staged.served  # the copy of it was broken off
        if taken is not None:
            self._put(taken)
        if self._version is None:
            raise NotCaughtUp(self.reader, None, None, "no version is staged yet")
        return self._tell(self._version)

    def _swap_as_switched(self) -> int:
        catalog = self._stager.client.read()[1]
        while True:
            me = own(catalog, self.reader, self._stager.reader.token)
            must = target(catalog, me)
            if must is None:
                raise NotCaughtUp(self.reader, self._version, None, "no switch that names it was committed")
            digests = digests_of(catalog, must.version)
            served = self._staged.served
            if (
                may_serve(catalog, me)
                and self._version == must.version
                and served
                and served.holds(must.version, digests)
            ):
                return self._tell(must.version)
            taken = self._staged.take(must.version, digests)
            if taken is None:
                self._raise_unfit(catalog, must.version)
                why = f"version {must.version}, committed by switch {must.serial}, is not staged yet"
                raise NotCaughtUp(self.reader, self._version, must.version, why)
            catalog = self._put(taken)

    def _put(self, taken: StagingState) -> Catalog:
        """Put what was taken in its place, and tell the others; undo that if it is broken off."""
        assert taken.version is not None
        before, served, self._version = self._version, self._staged.served, None
        try:
            if taken is not served or before is None:
                self._staging.put(taken)
        except BaseException:
            self._staged.put_back()
            if before is not None and served is not None:
                self._staging.put(served)
                self._version = before
            raise
        self._version = taken.version
        if served is not None and taken.digests != served.digests:
            self._told = None  # a number that was published again is another version
        self._staged.swapped()
        return self._stager.acknowledge(taken.version)

    def _tell(self, version: int) -> int:
        if self._told != version:
            self._told = version
            if self._on_version is not None:
                self._on_version(version)
        return version
