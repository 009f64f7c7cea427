"""The models of a generator by the version of their weights: the one that serves, and others beside it.

A version is read from the store into a model that does not serve, so a read that fails damages nothing, and a switch of
versions moves no bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.comms.errors import HoldfastError
from holdfast.rl.generators.errors import GeneratorClosed, GeneratorNotReady, VersionGone
from holdfast.rl.telemetry import WorkLog
from holdfast.store import NoSuchVersion, StoreTimeout, WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOK_SECONDS = 0.2
"""Seconds of one wait for a newer version, after which the thread looks whether it must end."""

READ_SECONDS = 60.0
"""Seconds that the thread gives one version to be read."""

RETRY_SECONDS = 0.5
"""Seconds before the thread that follows the store tries again after an error."""


class _Loaded:
    """A model and the version of its weights, with the digests of its bytes; None while they are a mixture."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.version: int | None = None
        self.digests: tuple[bytes, ...] = ()
        self.users = 0


class ServedWeights:
    """At most `models` models with weights of different versions, all built by `build`.

    Without a store, the weights that `build` gives are version 0, and the only ones. Safe to use from any thread.
    """

    def __init__(
        self,
        build: Callable[[], PreTrainedModel],
        store: WeightStore | None,
        models: int,
        work: WorkLog | None = None,
    ) -> None:
        self._build, self._store, self._most = build, store, models
        self._work = work or WorkLog()
        self._loaded = [_Loaded(build())]
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._failure: HoldfastError | None = None
        self._unanswered: HoldfastError | None = None
        """The failure of a look for newer versions."""
        self._served: int | None = None
        self._closed = False
        self._follower: threading.Thread | None = None
        if store is None:
            self._loaded[0].version = self._served = 0

    @property
    def version(self) -> int | None:
        """The version that serves: the newest one that is whole here; None before the first."""
        return self._served

    @property
    def failure(self) -> HoldfastError | None:
        """The error of the last update; None if that worked."""
        return self._failure

    def check_ready(self) -> int:
        """The version that serves. Raises `GeneratorNotReady` if there is none, or the last update failed."""
        with self._changed:
            if self._failure is not None:
                raise GeneratorNotReady(f"its last update failed: {self._failure}")
            if self._served is None:
                raise GeneratorNotReady("no version of the weights is here yet")
            return self._served

    def has(self, version: int) -> bool:
        """Whether a version is here."""
        with self._changed:
            return any(each.version == version for each in self._loaded)

    def has_in(self, version: int, model: PreTrainedModel) -> bool:
        """Whether `model` has the weights of a version; not if its number was published again, and read, meanwhile."""
        with self._changed:
            return any(each.version == version and each.model is model for each in self._loaded)

    @contextmanager
    def using(self, version: int) -> Iterator[PreTrainedModel]:
        """The model with the weights of a version, which stay inside of the block. Raises `VersionGone`."""
        with self._changed:
            found = next((each for each in self._loaded if each.version == version), None)
            if found is None:
                raise VersionGone(version, sorted(each.version for each in self._loaded if each.version is not None))
            found.users += 1
        try:
            yield found.model
        finally:
            with self._changed:
                found.users -= 1
                self._changed.notify_all()

    def update(self, version: int | None, timeout: float) -> int:
        """Wait for `version` in the store (None: the newest one), read it, and return its number.

        It is served if it is the newest here. An error, typed, leaves the generator not ready until an update worked,
        unless the version is merely not there: `VersionGone`, `StoreTimeout` of the wait.
        """
        deadline = time.monotonic() + timeout
        if version is not None and self._is_current(version):
            self._worked(version)
            return version
        if self._store is None:
            raise VersionGone(-1 if version is None else version, [] if self._served is None else [self._served])
        if version is None:
            version = self._store.wait(0, timeout)
        else:
            await_visible(self._store, version, deadline)
        with self._reading:
            try:
                if not self._is_current(version):
                    self._read(version, deadline)
            except NoSuchVersion as error:
                raise VersionGone(version, error.there) from error
            except HoldfastError as error:
                with self._changed:
                    self._failure = error
                raise
        self._worked(version)
        return version

    def follow(self) -> None:
        """Read newer versions from now on, in a thread of their own."""
        if self._store is not None and self._follower is None:
            self._follower = threading.Thread(
                target=self._follow, args=(self._store,), name="follow-weights", daemon=True
            )
            self._follower.start()

    def close(self) -> None:
        """End the thread that follows the store. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._follower is not None:
            self._follower.join()
            self._follower = None

    def _read(self, version: int, deadline: float) -> None:
        assert self._store is not None
        spare, digests = self._spare(deadline), tuple[bytes, ...]()
        with self._work.doing("load_weights", version):
            while not digests or digests != self._store.digests(version):  # else other bytes got the number meanwhile
                digests = self._store.digests(version)
                self._store.get(version, spare.model.state_dict(), timeout=max(0.001, deadline - time.monotonic()))
        with self._changed:
            for each in self._loaded:
                if each.version == version:  # of the bytes that had this number before
                    each.version = None
            spare.version, spare.digests = version, digests

    def _is_current(self, version: int) -> bool:
        """Whether a version is here, and the store has no other bytes by its number."""
        with self._changed:
            here = [each.digests for each in self._loaded if each.version == version]
        if not here or self._store is None:
            return bool(here)
        return self._store.digests(version) in (here[0], ())

    def _spare(self, deadline: float) -> _Loaded:
        """A model that serves nothing; it loses its version."""
        with self._changed:
            while True:
                if self._closed:
                    raise GeneratorClosed
                free = [each for each in self._loaded if not each.users and each.version is None]
                if free:
                    return free[0]
                if len(self._loaded) < self._most:
                    break
                free = [each for each in self._loaded if not each.users and each.version != self._served]
                if free:
                    oldest = min(free, key=lambda each: -1 if each.version is None else each.version)
                    oldest.version = None
                    return oldest
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreTimeout("update", self._served or 0, 0.0, "all models of this generator are in use")
                self._changed.wait(min(left, LOOK_SECONDS))
        added = _Loaded(self._build())
        with self._changed:
            self._loaded.append(added)
        return added

    def _worked(self, version: int) -> None:
        with self._changed:
            self._failure = None
            if self._served is None or version > self._served:
                self._served = version
            self._changed.notify_all()

    def _follow(self, store: WeightStore) -> None:
        while not self._closed:
            try:
                newest = self._newest(store)
            except StoreTimeout:
                self._answered()
                continue
            except HoldfastError as error:  # the register is away for longer than the store's timeout
                self._unanswered = error
                self._fail(error)
                continue
            self._answered()
            try:
                self.update(newest, READ_SECONDS)
            except (VersionGone, GeneratorClosed):
                continue
            except HoldfastError as error:
                self._fail(error)

    def _answered(self) -> None:
        """The store is there: forget that it was away, which damaged no weights."""
        with self._changed:
            if self._failure is self._unanswered:
                self._failure = None
            self._unanswered = None

    def _newest(self, store: WeightStore) -> int:
        """Wait for a version that is not here. Raises `StoreTimeout` if there is none yet."""
        served = self._served
        try:
            return store.wait(0 if served is None else served + 1, LOOK_SECONDS)
        except StoreTimeout:
            if served is None or self._is_current(served):
                raise
            return served  # its number was published again

    def _fail(self, error: HoldfastError) -> None:
        with self._changed:
            self._failure = error
            if not self._closed:
                self._changed.wait(RETRY_SECONDS)


def await_visible(store: WeightStore, version: int, deadline: float) -> None:
    """Wait until a version is in the store. Raises `VersionGone`, `StoreTimeout`."""
    there = store.versions()
    if version in there:
        return
    if there and there[-1] > version:
        raise VersionGone(version, there)
    while store.wait(version, max(0.0, deadline - time.monotonic())) > version:
        there = store.versions()
        if version not in there:
            raise VersionGone(version, there)
        return
