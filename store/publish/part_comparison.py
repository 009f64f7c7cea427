"""Compares a part that is being published with the other parts of its version. Tensors that both have must be equal."""

from __future__ import annotations

import logging
import time

from holdfast.comms.errors import HoldfastError
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.store.catalog.records import Catalog, Shard, Version
from holdfast.store.data.manifest import Manifest
from holdfast.store.data.shared_tensors import check_shared, tensors_of
from holdfast.store.read.part_source import PartSource

COMPARE_SECONDS = 1.0
"""Seconds in which the manifests of other parts must be read; readers compare those that were not."""
_log = logging.getLogger("holdfast.store")


class PartComparison:
    """Compares a part with those that are listed before it; a part that is listed later compares itself."""

    def __init__(self, plane: MemoryPlane, number: int, part: int, fence: int | None, manifest: Manifest) -> None:
        self._plane, self._number, self._part, self._fence, self._manifest = plane, number, part, fence, manifest
        self._compared: set[tuple[int, bytes]] = set()
        self._deadline = time.monotonic() + COMPARE_SECONDS

    def left(self, catalog: Catalog) -> tuple[Shard, ...]:
        """The parts of the version that have not been compared. A part that begins a new epoch stays with none."""
        version = catalog.version(self._number)
        if version is None or version.visible or (self._fence is not None and self._fence != catalog.fence):
            return ()
        others = (each for each in version.shards if each.part != self._part)
        return tuple(each for each in others if (each.part, each.digest) not in self._compared)

    def compare(self, catalog: Catalog) -> None:
        """Compare with the parts that are left. Raises `Mismatch`, naming the tensors and the parts."""
        version = catalog.version(self._number)
        if version is None:
            return
        for shard in self.left(catalog):
            other = self._manifest_of(catalog, version, shard)
            if other is not None:
                tensors_of((other.layout, self._manifest.layout))
                check_shared((shard.part, self._part), (other, self._manifest))
            self._compared.add((shard.part, shard.digest))

    def _manifest_of(self, catalog: Catalog, version: Version, shard: Shard) -> Manifest | None:
        try:
            return PartSource(self._plane, catalog, version, shard, self._deadline, lambda *_: None).manifest()
        except HoldfastError as error:
            _log.info("version %d part %d is left to readers to compare: %s", self._number, shard.part, error)
            return None
