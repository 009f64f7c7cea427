"""Injects the planned faults: SIGKILL, each at a moment of dependence.

A trainer dies inside the reduction of the gradients, when all others are in it and wait for its part. A generator dies
between the first and the second token of a unit. A holder dies when it has the newest published weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.ft.telemetry.event_log import EventLog
from holdfast.harness.demo.plan import DemoPlan
from holdfast.harness.demo.record import Victim
from holdfast.rl.crew import INSIDE_GENERATION, INSIDE_REDUCTION
from holdfast.rl.driver import TrainingDriver
from holdfast.rl.happenings import Happening, Published
from holdfast.rl.roles import wire
from holdfast.store import WeightStore

ENTER_SECONDS = 0.1
"""Seconds from when the last survivor entered the reduction to the kill."""

GATHER_SECONDS = 20.0
"""The longest that the victim waits inside the reduction for the others to arrive."""

RESTORE_SECONDS = 10.0
_LOOK_SECONDS = 0.002


class WorkerKilled(Happening, frozen=True, tag="struck"):
    """A worker was killed. `where` says what it was doing."""

    victim: Victim
    process: str
    pid: int
    where: str
    step: int


class ReplicasRestored(Happening, frozen=True, tag="restored"):
    """A version of the weights has its full number of replicas again, at new holders."""

    version: int
    holders: tuple[str, ...]


class Faults:
    """The faults of one run. The driver calls `pause` and `hear`; each injection is passed to `tell`."""

    def __init__(self, plan: DemoPlan, store: WeightStore, log: EventLog, tell: Callable[[Happening], None]) -> None:
        self._plan, self._store, self._log, self._tell = plan, store, log, tell
        self._pending: set[Victim] = {kill.victim for kill in plan.kills}
        self._inside: set[str] = set()
        self._gathered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.driver: TrainingDriver | None = None

    @property
    def pending(self) -> frozenset[Victim]:
        """The planned faults that are not injected yet."""
        return frozenset(self._pending)

    async def pause(self, worker: str, reached: wire.Reached) -> None:
        """Hold `worker` at a point; returns when it may go on."""
        if reached.point == INSIDE_GENERATION and "generator" in self._pending:
            self._kill("generator", worker, "between two tokens of a unit", reached.step)
            await asyncio.sleep(GATHER_SECONDS)
        elif reached.point == INSIDE_REDUCTION and "trainer" in self._pending:
            await self._in_reduction(worker, reached.step)

    def hear(self, happening: Happening) -> None:
        """Handle an event of the run."""
        kill = self._plan.kill("holder")
        if isinstance(happening, Published) and kill is not None and happening.version >= kill.step:
            self._kill_holder(kill.step)

    async def close(self) -> None:
        """End the tasks that wait for replicas."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _in_reduction(self, worker: str, step: int) -> None:
        service = self._the_driver().service
        victim = self._plan.recipe.seed % service.size
        self._inside.add(worker)
        if len(self._inside) == service.size:
            self._gathered.set()
        if service.ranks[worker] != victim:
            return
        async with asyncio.timeout(GATHER_SECONDS):
            await self._gathered.wait()
        await asyncio.sleep(ENTER_SECONDS)
        self._kill("trainer", worker, f"rank {victim} inside the all_reduce", step)
        await asyncio.sleep(GATHER_SECONDS)

    def _kill_holder(self, step: int) -> None:
        if "holder" not in self._pending:
            return
        version = self._store.latest()
        assert version is not None
        driver = self._the_driver()
        holders = driver.alive("holder")
        for holder in self._store.holders("latest"):
            if (name := driver.named(holder.pid)) in holders and name is not None:
                self._kill("holder", name, f"holding the newest weights, version {version}", step)
                task = asyncio.create_task(self._look_for_replicas(version, holder.pid))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return

    def _kill(self, victim: Victim, name: str, where: str, step: int) -> None:
        worker = self._the_driver().worker(name)
        if worker is None:
            return
        self._pending.discard(victim)
        self._log.emit("fault", what="kill", target=name, target_pid=worker.pid, step=step)
        now = time.monotonic()
        worker.kill()
        self._tell(WorkerKilled(time=now, victim=victim, process=name, pid=worker.pid, where=where, step=step))

    async def _look_for_replicas(self, version: int, killed: int) -> None:
        """Report when the newest version has all its replicas again, none of them in the process `killed`."""
        deadline = time.monotonic() + RESTORE_SECONDS
        driver = self._the_driver()
        while time.monotonic() < deadline:
            holders = [holder for holder in self._store.holders("latest") if holder.pid != killed]
            alive = tuple(driver.named(holder.pid) or f"process {holder.pid}" for holder in holders)
            if len(alive) >= self._plan.crew.replicas:
                self._tell(
                    ReplicasRestored(time=time.monotonic(), version=self._store.latest() or version, holders=alive)
                )
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def _the_driver(self) -> TrainingDriver:
        assert self.driver is not None
        return self.driver
