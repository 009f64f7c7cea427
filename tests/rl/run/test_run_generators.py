"""The generators of a run serve what switches commit, and get requests as batches; lost copies are seen restored."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="generators need transformers: pip install 'holdfast[rl]'")

from holdfast.comms.transport.liveness import this_host
from holdfast.harness.training import PRELOAD
from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.actors.service import ReplicaEvent, ReplicaStatus
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.errors import UpdateFailed
from holdfast.rl.grpo.loop import running
from holdfast.rl.run import generation
from holdfast.rl.run.generation import BatchedRequests, Generators, Holders
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import CopiesRestored, Event, WeightsServed
from holdfast.rl.run.services import RunServices
from holdfast.rl.run.telemetry import Observer, RunTelemetry
from holdfast.store import WeightStore
from support.rl.event_loop import until
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
            config = configured(generator__replicas=2)
            services = RunServices(config, engine, telemetry=telemetry)
            found = Generators(config, services, SOURCE, store.url, telemetry)
            try:
                await found.start()
                publish(store, 0)
                await found.advance(0)
                yield found
            finally:
                await services.close()
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
    return [each.pid for each in generators._services.status()[0].replicas if each.health == "ready"]


async def test_after_a_switch_every_request_gets_its_version(store: WeightStore, tmp_path: Path) -> None:
    events: list[Event] = []
    async with two_generators(store, tmp_path, events.append) as generators:
        for version in range(1, 9):
            publish(store, version)
            await generators.advance(version)
            assert {await drawn_with(generators, seed) for seed in range(4)} == {version}
        served = [(each.version, each.process) for each in events if isinstance(each, WeightsServed)]
        assert sorted(served[-2:]) == [(8, "generator-0"), (8, "generator-1")]
        status = generators._services.status()[0]
        assert status.version == 8 and all(each.ready for each in status.replicas)


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
        await until(lambda: len(pids(generators)) == 2, 100.0)
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


async def restored_after_a_loss(store: WeightStore, services: Any, path: Path) -> list[Event]:
    """The events after the loss of a holder that has the pid of this process, on another host."""
    told = list[Event]()
    lost = ReplicaStatus(name="holder-1", slot=1, host="", pid=os.getpid(), health="lost", load=0, restarts=0)
    with RunDirectory(path / "run").open() as directory:
        holders = Holders(configured(store__copies=1), services, store, RunTelemetry(directory, (told.append,)))
        async with running(holders.watch):
            holders.hear(ReplicaEvent(time=0.0, replica=lost, kind="lost"))
            await until(lambda: told)
    return told


async def test_a_holder_of_another_host_with_the_same_pid_is_not_taken_for_the_lost_one(
    store: WeightStore, tmp_path: Path
) -> None:
    publish(store, 1)
    [holder] = store.holders(1)
    assert (holder.peer.host, holder.pid) == (this_host(), os.getpid())
    hosts = []

    def processes(role: str) -> dict[tuple[str, int], str]:
        hosts.append("another host" if not hosts else this_host())
        return {(hosts[-1], os.getpid()): "holder-0"}

    [restored] = await restored_after_a_loss(store, SimpleNamespace(processes=processes), tmp_path)
    assert isinstance(restored, CopiesRestored) and restored.versions == 1
    assert len(hosts) > 1, "the one of another host has no copy"


async def test_a_holder_that_is_lost_while_the_others_start_ends_no_run(store: WeightStore, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "services").open() as directory:
        async with LocalEngine() as engine:
            services = RunServices(configured(), engine, telemetry=RunTelemetry(directory))
            events = await restored_after_a_loss(store, services, tmp_path)
    assert [type(each) for each in events] == [CopiesRestored]


def request(token: int, *, samples: int = 2, version: int | None = 0) -> SamplingRequest:
    return SamplingRequest(
        prompts=((token,),),
        samples=samples,
        seeds=tuple(10 * token + sample for sample in range(samples)),
        max_new_tokens=4,
        temperature=1.0,
        version=version,
    )


class Generator:
    """Answers with the seed of each sample as its token, and keeps the requests that it got."""

    def __init__(self) -> None:
        self.requests: list[SamplingRequest] = []

    async def route(self, asked: SamplingRequest) -> Sequence[Completion]:
        self.requests.append(asked)
        await asyncio.sleep(0)
        if any(prompt == (13,) for prompt in asked.prompts):
            raise RuntimeError("unlucky")
        return [Completion(tokens=(seed,), logprobs=(-1.0,), versions=(0,), finish="stop") for seed in asked.seeds]


def ask(requests: Sequence[SamplingRequest], size: int) -> tuple[Generator, list[object]]:
    generator = Generator()

    async def main() -> list[object]:
        batched = BatchedRequests(generator.route, size)
        return list(await asyncio.gather(*map(batched, requests), return_exceptions=True))

    return generator, asyncio.run(main())


def test_each_request_gets_the_completions_of_its_own_seeds_and_batches_are_the_same_each_time() -> None:
    asked = [request(token) for token in range(1, 8)]
    generator, replies = ask(asked, 3)
    assert ask(asked, 3)[0].requests == generator.requests
    assert [len(each.prompts) for each in generator.requests] == [3, 3, 1]
    for each, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, list) and tuple(one.tokens[0] for one in reply) == each.seeds


def test_requests_of_other_kinds_are_not_joined() -> None:
    generator, _ = ask([request(1), request(2, version=1), request(3), request(4, samples=3)], 8)
    assert sorted(len(each.prompts) for each in generator.requests) == [1, 1, 2]


def test_a_failure_reaches_the_requests_of_its_batch_alone() -> None:
    _, replies = ask([request(11), request(12), request(13), request(14)], 2)
    assert [isinstance(each, RuntimeError) for each in replies] == [False, False, True, True]


def test_a_request_that_is_given_up_does_not_disturb_the_others() -> None:
    generator = Generator()

    async def main() -> object:
        batched = BatchedRequests(generator.route, 4)
        first, second = (asyncio.ensure_future(batched(request(token))) for token in (1, 2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    reply = asyncio.run(main())
    assert isinstance(reply, list) and [one.tokens[0] for one in reply] == [20, 21]
    with pytest.raises(RuntimeError):
        asyncio.run(BatchedRequests(generator.route, 1)(request(13)))
