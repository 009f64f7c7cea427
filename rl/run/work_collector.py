"""Collects what the processes of a run did, and their processor time, as events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from holdfast.comms.errors import HoldfastError
from holdfast.rl.run.run_events import Activity, Event, ProcessorTime
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.work_log import WorkReport

EVERY = 2.0
"""Seconds between two collections."""

SECONDS = 10.0
"""The limit of one collection; what a process did not say by then comes with the next one."""

Ask = Callable[[], Awaitable[Mapping[str, WorkReport]]]
"""Asks the processes of a role; those that do not answer are left out."""


class WorkCollector:
    """Asks the processes of each role from time to time, and emits what they did."""

    def __init__(
        self,
        telemetry: RunTelemetry,
        roles: Mapping[str, Ask],
        then: Callable[[], Awaitable[None]],
        failed: Callable[[HoldfastError], None],
    ) -> None:
        """`then` is awaited after each collection, `failed` is called with what ends the collections: a full disk."""
        self._telemetry, self._roles, self._then, self._failed = telemetry, dict(roles), then, failed

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        """Collect at the beginning and the end of the block, and every `EVERY` seconds in between."""
        await self.collect()
        task = asyncio.create_task(self._repeat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.collect()

    async def collect(self) -> None:
        """Ask all processes once, and emit their answers."""
        now = self._telemetry.now()
        events: list[Event] = [ProcessorTime(time=now, process="driver", role="driver", seconds=time.process_time())]
        for role, ask in self._roles.items():
            reports: Mapping[str, WorkReport] = {}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    reports = await ask()
            events += self._events(role, reports)
        self._telemetry.emit_all(events)
        await self._then()

    def _events(self, role: str, reports: Mapping[str, WorkReport]) -> list[Event]:
        now = self._telemetry.now()
        events: list[Event] = []
        for name, report in reports.items():
            events += [
                Activity(
                    time=now - span.ago,
                    process=name,
                    role=role,
                    what=span.what,
                    number=span.number,
                    seconds=span.seconds,
                    cpu=span.cpu,
                )
                for span in report.spans
            ]
            events.append(ProcessorTime(time=now, process=name, role=role, seconds=report.cpu))
        return events

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            try:
                await self.collect()
            except HoldfastError as error:
                self._failed(error)
                return
