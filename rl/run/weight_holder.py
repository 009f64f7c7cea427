"""An actor that keeps replicas of versions in memory, for others to read; `CopiesWatch` sees lost ones restored."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.run.run_events import CopiesRestored, Event, ProcessLost
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.telemetry import WorkLog, WorkReport
from holdfast.store import WeightStore
from holdfast.store.catalog import transitions

ROLE = "holder"
LOOK_SECONDS = 0.1


class WeightHolder:
    """Holds replicas of the newest versions, as many of each among all holders as the store has copies."""

    def __init__(self, config: RunConfig, store: str) -> None:
        self._log = WorkLog()
        replicas, keep = config.store.copies, config.kept_versions
        self._store = WeightStore(store, replicas=replicas, keep=keep, observe=self._hear)

    async def version(self) -> int | None:
        """The newest visible version."""
        return self._store.latest()

    async def work(self) -> WorkReport:
        """The replicas that the store's threads made since the last call."""
        return self._log.report()

    def close(self) -> None:
        """Leave the store. Idempotent."""
        self._store.close()

    def _hear(self, kind: str, event: Mapping[str, Any]) -> None:
        """Record a replica, in the thread that made it."""
        if kind == "replica_made":
            self._log.add("replicate", event["version"], time.monotonic() - event["seconds"], event["cpu"])


class CopiesWatch:
    """After the loss of a holder, looks into the store until each version has `copies` among the others again.

    `identity` gives what `this_host` is at the address of a host: process 5 there is another one than process 5 here.
    The watch tells the store of hosts that are away: the holders would count beats in the register for eight seconds. A
    host that beats there after all is counted again.
    """

    def __init__(
        self, store: WeightStore, copies: int, telemetry: RunTelemetry, identity: Callable[[str], str]
    ) -> None:
        self._store, self._copies, self._telemetry, self._identity = store, copies, telemetry, identity
        self._gone, self._away = set[tuple[str, int]](), set[str]()
        self._lost = set[str]()
        self._changed = asyncio.Event()

    def host_away(self, host: str) -> None:
        """Count no copy on a host, which is named as `this_host` is there."""
        self._away.add(host)
        self._changed.set()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until the end of the block, and emit `CopiesRestored` after each loss, or several at once."""
        self._telemetry.observe(self._hear)
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _hear(self, event: Event) -> None:
        if isinstance(event, ProcessLost) and event.role == ROLE:
            self._gone.add((self._identity(event.host), event.pid))
            self._changed.set()

    async def _watch(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (versions := await asyncio.to_thread(self._restored)) is None:
                await asyncio.sleep(LOOK_SECONDS)
            self._telemetry.emit(CopiesRestored(time=self._telemetry.now(), versions=versions))

    def _restored(self) -> int | None:
        """The number of visible versions, if all of them have their copies without the lost holders; else None."""
        gone, away = set(self._gone), set(self._away)
        try:
            if away:
                with contextlib.closing(self._store.open_catalog()) as catalog:
                    catalog.change(lambda now: transitions.hosts_away(now, away))
            versions = self._store.versions()
            holders = [each for version in versions for each in self._store.holders(version)]
            self._lost |= {each.id for each in holders if (each.peer.host, each.pid) in gone or each.peer.host in away}
            self._gone, self._away = self._gone - gone, self._away - away
            kept = Counter[tuple[int, int]]()
            for version, part, holder in self._store.inspect().replicas():
                kept[version, part] += holder not in self._lost
        except HoldfastError:  # the register is away for a moment, or a version was let go meanwhile
            return None
        return len(versions) if all(count >= self._copies for count in kept.values()) else None
