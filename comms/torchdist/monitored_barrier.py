"""`MonitoredBarrier`: a barrier that names the missing ranks. It uses the store, so it works without the transport."""

from __future__ import annotations

import time

from holdfast.comms.errors import HoldfastError, OpTimeout
from holdfast.comms.rendezvous.meeting_store import MeetingStore

_PAUSE = 0.002
_RESULT_GRACE = 10.0


class MonitoredBarrier:
    """The monitored barriers of one group. Rank 0 waits for all ranks and writes the outcome for them."""

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
            time.sleep(_PAUSE)
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
            time.sleep(_PAUSE)
        result = self._store.get(f"{key}/result").decode()
        if result != "passed":
            raise HoldfastError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. Rank 0 missed: {result}"
            )
