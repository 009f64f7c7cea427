"""`group_store`: the store that torch gives a group, with calls that end and raise holdfast's errors."""

from __future__ import annotations

import torch.distributed as dist

from holdfast.comms.rendezvous.meeting_store import MeetingStore


def group_store(store: dist.Store, prefix: str, timeout: float) -> MeetingStore:
    """The keys under `prefix` of torch's store. A call raises `StoreSilent` after `timeout` seconds, or `StoreLost`."""
    place = store
    while isinstance(place, dist.PrefixStore):
        place = place.underlying_store
    where = f"{place.host}:{place.port}" if isinstance(place, dist.TCPStore) else type(place).__name__
    return MeetingStore(store, f"holdfast/{prefix}", where=where, timeout=timeout)
