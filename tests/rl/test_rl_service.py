"""The driver's calls: units go out as versions come, samples wait for their step, and every call ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.rl.happenings import Evaluated, Happening, Published, StepCommitted, UnitDone
from holdfast.rl.learning import generate
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.roles import wire
from holdfast.rl.roles.service import Service
from holdfast.rl.units import Unit

RECIPE = Recipe(steps=2, units=2, prompts=2, group=2, lag=0, evaluate_every=100)


class World:
    """A service, the events that it reported, and calls into it."""

    def __init__(self, recipe: Recipe = RECIPE) -> None:
        self.heard: list[Happening] = []
        self.service = Service(recipe, self.heard.append)

    def of(self, kind: type[Happening]) -> list[Any]:
        return [happening for happening in self.heard if isinstance(happening, kind)]

    async def call(self, method: str, worker: str, message: Any) -> bytes:
        answer = self.service.handlers[method](worker, wire.encode(message))
        return answer if isinstance(answer, bytes) else await answer

    async def work(self, worker: str, done: Unit | None = None, result: bytes = b"") -> wire.WorkReply:
        return wire.decode(await self.call("work", worker, wire.WorkRequest(done, result)), wire.WorkReply)

    async def take(self, step: int, units: tuple[int, ...], published: int, rank: int = 0) -> tuple[bytes, ...] | None:
        request = wire.TakeRequest(step, units, 1, rank, 2, published)
        return wire.decode(await self.call("take", f"trainer-{rank}", request), wire.TakeReply).samples

    async def finish(self, worker: str, digest: str) -> None:
        await self.call("finished", worker, wire.Finished(digest, 1, 2, self.service.recipe.steps))


def samples(reward: float) -> bytes:
    n = RECIPE.unit_samples
    return wire.pack_samples(
        generate.Samples(
            torch.zeros(n, 6, dtype=torch.int64),
            torch.zeros(n, 2, dtype=torch.int64),
            torch.zeros(n, 2),
            torch.full((n,), reward),
        )
    )


def scenario(body: Callable[[World], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await body(World())

    asyncio.run(within())


def test_a_run_generates_trains_and_evaluates() -> None:
    async def body(world: World) -> None:
        assert (await world.work("g")).unit is None
        waiting = asyncio.create_task(world.take(0, (0, 1), published=0))
        reply = await world.work("g")
        while reply.unit is not None and reply.unit.step == 0:
            result = wire.encode(wire.EvaluationScore(0.5, "")) if reply.unit.kind == "evaluate" else samples(1.0)
            reply = await world.work("g", reply.unit, result)
        assert await waiting == (samples(1.0), samples(1.0))
        assert [each.exact_match for each in world.of(Evaluated)] == [0.5]

        assert await world.take(1, (0,), published=1) is None
        assert [(each.step, each.reward, each.size) for each in world.of(StepCommitted)] == [(0, 1.0, 2)]
        for number in range(2):
            reply = await world.work(f"g{number}")
            assert reply.unit == Unit(1, 1, number, "generate")
            await world.call("work", f"g{number}", wire.WorkRequest(reply.unit, samples(0.0)))
            world.service.lose(f"g{number}")
        assert await world.take(1, (1, 0), published=1) == (samples(0.0), samples(0.0))

        assert not world.service.done
        await world.finish("trainer-0", "same")
        reply = await world.work("h")
        assert reply.unit == Unit(2, 2, 0, "evaluate")
        await world.call("work", "h", wire.WorkRequest(reply.unit, wire.encode(wire.EvaluationScore(0.75, ""))))
        await world.service.until_done()
        assert [each.version for each in world.of(Published)] == [0, 1, 2]
        world.service.end()
        assert (await world.work("g")).over

    scenario(body)


def test_a_unit_of_a_dead_generator_is_handed_to_one_that_waits() -> None:
    async def body(world: World) -> None:
        await world.take(0, (), published=0)
        held = [await world.work("dies") for _ in range(3)]
        waiting = asyncio.create_task(world.work("waits"))
        await asyncio.sleep(0.01)
        requeued = world.service.lose("dies")
        assert requeued == tuple(sorted(reply.unit for reply in held if reply.unit))
        assert (await waiting).unit == requeued[0]

    scenario(body)


def test_a_call_of_a_dead_generator_that_still_waits_is_given_no_unit() -> None:
    """Such a unit would never be released: units are released when their worker is lost, which was before."""

    async def body(world: World) -> None:
        pending = asyncio.create_task(world.work("dies"))
        await asyncio.sleep(0.05)
        assert world.service.lose("dies") == ()
        await world.take(0, (0,), 0)
        assert (await pending).unit is None
        assert all(lease.worker != "dies" for lease in world.service.ledger.leases)
        late = await world.work("dies")
        assert late.unit is None, "a call that was on its way when its worker died"
        units = [(await world.work("lives")).unit for _ in range(RECIPE.units)]
        assert None not in units, "all units can be had"

    scenario(body)


def test_a_result_that_comes_twice_counts_once() -> None:
    async def body(world: World) -> None:
        await world.take(0, (), published=0)
        await world.work("slow")
        unit = (await world.work("slow")).unit
        assert unit is not None and unit.kind == "generate"
        await world.work("slow", unit, samples(1.0))
        await world.work("fast", unit, samples(1.0))
        assert len(world.of(UnitDone)) == 1

    scenario(body)


def test_generation_that_cannot_be_reproduced_fails_the_run() -> None:
    async def body(world: World) -> None:
        await world.take(0, (), published=0)
        unit = Unit(0, 0, 0, "generate")
        await world.work("a", unit, samples(1.0))
        with pytest.raises(Mismatch):
            await world.work("b", unit, samples(0.0))
        with pytest.raises(Mismatch, match="twice with different samples"):
            await world.service.until_done()

    scenario(body)


def test_trainers_that_end_with_different_weights_fail_the_run() -> None:
    async def body(world: World) -> None:
        world.service.buffer.commit(RECIPE.steps)
        await world.finish("trainer-0", "one")
        await world.finish("trainer-1", "other")
        with pytest.raises(Mismatch, match="different weights"):
            await world.service.until_done()

    scenario(body)


def test_a_step_that_was_never_generated_cannot_be_committed() -> None:
    async def body(world: World) -> None:
        with pytest.raises(ValueError, match="never generated"):
            await world.finish("trainer-0", "early")

    scenario(body)


def test_an_evaluation_that_cannot_be_made_is_given_up() -> None:
    async def body(world: World) -> None:
        await world.take(0, (), published=0)
        unit = Unit(0, 0, 0, "evaluate")
        await world.work("g", unit, b"")
        assert unit not in world.service.ledger.open
        assert not world.of(Evaluated)

    scenario(body)


@pytest.mark.parametrize("method", ["work", "take", "finished", "reached", "warmed"])
def test_a_malformed_message_is_refused_and_changes_nothing(method: str) -> None:
    async def body(world: World) -> None:
        with pytest.raises(CorruptData):
            answer = world.service.handlers[method]("w", b"\xc1")
            if not isinstance(answer, bytes):
                await answer
        assert world.heard == []

    scenario(body)
