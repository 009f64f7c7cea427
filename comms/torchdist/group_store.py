"""What a group does over torch's store, without its transport: monitored barriers, and a check of `new_group`.

torch numbers groups in each process by its calls of `new_group`. If some ranks leave out a call, the next group of
these ranks takes the number of another group, and its ranks meet in that group's part of the store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch.distributed as dist

from holdfast.comms.errors import UNDECODABLE, HoldfastError, Mismatch, OpTimeout
from holdfast.comms.rendezvous.meeting_store import MeetingStore

_BARRIER_PAUSE = 0.002
_RESULT_GRACE = 10.0
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
def checked_members(given: Any) -> Iterator[None]:
    """A context in which to connect the group that torch's `new_group` describes; the default group has all ranks.

    If connecting fails, and another rank makes a group of that name with other members, raises `Mismatch` in place of
    the error.
    """
    if not dist.is_initialized():
        yield
        return
    store = group_store(given.store, "new-group", given.timeout.total_seconds())
    name, members, rank = given.group_id, list(given.global_ranks_in_group), dist.get_rank()
    store.set(f"{_MEMBERS}/{rank}", msgspec.json.encode(members).decode())
    try:
        yield
    except HoldfastError as error:
        others = {other: _members(store, other) for other in range(dist.get_world_size()) if other != rank}
        differing = [(other, theirs) for other, theirs in others.items() if theirs not in (None, members)]
        if not differing:
            raise
        other, theirs = differing[0]
        raise Mismatch(
            f"new_group() makes group {name!r} of ranks {members} on rank {rank}, and of ranks {theirs} on rank "
            f"{other}: every rank of the job must call new_group() for every group, in the same order, also for groups "
            "that it is not in; or pass use_local_synchronization=True on the members"
        ) from error


def _members(store: MeetingStore, rank: int) -> list[int] | None:
    """The members that a rank wrote for the group; None if it has written none."""
    key = f"{_MEMBERS}/{rank}"
    try:
        return _decode(store.get(key)) if store.check([key]) else None
    except (*UNDECODABLE, RuntimeError):
        return None


class MonitoredBarrier:
    """The barriers of one group that name missing ranks. Rank 0 waits for all ranks and writes the outcome for them.

    It uses the store, so it works without the transport.
    """

    def __init__(self, store: MeetingStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def pass_through(self, timeout: float, wait_all_ranks: bool) -> None:
        """Return once all ranks have come; else raise `OpTimeout`.

        On rank 0 the error names the first missing rank, or with `wait_all_ranks` all of them.
        """
        self._count += 1
        key = f"monitored-barrier/{self._count}"
        if self._rank:
            self._follow(key, timeout)
        else:
            self._lead(key, timeout, wait_all_ranks)

    def _lead(self, key: str, timeout: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + timeout
        missing = list(range(1, self._size))
        while missing := [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]:
            if time.monotonic() >= deadline:
                break
            time.sleep(_BARRIER_PAUSE)
        reported = missing if wait_all_ranks else missing[:1]
        self._store.set(f"{key}/result", ",".join(map(str, reported)) or "passed")
        if reported:
            names = ", ".join(map(str, reported))
            limit = f"{timeout * 1000:.0f} ms"
            text = f"{'Ranks' if len(reported) > 1 else 'Rank'} {names} failed to pass monitoredBarrier in {limit}"
            if timeout <= 0:
                text = f"Rank 0 timed out in monitoredBarrier after {limit}, before it could look for rank {names}"
            error = OpTimeout("monitored_barrier", self._count, timeout, tuple(reported))
            error.args = (text,)  # worded as torch's own
            raise error

    def _follow(self, key: str, timeout: float) -> None:
        self._store.set(f"{key}/{self._rank}", "here")
        deadline = time.monotonic() + timeout + _RESULT_GRACE
        while not self._store.check([f"{key}/result"]):
            if time.monotonic() > deadline:
                raise OpTimeout("monitored_barrier", self._count, timeout + _RESULT_GRACE, (0,))
            time.sleep(_BARRIER_PAUSE)
        result = self._store.get(f"{key}/result").decode()
        if result != "passed":
            raise HoldfastError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. Rank 0 missed: {result}"
            )
