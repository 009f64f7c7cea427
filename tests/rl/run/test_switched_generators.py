"""The generators of a run serve what the driver's switches commit, whatever happens to them meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="generators need transformers: pip install 'holdfast[rl]'")

from holdfast.harness.training.preload import PRELOAD
from holdfast.rl.actors.local import LocalEngine
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.errors import UpdateFailed
from holdfast.rl.run import generation
from holdfast.rl.run.generation import Generators
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Event, WeightsServed
from holdfast.rl.run.telemetry import Observer, RunTelemetry
from holdfast.store import WeightStore
from support.rl.small_batches import tiny_llama
from support.rl.training_runs import configured

SOURCE = tiny_llama(11)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore(f"sqlite://{tmp_path}/register.sqlite", replicas=1, keep=4) as found:
        yield found


@asynccontextmanager
async def two_generators(store: WeightStore, path: Path, *observers: Observer) -> AsyncIterator[Generators]:
    """Generators that serve version 0."""
    with RunDirectory(path / "run").open() as directory:
        async with LocalEngine(preload=PRELOAD) as engine, asyncio.timeout(100.0):
            telemetry = RunTelemetry(directory, observers)
            found = Generators(configured(generator__replicas=2), engine, SOURCE, store.url, {}, telemetry)
            try:
                await found.start()
                publish(store, 0)
                await found.advance(0)
                yield found
            finally:
                await found.close()


def publish(store: WeightStore, version: int, words: int = 11) -> None:
    store.publish(version, tiny_llama(words).build().state_dict())


async def drawn_with(generators: Generators, seed: int = 0) -> int:
    """The version that a request without one is served with."""
    asked = SamplingRequest(prompts=((1, 2),), samples=1, seeds=(seed,), max_new_tokens=3, temperature=1.0)
    found: list[Completion] = list(await generators.generate(asked))
    (version,) = set(found[0].versions)
    return version


def pids(generators: Generators) -> list[int]:
    return [each.pid for each in generators.status()[0].replicas if each.health == "ready"]


async def test_after_a_switch_every_request_gets_its_version(store: WeightStore, tmp_path: Path) -> None:
    events: list[Event] = []
    async with two_generators(store, tmp_path, events.append) as generators:
        for version in range(1, 9):
            publish(store, version)
            await generators.advance(version)
            assert {await drawn_with(generators, seed) for seed in range(4)} == {version}
        served = [(each.version, each.process) for each in events if isinstance(each, WeightsServed)]
        assert sorted(served[-2:]) == [(8, "generator-0"), (8, "generator-1")]
        status = generators.status()[0]
        assert status.version == 8 and [each.version for each in status.replicas] == [8, 8]


async def test_generators_that_die_while_versions_are_switched_come_back_with_the_newest_one(
    store: WeightStore, tmp_path: Path
) -> None:
    """Also if there is no generator for a moment."""
    async with two_generators(store, tmp_path) as generators:
        for version, count in ((1, 1), (2, 2), (3, 1)):
            publish(store, version)
            for pid in pids(generators)[:count]:
                os.kill(pid, signal.SIGKILL)
            await generators.advance(version)
            assert {await drawn_with(generators, seed) for seed in range(4)} == {version}
        while len(pids(generators)) < 2:
            await asyncio.sleep(0.01)
        assert {await drawn_with(generators, seed) for seed in range(4)} == {3}


async def test_generators_that_cannot_take_a_version_are_replaced_and_it_is_an_error_if_none_can(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "SWITCHES", 2)
    async with two_generators(store, tmp_path) as generators:
        before = pids(generators)
        publish(store, 1, words=12)
        with pytest.raises(UpdateFailed, match="cannot take it"):
            await generators.advance(1)
        assert set(pids(generators)) != set(before)
        publish(store, 2)
        await generators.advance(2)
        assert await drawn_with(generators) == 2
