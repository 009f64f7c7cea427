"""The parts of a trainer by themselves: division of batches, norms, handover, the group, TorchTitan's models."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="trainers need transformers: pip install 'holdfast[rl]'")

from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness import LocalCluster
from holdfast.rl.actors.errors import ActorDied
from holdfast.rl.config.named_code import ExtraNotInstalled
from holdfast.rl.config.run_config import Objective, TitanConfig, TrainerConfig
from holdfast.rl.data.episode import Group, Prompt
from holdfast.rl.data.replay_buffer import Batch, BufferState, StalenessRule, StepReport
from holdfast.rl.errors import RunFailed
from holdfast.rl.generators.models import ModelMisfit, ModelSource
from holdfast.rl.grpo.batch import BatchColumns, updates_of
from holdfast.rl.run.trainer_processes import TrainerGroup
from holdfast.rl.trainers.layouts import NonFiniteLoss, clip_factor, sharded_norm
from holdfast.rl.trainers.titan import TitanModel, mesh_of, model_config
from support.comms.torch_groups import in_group
from support.rl.small_batches import episode
from support.source_tree import ROOT


def group_of(number: int, episodes: int) -> Group:
    prompt = Prompt(number=number, tokens=(1,) * (1 + number % 3))
    return Group(
        number=number,
        prompt=prompt,
        episodes=tuple(
            episode(prompt, (number, at), logprobs=(-1.0, -2.0), mask=(True, at % 2 == 0)) for at in range(episodes)
        ),
    )


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    shards=st.integers(1, 6),
    micro_batch=st.integers(0, 3),
    updates=st.integers(1, 3),
)
def test_every_episode_is_in_one_forward(sizes: list[int], shards: int, micro_batch: int, updates: int) -> None:
    """All shards of an update have equally many forwards, none of them larger than `micro_batch`."""
    if len(sizes) < updates:
        updates = 1
    groups = [group_of(number, size) for number, size in enumerate(sizes)]
    seen: list[tuple[int, ...]] = []
    for update in updates_of(BatchColumns.of(groups), updates, Objective()):
        forwards = [update.shard(shard, shards, micro_batch) for shard in range(shards)]
        assert len({len(each) for each in forwards}) == 1
        for forward in (each for shard in forwards for each in shard):
            assert not micro_batch or len(forward.tokens) <= micro_batch
            assert forward.tokens.shape[1] == forward.inputs.mask.shape[1] + 1 == int(forward.attention.sum(1).max())
            if forward.inputs.mask.any():
                seen += [tuple(row[kept].tolist()) for row, kept in zip(forward.tokens, forward.attention, strict=True)]
    assert seen == [each.prompt.tokens + each.tokens for group in groups for each in group.episodes]


def batch_of(step: int) -> Batch:
    return Batch(step=step, groups=(group_of(step, 1),), after=BufferState(rule=StalenessRule(groups=1)))


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
    assert norm(1) == norm(2) == norm(3)


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


def versions(group: TrainerGroup, batches: int) -> Sequence[int]:
    async def steps() -> list[int]:
        return [(await group.step(batch_of(number))).version for number in range(batches)]

    return asyncio.run(steps())


def test_a_step_is_reported_once_whoever_dies() -> None:
    spare = Trainer("is a spare", "waits", "trains")
    dying, other = Trainer("trains", GONE), Trainer("waits", "trains", "waits")
    group = group_with(dying, other, spare)
    assert versions(group, 3) == [1, 2, 3]
    assert (dying.batches, other.batches, spare.batches) == ([0, 1], [0, 1, 2], [0, 1, 2])


async def test_a_trainer_that_is_added_gets_the_current_batch() -> None:
    group = group_with(Trainer(GONE), patience=20.0)
    late = Trainer("trains")
    step = asyncio.create_task(group.step(batch_of(0)))
    await asyncio.sleep(0.01)
    group.add(late)
    assert (await step).version == 1
    assert late.batches == [0]


def test_a_step_without_trainers_is_an_error_that_says_how_they_ended() -> None:
    with pytest.raises(RunFailed, match=r"no trainer is left for step 0: .*killed"):
        versions(group_with(Trainer(GONE)), 1)


def test_an_error_of_the_step_itself_is_raised() -> None:
    group = group_with(Trainer("waits"), Trainer(NonFiniteLoss(0, float("nan"), 1.0)))
    with pytest.raises(NonFiniteLoss):
        versions(group, 1)


PYTHON = ROOT / ".venv" / "extras" / "titan" / "bin" / "python"
PROGRAM = ROOT / "examples" / "stack" / "titan" / "trainers.py"
SOURCE = ModelSource(config={"model_type": "llama", "vocab_size": 8})


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
        TitanModel(SOURCE, TitanConfig())


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="torchtitan is not installed: make extra-titan")
def test_a_killed_trainer_does_not_change_a_bit() -> None:
    """One rank against two, of which one is killed and a spare comes; the program compares the weights."""
    jobs = ["llama3 FSDP2, 1 rank", "llama3 FSDP2, 2 ranks, 1 killed, a spare"]
    done = subprocess.run([PYTHON, PROGRAM, *jobs], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0 and "DIFFERS" not in done.stdout, done.stdout + done.stderr
