"""Writes one version into the directory of copies, unless it is there already."""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast.comms.errors import HoldfastError
from holdfast.store.errors import CopyFailed
from holdfast.store.interop import dcp, safetensors
from holdfast.store.interop.disk_record import Format, read_record
from holdfast.store.interop.publish_copy import checksum
from holdfast.store.interop.version_source import VersionSource
from holdfast.store.retention.copies import copy_path
from holdfast.store.weight_store import WeightStore


class Aborted(HoldfastError):
    """A copy that its own process stopped in the middle. Nothing is left of it."""


class Exporter:
    """Exports versions to `directory`, until `abort` is set. The caller has the lease on the version."""

    def __init__(
        self,
        store: WeightStore,
        directory: Path,
        kind: Format,
        timeout: float,
        abort: threading.Event,
    ) -> None:
        self._store, self._directory, self._kind = store, directory, kind
        self._timeout, self._abort = timeout, abort

    def export(self, number: int) -> int:
        """Write a version; returns its bytes. Raises `Aborted`, and the errors of `export_version`."""
        path = copy_path(self._directory, number)
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
