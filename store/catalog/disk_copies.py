"""Which process copies which version to disk, as pure transitions of the catalogue.

`holdfast.store.catalog.settling` says which versions are to be copied, in the change that makes them visible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from holdfast.comms.transport.base import Peer
from holdfast.store.catalog.records import Catalog, DiskCopy, Retainer
from holdfast.store.catalog.settling import settle, with_due_copy


def join(catalog: Catalog, retainer: Retainer) -> Catalog:
    """Add a retainer. The newest version is to be copied, if it is due."""
    if retainer in catalog.retainers:
        return catalog
    catalog = replace(catalog, retainers=(*catalog.retainers, retainer))
    there = catalog.visible()
    return with_due_copy(catalog, there[-1]) if there else catalog


def due(catalog: Catalog) -> tuple[int, ...]:
    """The versions that are to be copied, and that no retainer has claimed."""
    there = catalog.visible()
    return tuple(copy.version for copy in catalog.disk if not copy.done and not copy.retainer and copy.version in there)


def claim(catalog: Catalog, number: int, retainer: Retainer) -> Catalog:
    """Let a retainer copy a version. Changes nothing if that is not due: another one was first."""
    if number not in due(catalog) or retainer not in catalog.retainers:
        return catalog
    return _with(catalog, DiskCopy(number, retainer.id))


def claimed(catalog: Catalog, retainer: Retainer) -> tuple[int, ...]:
    """The versions that a retainer has still to copy."""
    return tuple(copy.version for copy in catalog.disk if copy.retainer == retainer.id and not copy.done)


def finish(catalog: Catalog, number: int, retainer: Retainer) -> Catalog:
    """Note that a version is on disk. Of what is on disk, the catalogue remembers the newest."""
    if number not in claimed(catalog, retainer):
        return catalog
    catalog = _with(catalog, DiskCopy(number, retainer.id, done=True))
    newest = max(copy.version for copy in catalog.disk if copy.done)
    there = catalog.visible()
    left = tuple(copy for copy in catalog.disk if copy.version == newest or (not copy.done and copy.version in there))
    return settle(replace(catalog, disk=left))


def give_up(catalog: Catalog, number: int, retainer: Retainer) -> Catalog:
    """Forget a copy that failed. The next version is due then."""
    if number not in claimed(catalog, retainer):
        return catalog
    return settle(replace(catalog, disk=tuple(copy for copy in catalog.disk if copy.version != number)))


def leave(catalog: Catalog, retainer: Retainer) -> Catalog:
    """Remove a retainer that closes; others copy what it has not finished."""
    return _without(catalog, lambda each: each.id == retainer.id)


def remove_dead_retainers(catalog: Catalog, dead: Collection[Peer]) -> Catalog:
    """Remove the retainers of dead processes; others copy what they have not finished."""
    return _without(catalog, lambda each: each.peer in dead)


def _without(catalog: Catalog, gone: Callable[[Retainer], bool]) -> Catalog:
    ids = {retainer.id for retainer in catalog.retainers if gone(retainer)}
    if not ids:
        return catalog
    retainers = tuple(retainer for retainer in catalog.retainers if retainer.id not in ids)
    disk = tuple(
        replace(copy, retainer="") if copy.retainer in ids and not copy.done else copy
        for copy in catalog.disk
        if copy.done or retainers
    )
    return settle(replace(catalog, retainers=retainers, disk=disk))


def _with(catalog: Catalog, copy: DiskCopy) -> Catalog:
    others = [each for each in catalog.disk if each.version != copy.version]
    return replace(catalog, disk=tuple(sorted((*others, copy), key=lambda each: each.version)))
