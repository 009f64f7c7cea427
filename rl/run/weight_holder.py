"""An actor that keeps replicas of versions in its memory, for all others to read."""

from __future__ import annotations

from holdfast.rl.work_log import WorkLog, WorkReport
from holdfast.store import WeightStore


class WeightHolder:
    """Holds replicas of the newest `keep` versions, `replicas` of each among all holders."""

    def __init__(self, store: str, replicas: int, keep: int) -> None:
        self._store = WeightStore(store, replicas=replicas, keep=keep)

    async def version(self) -> int | None:
        """The newest visible version."""
        return self._store.latest()

    async def work(self) -> WorkReport:
        """The processor time of this process; its work is done by the store's own threads."""
        return WorkLog().report()

    def close(self) -> None:
        """Leave the store. Idempotent."""
        self._store.close()
