"""Which versions must go to disk, and stay until they are there."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.store.catalog.records import Catalog, DiskCopy

MOST_UNFINISHED = 2
"""The most versions that wait for the disk, for each retainer: all of them stay in memory until they are written."""


def with_due_copy(catalog: Catalog, number: int) -> Catalog:
    """Note that a visible version must go to disk, if it is due and the retainers keep up.

    If they do not, the version is left out, and the next one is due.
    """
    unfinished = sum(not copy.done for copy in catalog.disk)
    if not catalog.retainers or unfinished >= MOST_UNFINISHED * len(catalog.retainers):
        return catalog
    newest = max((copy.version for copy in catalog.disk), default=None)
    if newest is not None and number < newest + min(retainer.every for retainer in catalog.retainers):
        return catalog
    return replace(catalog, disk=(*catalog.disk, DiskCopy(number)))


def kept_for_disk(catalog: Catalog) -> frozenset[int]:
    """The versions that stay until they are on disk. Without a retainer, none does."""
    return frozenset(copy.version for copy in catalog.disk if not copy.done) if catalog.retainers else frozenset()
