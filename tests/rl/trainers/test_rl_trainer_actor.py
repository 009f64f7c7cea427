"""A trainer actor and a generator in one process: batches by number, reports once, errors with their cause."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("transformers", reason="trainers need transformers: pip install 'holdfast[rl]'")

from holdfast.comms.errors import Revoked, StaleEpoch
from holdfast.comms.system.keys import create_key
from holdfast.rl.config.run_config import RunConfig, StoreConfig
from holdfast.rl.data.episode import Group, Prompt, SamplingRequest
from holdfast.rl.data.replay_buffer import Batch, BufferState, StalenessRule
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.grpo.batch import EncodedBatch
from holdfast.rl.run.evaluation import BestVersion, read_best
from holdfast.rl.run.trainer_processes import TrainerGroup
from holdfast.rl.trainers.layouts import NonFiniteLoss
from holdfast.rl.trainers.trainer_actor import TrainerActor, TrainerEnded, TrainerLeftOut
from holdfast.rl.trainers.training import BadBatch
from holdfast.store import WeightStore
from support.rl.small_batches import episode, objective, random_batch, tiny_llama, trainer_config
from support.waiting import PATIENCE

SOURCE = tiny_llama(11)
RIGHT = 7


def config_of(strategy: str = "ddp", batches: int = 12, **more: Any) -> RunConfig:
    """The store has one copy of the versions that it keeps, which are all that a test asks for."""
    config = trainer_config(strategy, batches, units=2, rate=0.03, **more)
    kept = msgspec.structs.replace(config.algorithm, staleness=20)
    return msgspec.structs.replace(config, algorithm=kept, store=StoreConfig(copies=1))


class InProcess:
    """A trainer that is called without a process between."""

    def __init__(self, actor: TrainerActor) -> None:
        self.actor = actor

    async def call(self, method: str, /, *args: Any, timeout: float | None = None) -> Any:
        return await getattr(self.actor, method)(*args)


class Site:
    """The job and the store of a test; opens trainers and generators, and closes them at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        create_key(folder / "key")
        self.url = f"sqlite://{folder}/weights.sqlite"
        self.store = WeightStore(self.url, replicas=1, keep=20)
        self._jobs = 0
        self.opened = contextlib.ExitStack()
        self.opened.callback(self.store.close)

    def trainer(self, config: RunConfig, checkpoints: str = "") -> TrainerActor:
        self._jobs += 1
        session = {
            "job": f"job-{self._jobs}",
            "register": f"sqlite://{self._folder}/job-{self._jobs}.sqlite",
            "key_file": str(self._folder / "key"),
            "backend": "shm",
            "size": 1,
        }
        trainer = TrainerActor(config, SOURCE, self.url, session, checkpoints)
        return self.opened.enter_context(contextlib.closing(trainer))

    def generator(self) -> TransformersGenerator:
        return self.opened.enter_context(contextlib.closing(TransformersGenerator(SOURCE, self.url)))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    with found.opened:
        yield found


async def batch_for(generator: TransformersGenerator, step: int, version: int | None = None) -> Batch:
    """Two groups of eight tokens; the reward is for each token `RIGHT`."""
    prompts = ((1, 2), (3,))
    seeds = tuple(range(100 * step, 100 * step + 16))
    asked = SamplingRequest(prompts=prompts, samples=8, seeds=seeds, max_new_tokens=2, temperature=1.0, version=version)
    found = await generator.generate(asked)
    groups = []
    for number, tokens in enumerate(prompts):
        prompt = Prompt(number=2 * step + number, tokens=tokens)
        episodes = tuple(
            episode(
                prompt,
                each.tokens,
                float(each.tokens.count(RIGHT)),
                logprobs=each.logprobs,
                versions=each.versions,
                finish=each.finish,
            )
            for each in found[8 * number : 8 * number + 8]
        )
        groups.append(Group(number=prompt.number, prompt=prompt, episodes=episodes))
    after = BufferState(rule=StalenessRule(groups=2), batch=step + 1, begun=2 * step + 2)
    return Batch(step=step, groups=tuple(groups), after=after)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
async def test_a_policy_learns_what_is_rewarded(site: Site, strategy: str) -> None:
    """Each batch is drawn with exactly the version before it; rewards rise; the last version is served as trained."""
    config = config_of(strategy)
    trainer, generator = site.trainer(config), site.generator()
    group = TrainerGroup(timeout=60.0)
    group.add(InProcess(trainer))
    await trainer.begin()
    position = await group.position()
    assert (position.step, position.buffer) == (0, None)
    rewards = []
    for step in range(config.steps):
        batch = await batch_for(generator, step, version=step)
        rewards.append(sum(each.reward for one in batch.groups for each in one.episodes) / 32)
        report = await group.step(batch)
        assert (report.step, report.version) == (step, step + 1)
        assert report.figures["gradient_norm"] >= 0.0
        assert await trainer.train(EncodedBatch.of(batch)) == report, "a batch is trained on once"
    digest = await trainer.finished()
    assert len(digest) == 32
    assert await generator.update(config.steps) == config.steps
    assert (await trainer.status()).committed == config.steps
    with pytest.raises(TrainerEnded, match="all batches are committed"):
        await trainer.train(EncodedBatch.of(await batch_for(generator, config.steps)))
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5, rewards


async def test_a_run_goes_on_with_the_buffer_that_was_saved(site: Site, tmp_path: Path) -> None:
    config, saved = config_of(batches=6, checkpoint_every=2), str(tmp_path / "saved")
    first, generator = site.trainer(config, saved), site.generator()
    await first.begin()
    batches = []
    for step in range(3):
        batches.append(await batch_for(generator, step, version=step))
        await first.train(EncodedBatch.of(batches[-1]))
    await asyncio.to_thread(first.close)
    with pytest.raises(TrainerEnded, match="it was closed"):
        await first.finished()
    second = site.trainer(msgspec.structs.replace(config, steps=3), saved)
    await second.begin()
    position = await second.position()
    assert (position.step, position.buffer) == (2, batches[1].after)
    assert (await second.train(EncodedBatch.of(batches[2]))).version == 3
    await second.finished()


async def test_the_steps_wait_for_a_batch_and_get_one_of_the_newest(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that does not take part answers None once two later batches have come. An epoch ends the wait."""

    def over() -> None:
        raise Revoked(1, "a member died")

    trainer = site.trainer(config_of())
    with pytest.raises(Revoked):
        trainer._take(0, over)
    batches = [random_batch(step) for step in range(4)]
    waiting = asyncio.create_task(asyncio.to_thread(trainer._take, 0, lambda: None))
    replies = [asyncio.create_task(trainer.train(each)) for each in batches[:1]]
    assert (await waiting).step == 0
    replies += [asyncio.create_task(trainer.train(each)) for each in batches[1:]]
    assert await asyncio.wait_for(replies[0], PATIENCE) is None and await asyncio.wait_for(replies[1], PATIENCE) is None
    assert not replies[2].done() and (await trainer.status()).newest_batch == 3
    monkeypatch.setattr("holdfast.rl.trainers.trainer_actor.BATCH_SECONDS", 0.0)
    assert trainer._take(1, over).step == 1
    with pytest.raises(BadBatch, match=r"the batch of step 0 .* did not come .* the newest is that of step 3"):
        trainer._take(0, over)
    trainer.close()
    for reply in replies[2:]:
        with pytest.raises(TrainerEnded, match="it was closed"):
            await reply


async def test_a_batch_that_is_not_finite_ends_the_trainer_with_the_cause(site: Site) -> None:
    beyond_float32 = msgspec.structs.replace(objective("grpo"), entropy=1e39)
    trainer, generator = site.trainer(config_of(objective=beyond_float32)), site.generator()
    await trainer.begin()
    with pytest.raises(TrainerEnded, match="nothing is committed") as caught:
        await trainer.train(EncodedBatch.of(await batch_for(generator, 0, version=0)))
    assert isinstance(caught.value.__cause__, NonFiniteLoss)
    assert site.store.versions() == [0]


async def test_a_trainer_that_the_others_evicted_says_so(site: Site) -> None:
    trainer, generator = site.trainer(config_of()), site.generator()
    await trainer.begin()
    await trainer.train(EncodedBatch.of(await batch_for(generator, 0, version=0)))
    trainer._session._epoch_guard.end(StaleEpoch("evicted in epoch 2: silent for 3 s"))
    with pytest.raises(TrainerLeftOut, match="evicted in epoch 2"):
        await trainer.train(EncodedBatch.of(await batch_for(generator, 1)))
    with pytest.raises(TrainerLeftOut, match="evicted in epoch 2"):
        await trainer.finished()


async def test_the_best_version_is_kept_on_disk(site: Site, tmp_path: Path) -> None:
    """A generator can load its folder. The best version before it goes; one that is not the best is released."""
    states = {version: ModelSource(config=SOURCE.config, seed=version).build().state_dict() for version in range(3)}
    best = BestVersion(site.store, tmp_path / "best", SOURCE)
    assert best.folder is None
    for version, reward in ((0, 0.1), (1, 0.9), (2, 0.3)):
        site.store.publish(version, states[version])
        held = await best.hold(version)
        if version != 2:
            await best.keep_best(version, reward)
        held.release()
    for number in (1, 2):
        again = BestVersion(site.store, tmp_path / "best", SOURCE)
        record = read_best(tmp_path / "best")
        assert record is not None and (record.version, record.reward) == (1, 0.9)
        assert again.folder is not None
        loaded = ModelSource(path=str(again.folder)).build().state_dict()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in states[number].items())
        assert len(list((tmp_path / "best").iterdir())) == 2, "one folder and the record"
        site.store.delete(1)
        site.store.publish(1, states[2])  # a driver that goes on from before it trains it anew
        held = await again.hold(1)
        await again.keep_best(1, 0.9)
        held.release()
