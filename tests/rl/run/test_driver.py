"""The driver of a run: what it imports, its requests as batches, generators that serve what switches commit."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="generators need transformers: pip install 'holdfast[rl]'")

from holdfast.comms.transport.liveness import this_host
from holdfast.harness.training import PRELOAD
from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.actors.service import ReplicaEvent, ReplicaStatus
from holdfast.rl.config.run_config import Objective, Sampling
from holdfast.rl.config.toml import resolved
from holdfast.rl.data.episode import Completion, Group, Prompt, SamplingRequest
from holdfast.rl.data.prompts import CharacterTokenizer, PromptSource, arithmetic_training
from holdfast.rl.data.replay_buffer import ReplayBuffer, StalenessRule
from holdfast.rl.generators.errors import UpdateFailed
from holdfast.rl.grpo.batch import BatchColumns, EncodedBatch, collate
from holdfast.rl.grpo.loop import generate_episode, running, together
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.rewards.reward import Criterion, ExactMatch, Rubric
from holdfast.rl.run import generation
from holdfast.rl.run.generation import BatchedRequests, Generators, Holders
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import CopiesRestored, Event, WeightsServed
from holdfast.rl.run.services import RunServices
from holdfast.rl.run.telemetry import Observer, RunTelemetry
from holdfast.store import WeightStore
from support.event_loop import until
from support.programs.forked_programs import run_python
from support.rl.small_batches import completion, tiny_llama
from support.rl.training_runs import configured

RUN = """
import sys
from pathlib import Path
from holdfast.harness.training.driver import train_here
from holdfast.rl.config.toml import load_config
train_here(load_config(Path("run.toml")), Path("run"))
print("transformers" in sys.modules)
"""

COMMAND = """
import sys
from holdfast.ft.processes import zygote_start
from holdfast.harness.cli.app import app

def started(*modules):
    print("transformers.models.llama.modeling_llama" in modules, "torch" in sys.modules, end=" ")
    raise SystemExit(5)

zygote_start.start_early = started
for command in sys.argv[1:]:
    try:
        app(command.split())
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.thorough
def test_the_driver_of_a_whole_run_does_not_import_transformers(tmp_path: Path) -> None:
    """Its model is read, warmed up, and kept when it is the best, without the seconds that this import takes."""
    (tmp_path / "run.toml").write_text(
        resolved(configured(steps=1, model__warmup_steps=1, evaluation__every=1, evaluation__prompts=4))
    )
    assert run_python("-c", RUN, cwd=tmp_path).split() == ["False"]
    assert (tmp_path / "run" / "policy" / "config.json").is_file()
    best = next((tmp_path / "run" / "best").glob("*/config.json"))
    assert best.read_bytes() == (tmp_path / "run" / "policy" / "config.json").read_bytes()


def test_a_command_starts_its_zygote_before_it_imports_torch(tmp_path: Path) -> None:
    """In one interpreter: none of these commands goes further than that, and the last one starts no process."""
    begun = {
        "rl train nothing.toml": "True False 5",
        "rl resume nothing": "True False 5",
        "demo": "True False 5",
        "chaos run rl-demo": "False False 5",
        "rl train nothing.toml --dry-run": "2",
    }
    assert run_python("-c", COMMAND, *begun, cwd=tmp_path).splitlines() == list(begun.values())


GROUPS, GROUP = 32, 8
EPISODES = GROUPS * GROUP

MOST_CALLS_AN_EPISODE = 25
"""A quarter more than it takes, and less than half of what it took, which also grew with the tokens."""


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the calls of Python functions in the block."""
    found = [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        found[0] += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(before)


def batch_of(tokens: int) -> tuple[tuple[Group, ...], int]:
    """The groups of one batch, and the calls that it took to make, judge, store and take them."""
    judge = Judge(Rubric([Criterion("exact", 1.0, ExactMatch())]), CharacterTokenizer())
    source = PromptSource(arithmetic_training(), CharacterTokenizer(), seed=0)
    sampling = Sampling(group=GROUP, batch=16, max_new_tokens=tokens)
    buffer = ReplayBuffer(StalenessRule(groups=GROUPS))
    # made before the count begins
    drawn = [completion(((n + each) % 10 for each in range(tokens)), finish="length") for n in range(EPISODES)]

    async def route(request: SamplingRequest) -> Sequence[Completion]:
        await asyncio.sleep(0)
        return drawn[: len(request.seeds)]

    generate = BatchedRequests(route, 16)
    source.prompt(0)

    async def episode() -> None:
        prompt = source.prompt((await buffer.admit()).number)
        await generate_episode(prompt, generate, judge.evaluate, buffer, sampling, 0)

    async def body() -> tuple[tuple[Group, ...], int]:
        with counting() as calls:
            await together(*[episode] * GROUPS)
            batch = await buffer.take(0)
            EncodedBatch.of(batch, saved=False)
        return batch.groups, calls[0]

    return asyncio.run(body())


def test_an_episode_takes_few_calls_and_a_token_none() -> None:
    groups, short = batch_of(2)
    _, long = batch_of(200)
    print(f"\n{short / EPISODES:.1f} calls an episode of 2 tokens, {long / EPISODES:.1f} of 200")
    assert sum(len(each.episodes) for each in groups) == EPISODES
    assert short < MOST_CALLS_AN_EPISODE * EPISODES
    assert long - short < EPISODES * 198 / 10, "198 tokens more are no calls; a late timer is some"


def test_a_trainer_takes_no_call_for_an_episode() -> None:
    groups, _ = batch_of(2)

    def calls(groups: Sequence[Group]) -> int:
        columns = BatchColumns.of(groups)
        collate(columns, Objective())
        with counting() as found:
            collate(columns, Objective())
        return found[0]

    one, all_of_them = calls(groups[:1]), calls(groups)
    assert all_of_them - one < 12 * (GROUPS - 1), "only the advantages are computed by group"


SOURCE = tiny_llama(11)


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


async def test_after_a_switch_every_request_gets_its_version_though_generators_die_meanwhile(
    store: WeightStore, tmp_path: Path
) -> None:
    """Also if there is no generator for a moment; and those that come back have the newest version."""
    events: list[Event] = []
    async with two_generators(store, tmp_path, events.append) as generators:
        for version, killed in enumerate((0, 0, 0, 1, 2, 1), 1):
            publish(store, version)
            for pid in pids(generators)[:killed]:
                os.kill(pid, signal.SIGKILL)
            await generators.advance(version)
            assert {await drawn_with(generators, seed) for seed in range(4)} == {version}
        await until(lambda: len(pids(generators)) == 2)
        assert {await drawn_with(generators, seed) for seed in range(4)} == {6}
        assert generators._services.status()[0].version == 6
        served = [each.process for each in events if isinstance(each, WeightsServed) and each.version == 3]
        assert sorted(served) == ["generator-0", "generator-1"]
        publish(store, 8)  # the publisher of 7 died amid a step that the other trainers have committed
        assert await generators.advance(7) == 8
        assert {await drawn_with(generators, seed) for seed in range(4)} == {8}


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
        return [completion((seed,)) for seed in asked.seeds]


async def ask(requests: Sequence[SamplingRequest], size: int) -> tuple[Generator, list[object]]:
    generator = Generator()
    batched = BatchedRequests(generator.route, size)
    return generator, list(await asyncio.gather(*map(batched, requests), return_exceptions=True))


async def test_each_request_gets_the_completions_of_its_own_seeds_and_batches_are_the_same_each_time() -> None:
    asked = [request(token) for token in range(1, 8)]
    generator, replies = await ask(asked, 3)
    assert (await ask(asked, 3))[0].requests == generator.requests
    assert [len(each.prompts) for each in generator.requests] == [3, 3, 1]
    for each, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, list) and tuple(one.tokens[0] for one in reply) == each.seeds


async def test_only_first_draws_of_one_kind_are_joined() -> None:
    """When a second draw, a greedy one or one in a game is asked for depends on how long other things take."""
    generator, _ = await ask([request(1), request(2, version=1), request(3), request(4, samples=3)], 8)
    assert sorted(len(each.prompts) for each in generator.requests) == [1, 1, 2]
    sampling, prompts = Sampling(group=2, batch=8, max_new_tokens=4), [Prompt(number=n, tokens=(n,)) for n in (1, 2)]
    first, second = ([sampling.request(0, prompt, draw, None) for prompt in prompts] for draw in (0, 1))
    others = [sampling.turn(0, 1, 0, {0: (3,), 1: (4,)}, None), sampling.greedy([(5,)], None)]
    generator, _ = await ask([*first, *second, *others], 8)
    joined = sorted([token for (token,) in each.prompts] for each in generator.requests)
    assert joined == [[1], [1, 2], [2], [3, 4], [5]]


async def test_a_failure_reaches_the_requests_of_its_batch_alone() -> None:
    for size, failed in ((1, [False, False, True, False]), (2, [False, False, True, True])):
        _, replies = await ask([request(11), request(12), request(13), request(14)], size)
        assert [isinstance(each, RuntimeError) for each in replies] == failed


async def test_a_request_that_is_given_up_does_not_disturb_the_others() -> None:
    generator = Generator()
    batched = BatchedRequests(generator.route, 4)
    first, second = (asyncio.ensure_future(batched(request(token))) for token in (1, 2))
    await asyncio.sleep(0)
    first.cancel()
    reply = await second
    assert isinstance(reply, list) and [one.tokens[0] for one in reply] == [20, 21]
