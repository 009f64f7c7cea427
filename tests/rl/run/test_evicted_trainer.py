"""A trainer that the others took for dead is killed when it says so, and another one takes its place."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.rl.engine.errors import ActorDied, EndpointFailed
from holdfast.rl.engine.local import LocalEngine
from holdfast.rl.run.errors import RunFailed
from holdfast.rl.run.trainer_processes import MemberProcess
from holdfast.rl.trainers.errors import TrainerEnded, TrainerEvicted
from support.samples.actors import Counter


async def test_a_trainer_that_was_evicted_is_killed_and_counts_as_dead() -> None:
    ends: asyncio.Queue[str] = asyncio.Queue()
    async with LocalEngine() as engine, asyncio.timeout(20.0):
        process = MemberProcess(await engine.start("trainer-0", Counter, on_exit=ends.put_nowait))
        with pytest.raises(ActorDied, match=r"trainer-0 .* cannot do fail: .*evicted in epoch 2"):
            await process.call("fail", TrainerEvicted("evicted in epoch 2: silent for 3 s"))
        assert "SIGKILL" in await ends.get()


async def test_other_errors_of_a_trainer_are_told_and_leave_its_process() -> None:
    async with LocalEngine() as engine, asyncio.timeout(20.0):
        process = MemberProcess(await engine.start("trainer-0", Counter))
        with pytest.raises(RunFailed, match=r"^trainer-0 has ended: nothing is committed$"):
            await process.call("fail", TrainerEnded("nothing is committed"))
        with pytest.raises(EndpointFailed, match="Traceback"):
            await process.call("fail", TrainerEnded("TypeError: of holdfast", fault=True))
        assert await process.call("add") == 1
