"""Hosts with processes that read parts without mapping them: publishers make deltas for these.

Holders, followers and pins are in the catalogue with their processes; one that only reads is noted here, by its host.
Such a host may be gone without a word, so a note counts for the next versions only, and is renewed.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from holdfast.comms.transport.liveness import this_host
from holdfast.ft.registers import RegisterAway
from holdfast.store.catalog.client import CatalogClient
from holdfast.store.catalog.records import Catalog, FarRead

RENEWED_AFTER, COUNTS_FOR = 8, 16
"""Versions after which a host's note is renewed, and no longer counts."""
MOST_HOSTS = 16
"""One note is enough for deltas to be made; several make it likely that one of the hosts is alive."""
_log = logging.getLogger("holdfast.store")


def note_read(client: CatalogClient, version: int, mapped: bool) -> None:
    """Note that a process of this host has read a version, unless it was mapped, or the register is away."""
    if mapped or is_noted(client.newest()[1], this_host(), version):
        return
    try:
        client.change(lambda now: noted(now, this_host(), version))
    except RegisterAway as error:
        _log.info("publishers are not told to make deltas: %s", error)


def is_noted(catalog: Catalog, host: str, version: int) -> bool:
    """Whether a read of a version by a process of a host needs no note."""
    known = next((each.version for each in catalog.far_reads if each.host == host), None)
    others = sum(1 for each in catalog.far_reads if _counts(each, version))
    return others >= MOST_HOSTS if known is None else abs(version - known) < RENEWED_AFTER


def noted(catalog: Catalog, host: str, version: int) -> Catalog:
    """Note that a process of a host has read a version without mapping it."""
    if is_noted(catalog, host, version):
        return catalog
    others = [each for each in catalog.far_reads if each.host != host and _counts(each, version)]
    return replace(catalog, far_reads=(*others, FarRead(host, version)))


def reading_hosts(catalog: Catalog) -> frozenset[str]:
    """The hosts of all processes that read parts of the newest versions, or may."""
    latest = max(catalog.visible(), default=0)
    far = {each.host for each in catalog.far_reads if _counts(each, latest)}
    return frozenset(far | {peer.host for peer in catalog.peers()})


def _counts(read: FarRead, version: int) -> bool:
    return abs(version - read.version) < COUNTS_FOR
