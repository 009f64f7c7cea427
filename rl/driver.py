"""The driver: starts the workers of a run, replaces dead ones, and decides when the run is done.

It does no arithmetic and holds no weights. Trainers recover by themselves (`ft`); for a dead one the driver only starts
another spare. The units of a dead generator go back to the queue, and a new generator or holder takes over.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.control.rpc import AsyncRpcServer
from holdfast.rl.crew import Crew, Role, Site
from holdfast.rl.happenings import WorkerLost, WorkerStarted
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.roles import wire
from holdfast.rl.roles.engine import Engine, WorkerProcess
from holdfast.rl.roles.generator import generate_units
from holdfast.rl.roles.holder import hold_weights
from holdfast.rl.roles.service import Audience, Service
from holdfast.rl.roles.trainer import train

LEASE_SECONDS = 30.0
"""Seconds with one unit after which a generator is taken for stuck, and ended."""

_STOP_SECONDS = 10.0
_RESTARTS = 10
"""The most workers that a run may lose; one more fails the run, with the reason of the last end."""


class RunFailed(HoldfastError):
    """The run cannot continue."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker and its role."""

    worker: WorkerProcess
    role: Role


class TrainingDriver:
    """One run of `recipe` by `crew` at `site`, whose `address` is filled in.

    `audience` is called with every event of the run; `pause` may delay or break workers at points where faults are
    planned (see `Service`).
    """

    def __init__(
        self,
        recipe: Recipe,
        crew: Crew,
        site: Site,
        engine: Engine,
        audience: Audience,
        pause: Callable[[str, wire.Reached], Awaitable[None]] | None = None,
    ) -> None:
        self.recipe, self.crew, self.site = recipe, crew, site
        self._engine, self._audience = engine, audience
        self.service = Service(recipe, audience, pause) if pause else Service(recipe, audience)
        self._places: dict[str, Place] = {}
        self._numbers: dict[Role, itertools.count[int]] = {
            "trainer": itertools.count(),
            "generator": itertools.count(),
            "holder": itertools.count(),
        }
        self._lost = 0
        self._ending = False
        self._left = asyncio.Event()

    def worker(self, name: str) -> WorkerProcess | None:
        """The living worker of this name."""
        place = self._places.get(name)
        return place.worker if place else None

    def named(self, pid: int) -> str | None:
        """The name of the living worker with this pid."""
        return next((name for name, place in self._places.items() if place.worker.pid == pid), None)

    def alive(self, role: Role) -> tuple[str, ...]:
        """The names of the living workers of a role."""
        return tuple(name for name, place in self._places.items() if place.role == role)

    async def run(self, timeout: float) -> str:
        """Do the whole run; returns the digest of the final weights.

        Raises `RunFailed`, also after `timeout` seconds, and the errors of the service. All workers are ended.
        """
        server = AsyncRpcServer(key=self.site.key, job=self.site.job, identity="driver", handlers=self.service.handlers)
        watch = None
        try:
            await server.start()
            self.site = msgspec.structs.replace(self.site, address=server.address)
            self._start_all()
            watch = asyncio.create_task(self._watch())
            try:
                async with asyncio.timeout(timeout):
                    await self.service.until_done()
            except TimeoutError:
                raise RunFailed(
                    f"{self.service.buffer.committed} of {self.recipe.steps} steps are committed after {timeout:.0f} s"
                ) from None
            await self._stop()
            return next(iter(self.service.digests.values()))
        finally:
            self._ending = True
            if watch is not None:
                watch.cancel()
            await server.close()
            for place in tuple(self._places.values()):
                place.worker.close()

    def _start_all(self) -> None:
        for _ in range(self.crew.holders):
            self._start("holder")
        for _ in range(self.crew.trainers + self.crew.spares):
            self._start("trainer")
        for _ in range(self.crew.generators):
            self._start("generator")

    def _start(self, role: Role, replaces: str = "") -> None:
        name = f"{role}-{next(self._numbers[role])}"
        bodies: dict[Role, Callable[..., None]] = {
            "trainer": train,
            "generator": generate_units,
            "holder": hold_weights,
        }
        arguments: list[object] = [self.site, name]
        if role != "holder":
            arguments.append(self.recipe)
        if role == "trainer":
            arguments.append(not self.service.running)
        worker = self._engine.start(name, bodies[role], *arguments, on_exit=lambda how: self._exited(name, how))
        self._places[name] = Place(worker, role)
        self._audience(WorkerStarted(time=time.monotonic(), name=name, role=role, pid=worker.pid, replaces=replaces))

    def _exited(self, name: str, how: str) -> None:
        now = time.monotonic()
        place = self._places.pop(name)
        place.worker.close()
        self._left.set()
        if self._ending:
            return
        if place.role == "trainer" and not how:
            if not self.service.digests and not self.alive("trainer"):
                self.service.fail(RunFailed("all trainers returned, and none has committed all steps"))
            return
        requeued = self.service.lose(name)
        how = how or "returned before the run was over"
        self._audience(
            WorkerLost(time=now, name=name, role=place.role, pid=place.worker.pid, how=how, requeued=requeued)
        )
        self._lost += 1
        if self._lost > _RESTARTS:
            self.service.fail(RunFailed(f"{self._lost} workers were lost, the last of them {name}: {how}"))
            return
        try:
            self._start(place.role, replaces=name)
        except HoldfastError as error:
            self.service.fail(error)

    async def _watch(self) -> None:
        """End generators that are stuck."""
        while True:
            await asyncio.sleep(1.0)
            for lease in self.service.ledger.overdue(time.monotonic() - LEASE_SECONDS):
                if worker := self.worker(lease.worker):
                    worker.kill()

    async def _stop(self) -> None:
        """Wait for all workers to return by themselves."""
        self._ending = True
        self.service.end()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                while self._places:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            raise RunFailed(f"{', '.join(self._places)} did not return after the end of the run") from None
