"""Keeps the replicas of a service alive, and gives them calls."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from holdfast.comms.errors import HoldfastError, again, describe
from holdfast.rl.actors.engine import Engine
from holdfast.rl.actors.errors import AWAY_SECONDS, HostAway, ProcessLost
from holdfast.rl.services.errors import NotEnoughGpus, Overloaded, ServiceClosed, ServiceFailed
from holdfast.rl.services.options import ServiceOptions
from holdfast.rl.services.replica import ServiceReplica
from holdfast.rl.services.routing import RouteChoice, Router
from holdfast.rl.services.status import ReplicaEvent

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 5.0


VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpuPool:
    """The GPUs that no process has."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._free = list(devices)

    def take(self, count: int) -> tuple[str, ...]:
        """Take `count` GPUs. Raises `NotEnoughGpus`, and takes none."""
        if count > len(self._free):
            raise NotEnoughGpus(count, len(self._free))
        taken, self._free = tuple(self._free[:count]), self._free[count:]
        return taken

    def give_back(self, devices: tuple[str, ...]) -> None:
        """Make them free again."""
        self._free.extend(devices)


_pools: WeakKeyDictionary[Engine, GpuPool] = WeakKeyDictionary()


def gpus_of(engine: Engine) -> GpuPool:
    """The pool of an engine: the GPUs that this process may see."""
    if engine not in _pools:
        seen = os.environ.get(VISIBLE)
        devices = seen.split(",") if seen else map(str, range(torch.cuda.device_count()))
        _pools[engine] = GpuPool(tuple(each.strip() for each in devices if each.strip()))
    return _pools[engine]


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a replica, filled again whenever that is lost."""

    number: int
    replica: ServiceReplica
    gpus: tuple[str, ...] = ()
    fillings: int = 0
    moves: int = 0
    """How often its host was away when a replica was to start there."""
    leaving: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is ready for the first time, and when the service has failed."""
    task: asyncio.Task[None] | None = None


class ReplicaSet:
    """The replicas of one service. Used in one event loop."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        actor: type[Any],
        options: ServiceOptions,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.name, self.options = name, options
        self.lost = self.overloaded = 0
        self.slots: dict[int, Slot] = {}
        self._engine, self._actor, self._args, self._kwargs = engine, actor, args, kwargs
        self._router = Router()
        self._waiting: dict[asyncio.Future[ServiceReplica], RouteChoice] = {}
        self._over: HoldfastError | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._scaling = asyncio.Lock()

    @property
    def replicas(self) -> list[ServiceReplica]:
        """The replicas of all slots, in their order."""
        return [self.slots[number].replica for number in sorted(self.slots)]

    @property
    def queued(self) -> int:
        """How many calls wait for a replica."""
        return len(self._waiting)

    def check(self) -> None:
        """Raise `ServiceFailed` or `ServiceClosed` if the service is over."""
        if self._over is not None:
            raise again(self._over)

    async def scale(self, count: int) -> None:
        """Start replicas, or let the last ones end their calls and leave. Raises `ServiceFailed`."""
        async with self._scaling:
            self.check()
            leaving = [self.slots[number] for number in sorted(self.slots)[count:]]
            missing = [number for number in range(count) if number not in self.slots]
            if self.options.with_gpus and missing:
                taken = gpus_of(self._engine).take(len(missing) * self.options.procs)
            else:
                taken = ()
            for place, number in enumerate(missing):
                slot = Slot(number, self._new(number, 0, (), 0))
                slot.gpus = taken[place * self.options.procs : (place + 1) * self.options.procs]
                self.slots[number] = slot
                slot.task = asyncio.create_task(self._keep(slot))
            await asyncio.gather(*[self._drain(slot) for slot in leaving])
            for number in missing:
                await self.slots[number].ready.wait()
            self.check()

    async def acquire(self, choice: RouteChoice) -> ServiceReplica:
        """Wait for a replica; the caller must `release` it. Raises `Overloaded`."""
        self.check()
        found = self._router.choose(self.replicas, choice)
        if found is not None:
            return found
        if len(self._waiting) >= self.options.queue:
            self.overloaded += 1
            raise Overloaded(self.name, len(self._waiting))
        waiting: asyncio.Future[ServiceReplica] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = choice
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.release(waiting.result())
            raise
        finally:
            self._waiting.pop(waiting, None)

    def release(self, replica: ServiceReplica) -> None:
        """Take back a replica after a call."""
        replica.outstanding -= 1
        self.settle()

    def settle(self) -> None:
        """Give replicas to waiting calls, as far as there are free ones; wake what waits for idle ones."""
        self._idle.set()
        for waiting, choice in tuple(self._waiting.items()):
            if not any(each.routable for each in self.replicas):
                return
            if not waiting.done() and (found := self._router.choose(self.replicas, choice)) is not None:
                waiting.set_result(found)
                del self._waiting[waiting]

    def took_over(self, replica: ServiceReplica, lost: str, seconds: float) -> None:
        """Tell that a replica answered a call, which a lost one had before."""
        self._tell(replica, "took_over", lost, seconds)

    async def close(self) -> None:
        """End all replicas; waiting calls raise `ServiceClosed`. Idempotent."""
        self._end(ServiceClosed(self.name))
        tasks = [slot.task for slot in self.slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        slots, self.slots = tuple(self.slots.values()), {}
        await asyncio.gather(*[slot.replica.stop() for slot in slots])
        for slot in slots:
            self._free_gpus(slot)
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _keep(self, slot: Slot) -> None:
        failures, since = 0, time.monotonic()
        while not slot.leaving:
            replica = slot.replica = self._new(slot.number, slot.fillings, slot.gpus, slot.moves)
            slot.fillings += 1
            try:
                await replica.start(self._engine, self._actor, self._args, self._kwargs)
                if self.options.prepare is not None:
                    async with asyncio.timeout(self.options.timeout):
                        await self.options.prepare(replica)
                if replica.health == "lost":
                    raise HoldfastError(f"replica {replica.name} was lost: {replica.why}")
            except Exception as error:
                self._tell(replica, "start_failed", describe(error))
                await replica.stop()
                if isinstance(error, HostAway):
                    slot.moves += 1
                    if slot.moves % len(self.options.hosts):
                        continue
                failures += 1
                retryable = isinstance(error, HoldfastError) and error.retryable and not isinstance(error, ProcessLost)
                passing = retryable and time.monotonic() - since < AWAY_SECONDS
                if failures >= self.options.start_failures and not passing:
                    self._end(ServiceFailed(self.name, failures, describe(error)))
                    return
                await asyncio.sleep(min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(failures - 1, 10)))
                continue
            failures = 0
            replica.health = "ready"
            self._tell(replica, "ready")
            slot.ready.set()
            self.settle()
            await replica.gone.wait()
            since = time.monotonic()
            self._start(replica.stop())

    async def _drain(self, slot: Slot) -> None:
        """Let a replica end its calls, then stop it."""
        slot.leaving = True
        if slot.replica.health == "ready":
            slot.replica.health = "draining"
            deadline = time.monotonic() + self.options.drain
            while slot.replica.load and slot.replica.health == "draining" and time.monotonic() < deadline:
                self._idle.clear()
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._idle.wait()
                except TimeoutError:
                    break
        if slot.task is not None:
            slot.task.cancel()
            await asyncio.gather(slot.task, return_exceptions=True)
        await slot.replica.stop()
        self._tell(slot.replica, "stopped")
        self._free_gpus(slot)
        self.slots.pop(slot.number, None)

    def _new(self, number: int, filling: int, gpus: tuple[str, ...], moves: int) -> ServiceReplica:
        name = f"{self.name}-{number}" + (f".{filling}" if filling else "")
        return ServiceReplica(name, number, self.options, gpus, self._was_lost, moves)

    def _was_lost(self, replica: ServiceReplica, served: bool) -> None:
        if served:
            self.lost += 1
            self._tell(replica, "lost", replica.why)
        self._idle.set()

    def _end(self, error: HoldfastError) -> None:
        self._over = self._over or error
        for waiting in tuple(self._waiting):
            if not waiting.done():
                waiting.set_exception(again(self._over))
        for slot in self.slots.values():
            slot.ready.set()

    def _tell(
        self,
        replica: ServiceReplica,
        kind: Literal["ready", "lost", "start_failed", "stopped", "took_over"],
        detail: str = "",
        seconds: float = 0.0,
    ) -> None:
        if self.options.observer is not None:
            self.options.observer(
                ReplicaEvent(
                    time=time.monotonic(),
                    service=self.name,
                    replica=replica.name,
                    slot=replica.slot,
                    kind=kind,
                    detail=detail,
                    seconds=seconds,
                )
            )

    def _free_gpus(self, slot: Slot) -> None:
        if slot.gpus:
            gpus_of(self._engine).give_back(slot.gpus)
            slot.gpus = ()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
