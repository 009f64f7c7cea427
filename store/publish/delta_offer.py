"""Offers a delta beside a part that is published: what changed since the newest version that readers may have."""

from __future__ import annotations

import logging
import time

import numpy as np

from holdfast.comms.errors import HoldfastError
from holdfast.comms.transport.liveness import this_host
from holdfast.store.catalog.records import Catalog, DeltaOffer
from holdfast.store.data.manifest import Manifest
from holdfast.store.data.packing import PackedPart
from holdfast.store.delta.cost import pays
from holdfast.store.delta.diff import diff
from holdfast.store.delta.far_reads import reading_hosts
from holdfast.store.delta.layouts import element_pieces
from holdfast.store.errors import StoreFull
from holdfast.store.holding.replica_holder import Key, ReplicaHolder

WIRE_BYTES_PER_SECOND = 1.2e9
"""The speed at which parts are taken to be read where they cannot be mapped: that of TCP."""
_log = logging.getLogger("holdfast.store")


def offer_delta(holder: ReplicaHolder, catalog: Catalog, key: Key, packed: PackedPart) -> DeltaOffer | None:
    """Find what changed since the newest visible version of the same layout, and expose it while the part is kept.

    None where that does not pay: all processes that are known to read map the part, no such version is here,
    too much has changed, or the memory's limit leaves no room. `key` is that of the part, which `holder` keeps.
    """
    if holder.maps and reading_hosts(catalog) <= {this_host()}:
        return None
    _, part, digest = key
    for number in reversed(catalog.visible()):
        shard = catalog.shard(number, part)
        memory = None if shard is None else holder.memory_of((number, part, shard.digest))
        if shard is None or memory is None:
            continue
        if shard.digest == digest:
            return None
        base = Manifest.decode(memory[shard.manifest_at :].numpy().data, shard.manifest_at)
        if base.layout.digest == packed.manifest.layout.digest:
            break
    else:
        return None
    began = time.perf_counter()
    changed = np.flatnonzero(base.sums != packed.manifest.sums)
    pieces = element_pieces(base.layout)
    found = diff(memory, packed.memory, [pieces[at] for at in changed]).among(pieces, changed)
    whole = base.layout.data_bytes
    if not pays(found.nbytes + found.whole_bytes, whole, WIRE_BYTES_PER_SECOND):
        return None
    try:
        handle = holder.attach(key, found, shard.digest)
    except StoreFull as error:
        _log.info("version %d part %d is published without a delta: %s", key[0], part, error)
        return None
    except HoldfastError as error:
        _log.warning("version %d part %d is published without a delta: %s", key[0], part, error)
        return None
    took = time.perf_counter() - began
    _log.debug(
        "version %d part %d: a delta of %d bytes from version %d, in %.3g s", key[0], part, found.nbytes, number, took
    )
    return DeltaOffer(shard.digest, holder.holder.id, handle)
