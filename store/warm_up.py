"""Runs the code of a publish and a get once, ahead of a process's first ones.

Else they load code and touch memory on the way, which takes longer than to move a few megabytes.
"""

from __future__ import annotations

import logging
import os
import time

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.comms.transport.liveness import this_process
from holdfast.store.catalog.records import Catalog, Holder, Replica, Shard, Version
from holdfast.store.data.tree import flatten, flatten_targets
from holdfast.store.publish.published_part import PublishedPart
from holdfast.store.read.patching import FilledTargets
from holdfast.store.read.read_plan import PlanCache
from holdfast.store.read.targets import Targets
from holdfast.store.read.version_reader import VersionReader
from holdfast.store.recent import Recent

TENSORS, ELEMENTS = 256, 16
"""So many small tensors take the memory of the interpreter that a usual state dict takes."""
SECONDS = 1.0
_ID = "warm-up"
_log = logging.getLogger("holdfast.store")
_done: set[tuple[str, int]] = set()
"""The planes for which this was done, by process."""


def warm_up(plane: MemoryPlane) -> None:
    """Publish a small state dict into memory of `plane`, and get it from there: once in each process.

    An error is logged: the first real call reports it better.
    """
    key = plane.name, os.getpid()
    if key in _done:
        return
    _done.add(key)
    try:
        _publish_and_get(plane)
    except HoldfastError as error:
        _log.debug("the store is not warmed up: %s", error)


def _publish_and_get(plane: MemoryPlane) -> None:
    state = {str(number): torch.zeros(ELEMENTS, device="cpu") for number in range(TENSORS)}
    packed = PublishedPart.of(flatten(state)).pack(lambda nbytes: plane.empty(nbytes, mappable=True))
    with plane.expose(packed.memory[: packed.nbytes]) as region:
        replicas = (Replica(_ID, region.handle),)
        version = Version(1, 1, 1, None, True, (Shard(0, packed.digest, packed.manifest_at, _ID, replicas),))
        catalog = Catalog(holders=(Holder(_ID, this_process()),), versions=(version,))
        catalog = Catalog.decode(catalog.encode())
        deadline = time.monotonic() + SECONDS
        reader = VersionReader(
            plane, catalog, version, deadline, lambda *_: None, PlanCache(), FilledTargets(), os.getpid()
        )
        Targets(flatten_targets(state), False, Recent(1)).fill(reader, True, None)
