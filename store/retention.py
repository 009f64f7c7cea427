"""Copies of versions on disk: every K-th one while a job runs, and the newest back when one starts."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.comms.quantities import integer_in, seconds, seconds_or
from holdfast.comms.system import forks
from holdfast.comms.transport.liveness import this_process
from holdfast.store.catalog import disk_copies
from holdfast.store.catalog.client import Cancellation
from holdfast.store.catalog.records import Catalog, Retainer
from holdfast.store.errors import CallCancelled, CopyFailed
from holdfast.store.holding.replica_holder import Observe
from holdfast.store.interop import dcp, import_version, safetensors
from holdfast.store.interop.disk_copy import Format, VersionSource, checksum, read_record
from holdfast.store.weight_store import WeightStore

_NAME = re.compile(r"version-([0-9]{10,19})", re.ASCII)


def copy_path(directory: Path, number: int) -> Path:
    return directory / f"version-{number:010}"


def copies(directory: Path) -> dict[int, Path]:
    """The versions that are whole in a directory, oldest first; none if it does not exist."""
    if not directory.is_dir():
        return {}
    found = {int(match[1]): path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def remove_copy(path: Path) -> None:
    """Remove a copy: it vanishes at once, then its files go."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def restore(
    store: WeightStore,
    directory: str | Path,
    *,
    part: int = 0,
    parts: int = 1,
    timeout: float | None = None,
    damaged: Callable[[Path, HoldfastError], None] | None = None,
) -> int | None:
    """Publish the newest version that `DiskRetention` has left whole in `directory`; returns its number.

    Returns the store's latest version if it is as new, and None if there is no copy. A damaged copy is reported to
    `damaged`, and the one before is taken. Several processes may call this at once; with `parts` each publishes its
    share of the tensors.

    Raises the errors of `publish`, and the error of the newest copy if every copy is damaged.
    """
    first: HoldfastError | None = None
    latest = store.latest()
    for number, path in reversed(copies(Path(directory)).items()):
        if latest is not None and latest >= number:
            break
        try:
            return import_version(store, path, part=part, parts=parts, timeout=timeout)
        except (CorruptData, CopyFailed) as error:
            first = first or error
            if damaged is not None:
                damaged(path, error)
    if latest is None and first is not None:
        raise first
    return latest


IDLE_SECONDS = 1.0
_log = logging.getLogger("holdfast.store")


class Aborted(HoldfastError):
    """A copy that its own process stopped in the middle. Nothing is left of it."""


class DiskRetention:
    """Copies a version to `directory` whenever `every` numbers have passed since the last copy. A context manager.

    The first copy is that of the newest version. Open it in several holders of a store: one of them writes each copy,
    and if it dies another one does. A version that is to be copied stays in the store until that is done. A copy is
    there whole or not at all, as `version-0000000007`; `format` is "safetensors" or "dcp". The newest `keep` copies
    stay, or all. Writing goes on in a thread, and needs memory for one batch of tensors.

    If the disk is slower than the versions come, as many are copied as it takes: two wait for each process at most. A
    copy that fails harms nothing: the next version is tried.

    `observe` is called, in that thread, with "disk_copied" (version, path, bytes, seconds), "disk_failed" (version,
    path, error, why) and "disk_removed" (version, path); `error` is the name of the error's type, such as
    "NoRoomOnDisk".
    """

    def __init__(
        self,
        store: WeightStore,
        directory: str | Path,
        *,
        every: int = 1,
        keep: int | None = None,
        format: Format = "safetensors",  # noqa: A002
        timeout: float = 30.0,
        observe: Observe | None = None,
    ) -> None:
        if format not in get_args(Format):
            raise ValueError(f"format={format!r} is unknown: give one of {', '.join(map(repr, get_args(Format)))}")
        self.directory = Path(directory).absolute()
        self._keep = None if keep is None else integer_in(keep, "keep", 1)
        self._timeout = seconds(timeout)
        self._observe: Observe = observe or (lambda kind, fields: None)
        self._retainer = Retainer(secrets.token_hex(6), this_process(), integer_in(every, "every", 1))
        self._failed: set[int] = set()
        self._no_more, self._abort = threading.Event(), threading.Event()
        self._waiting = Cancellation("close")
        self._store, self._kind = store, format
        self._client = store.open_catalog()
        try:
            self._client.change(lambda now: disk_copies.join(now, self._retainer))
        except BaseException:
            self._client.close()
            raise
        self._thread = threading.Thread(target=self._run, name="holdfast-store-disk", daemon=True)
        self._thread.start()
        forks.refuse_in_children(self, f"the copies in {self.directory}", ("directory",))

    def close(self, timeout: float | None = None) -> None:
        """Finish the copy that is begun, and those that no other process is there to make; after `timeout`, leave them.

        Idempotent. The default is the `timeout` of the constructor.
        """
        deadline = time.monotonic() + seconds_or(timeout, self._timeout)
        self._no_more.set()
        self._waiting.cancel()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._abort.set()
        self._thread.join()
        try:
            self._client.change(lambda now: disk_copies.leave(now, self._retainer))
        except HoldfastError as error:
            _log.warning("left unfinished copies without telling the others: %s", error)
        self._client.close()

    def __enter__(self) -> DiskRetention:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(None if kind is None else 0.0)

    # -- in a thread

    def _run(self) -> None:
        seen = 0
        while not self._abort.is_set():
            closing = self._no_more.is_set()
            try:
                with self._waiting.scope():
                    found = None if closing else self._client.wait(seen, IDLE_SECONDS)
                seen, catalog = found or self._client.read()
                number = self._claim(catalog, closing)
            except CallCancelled:  # by `close`
                continue
            except HoldfastError as error:
                _log.warning("copies to %s go on trying: %s", self.directory, error)
                if closing:
                    return
                self._no_more.wait(IDLE_SECONDS)
                continue
            if number is not None:
                self._write(number)
            elif closing:
                return

    def _claim(self, catalog: Catalog, closing: bool) -> int | None:
        """Claim the next version that is due; None if there is none, or another process is there to copy it.

        A process claims what it writes next and no more, so another one that has nothing to do takes the rest.
        """
        if mine := disk_copies.claimed(catalog, self._retainer):
            return mine[0]
        wanted = [number for number in disk_copies.due(catalog) if number not in self._failed]
        if not wanted or (closing and catalog.retainers != (self._retainer,)):
            return None
        _, after = self._client.change(lambda now: disk_copies.claim(now, wanted[0], self._retainer))
        return next(iter(disk_copies.claimed(after, self._retainer)), None)

    def _write(self, number: int) -> None:
        began = time.monotonic()
        path = copy_path(self.directory, number)
        try:
            nbytes = self._export(number)
        except Aborted:
            return
        except Exception as error:
            if not isinstance(error, HoldfastError):
                _log.exception("version %d was not copied to %s", number, path)
            self._failed.add(number)
            self._change(lambda now: disk_copies.give_up(now, number, self._retainer))
            why = {"version": number, "path": str(path), "error": type(error).__name__, "why": str(error)}
            self._observe("disk_failed", why)
            return
        self._change(lambda now: disk_copies.finish(now, number, self._retainer))
        taken = time.monotonic() - began
        self._observe("disk_copied", {"version": number, "path": str(path), "bytes": nbytes, "seconds": taken})
        self._remove_old()

    def _export(self, number: int) -> int:
        """Write a version; returns its bytes. Raises `Aborted`, and the errors of `export_version`."""
        path = copy_path(self.directory, number)
        if path.exists():
            return self._compare(number, path)
        export_version = {"dcp": dcp.export_version, "safetensors": safetensors.export_version}[self._kind]
        nbytes = 0

        def progress(done: int, total: int) -> None:
            nonlocal nbytes
            nbytes = done
            self._check_abort()

        export_version(self._store, number, path, timeout=self._timeout, progress=progress, alone=True)
        return nbytes

    def _compare(self, number: int, path: Path) -> int:
        """Check that a copy has the bytes of the version.

        A process may have died right after it had written the copy.
        """
        record = read_record(path)
        with VersionSource(self._store, number, self._timeout, lambda done, total: self._check_abort()) as source:
            names = {each.name for each in source.tensors}
            if record is None or record.version != number or record.checksums.keys() != names:
                raise CopyFailed(path, f"it exists already, and is another version {number}: name a new directory")
            for each, tensor in source.read(source.tensors):
                if checksum(tensor) != record.checksums[each.name]:
                    raise CopyFailed(path, f"it exists already, with another {each.name}: name a new directory")
            return source.nbytes

    def _check_abort(self) -> None:
        if self._abort.is_set():
            raise Aborted("the copy was stopped, because its process closes")

    def _change(self, transition: Callable[[Catalog], Catalog]) -> None:
        """Change the catalogue; while its register is away, try again."""
        while not self._abort.is_set():
            try:
                self._client.change(transition)
            except HoldfastError as error:
                _log.warning("copies to %s go on trying: %s", self.directory, error)
                self._abort.wait(IDLE_SECONDS)
            else:
                return

    def _remove_old(self) -> None:
        there = copies(self.directory)
        for number in list(there)[: -self._keep] if self._keep is not None else ():
            try:
                remove_copy(there[number])
            except OSError as error:
                _log.warning("the old copy %s was not removed: %s", there[number], error)
            else:
                self._observe("disk_removed", {"version": number, "path": str(there[number])})
