"""Detects process groups of equal name and different members: not all ranks called `new_group` alike.

torch numbers groups in each process by its calls of `new_group`. If some ranks leave out a call, the next group of
these ranks takes the number of another group, and its ranks meet in that group's part of the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec
import torch.distributed as dist

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.rendezvous.meeting_store import MeetingStore

_MEMBERS = "holdfast-members"
_decode = msgspec.json.Decoder(list[int]).decode


def group_store(store: dist.Store, prefix: str, timeout: float) -> MeetingStore:
    """The keys under `prefix` of torch's store. A call raises `StoreSilent` after `timeout` seconds, or `StoreLost`."""
    place = store
    while isinstance(place, dist.PrefixStore):
        place = place.underlying_store
    where = f"{place.host}:{place.port}" if isinstance(place, dist.TCPStore) else type(place).__name__
    return MeetingStore(store, f"holdfast/{prefix}", where=where, timeout=timeout)


@contextlib.contextmanager
def checked_members(store: MeetingStore, name: str, members: Sequence[int], world: int) -> Iterator[None]:
    """A context in which to connect the group `name` of the global ranks `members`.

    `store` is that of the group, `world` the number of global ranks. If connecting fails, and another rank makes a
    group of that name with other members, raises `Mismatch` in place of the error.
    """
    rank = dist.get_rank()
    store.set(f"{_MEMBERS}/{rank}", msgspec.json.encode(list(members)).decode())
    try:
        yield
    except HoldfastError as error:
        others = {other: _members(store, other) for other in range(world) if other != rank}
        differing = [(other, theirs) for other, theirs in others.items() if theirs not in (None, list(members))]
        if not differing:
            raise
        other, theirs = differing[0]
        raise Mismatch(
            f"new_group() makes group {name!r} of ranks {list(members)} on rank {rank}, and of ranks {theirs} on rank "
            f"{other}: every rank of the job must call new_group() for every group, in the same order, also for groups "
            "that it is not in; or pass use_local_synchronization=True on the members"
        ) from error


def _members(store: MeetingStore, rank: int) -> list[int] | None:
    """The members that a rank wrote for the group; None if it has written none."""
    key = f"{_MEMBERS}/{rank}"
    try:
        return _decode(store.get(key)) if store.check([key]) else None
    except (msgspec.DecodeError, RuntimeError):
        return None
