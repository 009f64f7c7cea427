"""`monitored_barrier`: says which ranks did not come. It meets over the store, whatever the transport is doing."""

from __future__ import annotations

import time

import torch.distributed as dist

from holdfast.comms.errors import HoldfastError, OpTimeout

_PAUSE = 0.002
_VERDICT_GRACE = 10.0


class MonitoredBarrier:
    """The monitored barriers of one group, in order. Rank 0 waits for all and tells them the verdict."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def pass_through(self, timeout: float, wait_all_ranks: bool) -> None:
        """Return once all ranks have come. Else `OpTimeout`, on rank 0 naming the first rank that did not come, or with
        `wait_all_ranks` all of them."""
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
            time.sleep(_PAUSE)
        told = missing if wait_all_ranks else missing[:1]
        self._store.set(f"{key}/verdict", ",".join(map(str, told)) or "passed")
        if told:
            names = ", ".join(map(str, told))
            limit = f"{timeout * 1000:.0f} ms"
            said = f"{'Ranks' if len(told) > 1 else 'Rank'} {names} failed to pass monitoredBarrier in {limit}"
            if timeout <= 0:
                said = f"Rank 0 timed out in monitoredBarrier after {limit}, before it could look for rank {names}"
            raise _said(OpTimeout("monitored_barrier", self._count, timeout, tuple(told)), said)

    def _follow(self, key: str, timeout: float) -> None:
        self._store.set(f"{key}/{self._rank}", "here")
        deadline = time.monotonic() + timeout + _VERDICT_GRACE
        while not self._store.check([f"{key}/verdict"]):
            if time.monotonic() > deadline:
                raise OpTimeout("monitored_barrier", self._count, timeout + _VERDICT_GRACE, (0,))
            time.sleep(_PAUSE)
        verdict = self._store.get(f"{key}/verdict").decode()
        if verdict != "passed":
            raise HoldfastError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. Rank 0 missed: {verdict}"
            )


def _said(error: OpTimeout, text: str) -> OpTimeout:
    """The error with the words that torch has for it."""
    error.args = (text,)
    return error
