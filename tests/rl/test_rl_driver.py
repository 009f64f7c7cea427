"""The driver over an engine without processes: it starts workers, replaces dead ones and ends runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.comms.errors import HoldfastError
from holdfast.rl.crew import Crew, Site
from holdfast.rl.driver import RunFailed, TrainingDriver
from holdfast.rl.happenings import Happening, WorkerLost, WorkerStarted
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.roles import wire
from holdfast.rl.units import Unit

RECIPE = Recipe(steps=1, units=1, lag=0)
SITE = Site(address="", job="test", key=bytes(32), register="memory://test", replicas=2, keep=3)


class FakeWorker:
    """A worker without a process."""

    def __init__(self, name: str, pid: int, args: tuple[Any, ...], on_exit: Callable[[str], None]) -> None:
        self.name, self.pid, self.args, self.exit = name, pid, args, on_exit
        self.killed = self.closed = False

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """An engine that starts fake workers."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.broken = False

    def start(self, name: str, body: Callable[..., None], *args: Any, on_exit: Callable[[str], None]) -> FakeWorker:
        if self.broken:
            raise HoldfastError("the engine is broken")
        self.workers[name] = FakeWorker(name, len(self.workers) + 1, args, on_exit)
        return self.workers[name]


class World:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.heard: list[Happening] = []
        self.driver = TrainingDriver(RECIPE, Crew(), SITE, self.engine, self.heard.append)

    def of(self, kind: type[Happening]) -> list[Any]:
        return [happening for happening in self.heard if isinstance(happening, kind)]

    async def call(self, method: str, worker: str, message: Any) -> bytes:
        answer = self.driver.service.handlers[method](worker, wire.encode(message))
        return answer if isinstance(answer, bytes) else await answer

    async def take(self, published: int) -> bytes:
        return await self.call("take", "trainer-0", wire.TakeRequest(0, (), 1, 0, 2, published))


def scenario(body: Callable[[World], Awaitable[None]], timeout: float = 10.0) -> World:
    """Run the driver; `body` plays the workers."""
    world = World()

    async def within() -> None:
        running = asyncio.create_task(world.driver.run(timeout))
        await asyncio.sleep(0.01)
        try:
            await body(world)
        except BaseException:
            running.cancel()
            raise
        await running

    try:
        asyncio.run(within())
    finally:
        assert all(worker.closed for worker in world.engine.workers.values())
    return world


def test_workers_are_started_and_told_where_the_driver_is() -> None:
    async def body(world: World) -> None:
        workers = world.engine.workers
        assert sorted(workers) == [
            "generator-0", "generator-1", "holder-0", "holder-1", "trainer-0", "trainer-1", "trainer-2"
        ]  # fmt: skip
        assert all(worker.args[0].address.startswith("127.0.0.1:") for worker in workers.values())
        world.driver.service.fail(HoldfastError("enough"))

    with pytest.raises(HoldfastError, match="enough"):
        scenario(body)


def test_a_dead_generator_is_replaced_and_its_unit_goes_to_another() -> None:
    async def body(world: World) -> None:
        await world.take(published=0)
        workers = world.engine.workers
        for _ in range(2):
            await world.call("work", "generator-0", wire.WorkRequest())
        workers["generator-0"].exit("was ended by SIGKILL")
        (lost,) = world.of(WorkerLost)
        assert (lost.name, len(lost.requeued)) == ("generator-0", 2)
        assert world.of(WorkerStarted)[-1].replaces == "generator-0"
        assert workers["generator-2"].args[1] == "generator-2"
        reply = wire.decode(await world.call("work", "generator-2", wire.WorkRequest()), wire.WorkReply)
        assert reply.unit == lost.requeued[0] == Unit(0, 0, 0, "evaluate")
        assert set(world.driver.alive("generator")) == {"generator-1", "generator-2"}
        world.driver.service.fail(HoldfastError("enough"))

    with pytest.raises(HoldfastError, match="enough"):
        scenario(body)


def test_a_trainer_started_later_does_not_begin_the_job() -> None:
    """The first trainers warm their weights up; a later one takes over those of the others."""

    async def body(world: World) -> None:
        workers = world.engine.workers
        assert [workers[f"trainer-{n}"].args[-1] for n in range(3)] == [True, True, True]
        workers["trainer-0"].exit("was ended by SIGKILL")
        assert workers["trainer-3"].args[-1] is True
        await world.take(published=0)
        workers["trainer-1"].exit("was ended by SIGKILL")
        assert workers["trainer-4"].args[-1] is False
        world.driver.service.fail(HoldfastError("enough"))

    with pytest.raises(HoldfastError, match="enough"):
        scenario(body)


def test_a_run_in_which_workers_keep_dying_fails_and_says_how() -> None:
    async def body(world: World) -> None:
        for number in range(2, 20):
            world.engine.workers[f"generator-{number - 1}"].exit("exited with status 7")
            if world.driver.service.failure is not None:
                return

    with pytest.raises(RunFailed, match="exited with status 7"):
        scenario(body)


def test_a_worker_that_cannot_be_replaced_fails_the_run() -> None:
    async def body(world: World) -> None:
        world.engine.broken = True
        world.engine.workers["holder-0"].exit("was ended by SIGKILL")

    with pytest.raises(HoldfastError, match="the engine is broken"):
        scenario(body)


def test_trainers_that_all_return_too_early_fail_the_run() -> None:
    async def body(world: World) -> None:
        for number in range(3):
            world.engine.workers[f"trainer-{number}"].exit("")

    with pytest.raises(RunFailed, match="none has committed all steps"):
        scenario(body)


def test_a_run_that_takes_too_long_fails_and_says_how_far_it_came() -> None:
    async def body(world: World) -> None:
        pass

    with pytest.raises(RunFailed, match="0 of 1 steps"):
        scenario(body, timeout=0.05)


def test_a_whole_run_ends_with_the_digest_and_no_worker() -> None:
    async def body(world: World) -> None:
        workers, service = world.engine.workers, world.driver.service
        service.buffer.commit(1)
        await world.call("finished", "trainer-0", wire.Finished("abc", 1, 2, 1))
        while not service.done:
            reply = wire.decode(await world.call("work", "generator-0", wire.WorkRequest()), wire.WorkReply)
            assert reply.unit is not None
            service.ledger.complete(reply.unit)
        for worker in workers.values():
            asyncio.get_running_loop().call_later(1.1, worker.exit, "")

    world = scenario(body)
    assert world.of(WorkerLost) == []
    assert list(world.driver.service.digests.values()) == ["abc"]


def test_a_stuck_generator_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.rl.driver.LEASE_SECONDS", 0.1)

    async def body(world: World) -> None:
        await world.take(published=0)
        await world.call("work", "generator-0", wire.WorkRequest())
        await asyncio.sleep(1.5)
        assert world.engine.workers["generator-0"].killed
        assert not world.engine.workers["generator-1"].killed
        world.driver.service.fail(HoldfastError("enough"))

    with pytest.raises(HoldfastError, match="enough"):
        scenario(body)
