"""The parts of a trainer by themselves, and a trainer actor with a generator in one process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="trainers need transformers: pip install 'holdfast[rl]'")

from holdfast.comms.errors import Revoked, StaleEpoch
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness import LocalCluster
from holdfast.rl.actors.errors import ActorDied
from holdfast.rl.config.named_code import ExtraNotInstalled
from holdfast.rl.config.run_config import Objective, RunConfig, StoreConfig, TitanConfig, TrainerConfig
from holdfast.rl.data.episode import Group, Prompt, SamplingRequest
from holdfast.rl.data.replay_buffer import Batch, BufferState, StalenessRule, StepReport
from holdfast.rl.errors import RunFailed
from holdfast.rl.generators.models import ModelMisfit, ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.grpo.batch import BatchColumns, EncodedBatch, updates_of
from holdfast.rl.run.evaluation import BestVersion, read_best
from holdfast.rl.run.trainer_processes import TrainerGroup
from holdfast.rl.trainers.layouts import NonFiniteLoss, clip_factor, sharded_norm
from holdfast.rl.trainers.titan import TitanModel, mesh_of, model_config
from holdfast.rl.trainers.trainer_actor import TrainerActor, TrainerEnded, TrainerLeftOut
from holdfast.rl.trainers.training import BadBatch
from holdfast.store import WeightStore
from support.comms.torch_groups import in_group
from support.programs.forked_programs import run_program
from support.rl.small_batches import episode, group_of, objective, random_batch, tiny_llama, trainer_config
from support.samples.tally import contract_in
from support.source_tree import ROOT
from support.waiting import PATIENCE


def numbered(number: int, episodes: int) -> Group:
    prompt = Prompt(number=number, tokens=(1,) * (1 + number % 3))
    masks = [(True, at % 2 == 0) for at in range(episodes)]
    return group_of(*[episode(prompt, (number, at), logprobs=(-1.0, -2.0), mask=m) for at, m in enumerate(masks)])


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    shards=st.integers(1, 6),
    micro_batch=st.integers(0, 3),
    updates=st.integers(1, 3),
)
def test_every_episode_is_in_one_forward(sizes: list[int], shards: int, micro_batch: int, updates: int) -> None:
    """All shards of an update have equally many forwards, none larger than `micro_batch`; their rows join again."""
    if len(sizes) < updates:
        updates = 1
    groups = [numbered(number, size) for number, size in enumerate(sizes)]
    seen: list[tuple[int, ...]] = []
    for update in updates_of(BatchColumns.of(groups), updates, Objective()):
        forwards = [update.shard(shard, shards, micro_batch) for shard in range(shards)]
        assert len({len(each) for each in forwards}) == 1
        rows = {shard: [each.tokens[:, 1:] for each in mine] for shard, mine in enumerate(forwards)}
        assert torch.equal(update.joined(shards, micro_batch, rows), update.tokens[:, 1:].float())
        assert sum(update.joined(shards, micro_batch, {n: rows[n]}) for n in rows).equal(update.tokens[:, 1:].float())
        for forward in (each for shard in forwards for each in shard):
            assert not micro_batch or len(forward.tokens) <= micro_batch
            assert forward.tokens.shape[1] == forward.inputs.mask.shape[1] + 1 == int(forward.attention.sum(1).max())
            if forward.inputs.mask.any():
                seen += [tuple(row[kept].tolist()) for row, kept in zip(forward.tokens, forward.attention, strict=True)]
    assert seen == [each.prompt.tokens + each.tokens for group in groups for each in group.episodes]


def batch_of(step: int) -> Batch:
    return Batch(step=step, groups=(numbered(step, 1),), after=BufferState(rule=StalenessRule(groups=1)))


def test_the_learning_rate_rises_then_falls() -> None:
    trainer = TrainerConfig(rate=1.0, rate_warmup=4, rate_decay=8, rate_floor=0.5)
    assert [trainer.rate_at(update) for update in (0, 1, 4, 8, 100)] == [0.25, 0.5 * (1 - 0.5 / 8), 0.75, 0.5, 0.5]
    assert TrainerConfig(rate=1.0, rate_warmup=1, rate_floor=1.0).rate_at(1000) == 1.0
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2, rel=1e-5) and clip_factor(0.5, 1.0) == 1.0


def test_a_sharded_norm_has_the_same_bits_on_any_number_of_ranks(tmp_path: Any) -> None:
    shapes = [(7, 13), (1, 300), (2,), (5, 3, 2), (3, 1000)]

    def norm(size: int) -> set[str]:
        def body(rank: int, size: int) -> Any:
            import torch.distributed as dist
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Shard, distribute_tensor

            random = torch.Generator().manual_seed(0)
            mesh = init_device_mesh("cpu", (size,))
            whole = [torch.randn(shape, generator=random) for shape in shapes]
            sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in whole]
            group: Any = dist.group.WORLD
            found = sharded_norm(sharded, group.communicator, mesh)
            assert found == pytest.approx(float(torch.cat([each.flatten() for each in whole]).norm()), rel=1e-5)
            return found.hex()

        (tmp_path / str(size)).mkdir()
        with LocalCluster(size, "shm") as cluster:
            return set(in_group(cluster, tmp_path / str(size), body))

    zygote().preload("torch.distributed.tensor", "holdfast.comms.torchdist")  # once for all ranks
    assert norm(1) == norm(3)


# -- the group of trainers, as the algorithm sees it


GONE = ActorDied("trainer-0", 7, "killed", "train")


class Trainer:
    """A process that does for each batch what its script says."""

    def __init__(self, *script: Any) -> None:
        self.script, self.batches = list(script), []

    async def call(self, method: str, /, *args: Any, timeout: float | None = None) -> Any:
        assert method == "train"
        [batch] = args
        self.batches.append(batch.step)
        act = self.script.pop(0) if self.script else "waits"
        if isinstance(act, Exception):
            raise act
        if act == "waits":
            await asyncio.Event().wait()
        if act == "is a spare":
            return None
        return StepReport(step=batch.step, version=batch.step + 1)


def group_with(*trainers: Trainer, **options: Any) -> TrainerGroup:
    found = TrainerGroup(**{"timeout": 20.0, "patience": 0.05} | options)
    for each in trainers:
        found.add(each)
    return found


async def versions(group: TrainerGroup, batches: int) -> Sequence[int]:
    return [(await group.step(batch_of(number))).version for number in range(batches)]


async def test_a_step_is_reported_once_whoever_dies() -> None:
    spare = Trainer("is a spare", "waits", "trains")
    dying, other = Trainer("trains", GONE), Trainer("waits", "trains", "waits")
    group = group_with(dying, other, spare)
    assert await versions(group, 3) == [1, 2, 3]
    assert (dying.batches, other.batches, spare.batches) == ([0, 1], [0, 1, 2], [0, 1, 2])


async def test_a_trainer_that_is_added_gets_the_current_batch() -> None:
    group = group_with(Trainer(GONE), patience=20.0)
    late = Trainer("trains")
    step = asyncio.create_task(group.step(batch_of(0)))
    await asyncio.sleep(0.01)
    group.add(late)
    assert (await step).version == 1
    assert late.batches == [0]


@pytest.mark.parametrize(
    ("timeout", "acts", "error", "words"),
    [
        (0.05, ["waits"], RunFailed, r"for step 0 within 0\.05 s; raise trainer\.timeout"),
        (20.0, [GONE], RunFailed, r"no trainer is left for step 0: .*killed"),
        (20.0, ["waits", NonFiniteLoss(0, float("nan"), 1.0)], NonFiniteLoss, "step 0 has the loss nan"),
    ],
)
async def test_a_step_that_nobody_commits_is_an_error_that_says_why(
    timeout: float, acts: Sequence[Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await versions(group_with(*map(Trainer, acts), timeout=timeout), 1)


PYTHON = ROOT / ".venv" / "extras" / "titan" / "bin" / "python"
PROGRAM = ROOT / "examples" / "stack" / "titan" / "trainers.py"


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 4))
def test_a_mesh_holds_all_trainers_and_keeps_the_degrees_that_fit(size: int, replicate: int, tensor: int) -> None:
    mesh = mesh_of(size, replicate, tensor)
    assert list(mesh) == ["dp_replicate", "fsdp", "tp"]
    assert mesh["dp_replicate"] * mesh["fsdp"] * mesh["tp"] == size
    if size % (replicate * tensor) == 0:
        assert (mesh["dp_replicate"], mesh["tp"]) == (replicate, tensor)
    assert mesh["tp"] in (1, tensor) and mesh["dp_replicate"] in (1, replicate)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": "gpt2"}, "use one of llama, qwen3"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"head_dim": 8}, "head_dim=8 x 4 heads is not 64"),
    ],
)
def test_a_model_that_it_cannot_express_is_refused(more: dict[str, Any], words: str) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64, **more}
    with pytest.raises(ModelMisfit, match=words):
        model_config(SimpleNamespace(**config), "a model")


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is installed here")
def test_without_torchtitan_the_error_says_how_to_get_it() -> None:
    with pytest.raises(ExtraNotInstalled, match=r"titan is not installed.*run make extra-titan"):
        TitanModel(ModelSource(config={"model_type": "llama", "vocab_size": 8}), TitanConfig())


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="torchtitan is not installed: make extra-titan")
def test_a_killed_trainer_does_not_change_a_bit() -> None:
    """One rank against two, of which one is killed and a spare comes; the program compares the weights."""
    jobs = ["llama3 FSDP2, 1 rank", "llama3 FSDP2, 2 ranks, 1 killed, a spare"]
    assert "DIFFERS" not in run_program(PYTHON, PROGRAM, *jobs, timeout=590.0)


SOURCE = tiny_llama(11)
RIGHT = 7


def config_of(strategy: str = "ddp", batches: int = 12, **more: Any) -> RunConfig:
    """The store has one copy of the versions that it keeps, which are all that a test asks for."""
    config = trainer_config(strategy, batches, units=2, rate=0.03, **more)
    kept = msgspec.structs.replace(config.algorithm, staleness=20)
    return msgspec.structs.replace(config, algorithm=kept, store=StoreConfig(copies=1))


class Site:
    """The store of a test, and the trainers, of a job each, and generators that it opens."""

    def __init__(self, folder: Path, opened: contextlib.ExitStack) -> None:
        self._folder, self._opened, self._jobs = folder, opened, itertools.count()
        self.url = f"sqlite://{folder}/weights.sqlite"
        self.store = opened.enter_context(WeightStore(self.url, replicas=1, keep=20))

    def trainer(self, config: RunConfig) -> TrainerActor:
        job = self._folder / f"job-{next(self._jobs)}"
        job.mkdir()
        trainer = TrainerActor(config, SOURCE, self.url, contract_in(job, size=1))
        return self._opened.enter_context(contextlib.closing(trainer))

    def generator(self) -> TransformersGenerator:
        return self._opened.enter_context(contextlib.closing(TransformersGenerator(SOURCE, self.url)))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as opened:
        yield Site(tmp_path, opened)


async def batch_for(generator: TransformersGenerator, step: int, version: int | None = None) -> Batch:
    """Two groups of eight tokens; the reward is for each token `RIGHT`."""
    prompts = ((1, 2), (3,))
    seeds = tuple(range(100 * step, 100 * step + 16))
    asked = SamplingRequest(prompts=prompts, samples=8, seeds=seeds, max_new_tokens=2, temperature=1.0, version=version)
    found = await generator.generate(asked)
    groups = []
    for number, tokens in enumerate(prompts):
        prompt = Prompt(number=2 * step + number, tokens=tokens)
        episodes = []
        for each in found[8 * number : 8 * number + 8]:
            as_drawn = {"logprobs": each.logprobs, "versions": each.versions, "finish": each.finish}
            episodes.append(episode(prompt, each.tokens, float(each.tokens.count(RIGHT)), **as_drawn))
        groups.append(group_of(*episodes))
    after = BufferState(rule=StalenessRule(groups=2), batch=step + 1, begun=2 * step + 2)
    return Batch(step=step, groups=tuple(groups), after=after)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
async def test_a_policy_learns_what_is_rewarded(site: Site, strategy: str) -> None:
    """Each batch is drawn with exactly the version before it; rewards rise; the last version is served as trained."""
    config = config_of(strategy)
    trainer, generator = site.trainer(config), site.generator()
    group = TrainerGroup(timeout=60.0)

    async def call(method: str, /, *args: Any, timeout: float | None = None) -> Any:
        return await getattr(trainer, method)(*args)

    without_process: Any = SimpleNamespace(call=call)
    group.add(without_process)
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
async def test_a_batch_that_is_not_finite_ends_the_trainer_with_the_cause(site: Site, strategy: str) -> None:
    beyond_float32 = msgspec.structs.replace(objective("grpo"), entropy=1e39)
    trainer, generator = site.trainer(config_of(strategy, objective=beyond_float32)), site.generator()
    await trainer.begin()
    with pytest.raises(TrainerEnded, match="nothing is committed") as caught:
        await trainer.train(EncodedBatch.of(await batch_for(generator, 0, version=0)))
    cause = caught.value.__cause__
    assert isinstance(cause, NonFiniteLoss) and "step 0 has the loss" in str(cause)
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
