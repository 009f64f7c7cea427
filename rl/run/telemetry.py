"""The events of a run: collected from its processes, and sent to its directory and to observers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from holdfast.rl.grpo.loop import running
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Activity, Event, ProcessorTime
from holdfast.rl.telemetry import WorkReport

Observer = Callable[[Event], None]


EVERY = 2.0
"""Seconds between two collections."""

SECONDS = 10.0
"""The limit of one collection; what a process did not say by then comes with the next one."""

Ask = Callable[[], Awaitable[Mapping[str, WorkReport]]]
"""Asks the processes of a role; those that do not answer are left out."""


class RunTelemetry:
    """The outlet of events. Every observer gets each event, after the directory has it."""

    def __init__(self, directory: RunDirectory, observers: tuple[Observer, ...] = (), began: float = 0.0) -> None:
        """`began` is how long the run had lasted, in seconds, when the driver before this one ended."""
        self._directory, self._observers = directory, observers
        self._zero = time.monotonic() - began

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._zero

    def at(self, monotonic: float) -> float:
        """The time of an event at `monotonic`, a value of `time.monotonic()`."""
        return monotonic - self._zero

    def emit(self, *events: Event) -> None:
        """Record events, which may be older than those before."""
        self._directory.append(*events)
        for event in events:
            for observer in self._observers:
                observer(event)

    @contextlib.asynccontextmanager
    async def collecting(self, roles: Mapping[str, Ask], then: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Emit what all processes did, at the beginning and the end of the block and every `EVERY` seconds in between.

        `then` is awaited after each collection. What ends the collections, such as a full disk, ends the block.
        """

        async def repeat() -> None:
            while True:
                await asyncio.sleep(EVERY)
                await self._collect(roles, then)

        await self._collect(roles, then)
        try:
            async with running(repeat):
                yield
        finally:
            await self._collect(roles, then)

    async def _collect(self, roles: Mapping[str, Ask], then: Callable[[], Awaitable[None]]) -> None:
        """Ask all processes once, and emit their answers."""
        events: list[Event] = [
            ProcessorTime(time=self.now(), process="driver", role="driver", seconds=time.process_time())
        ]
        for role, ask in roles.items():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    reports = await ask()
                events += [event for name, report in reports.items() for event in self._work(role, name, report)]
        self.emit(*events)
        await then()

    def _work(self, role: str, process: str, report: WorkReport) -> Iterator[Event]:
        now = self.now()
        for span in report.spans:
            yield Activity(
                time=now - report.now + span.began,
                process=process,
                role=role,
                what=span.what,
                number=span.number,
                seconds=span.seconds,
                cpu=span.cpu,
            )
        yield ProcessorTime(time=now, process=process, role=role, seconds=report.cpu)

    @contextmanager
    def doing(self, process: str, role: str, what: str, number: int) -> Iterator[None]:
        """Emit an `Activity` at the end of the block, unless it raises."""
        began = self.now()
        yield
        self.emit(
            Activity(time=began, process=process, role=role, what=what, number=number, seconds=self.now() - began)
        )
