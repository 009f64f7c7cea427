"""Trainers in real processes: killed, stopped, replaced, more or fewer, they end with the same weights to the bit."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="trainers need transformers: pip install 'holdfast[rl]'")

from holdfast.comms import register, unregister
from holdfast.comms.plugins.spec import OpEvent, hookimpl
from holdfast.ft import Session, Timeouts
from holdfast.ft.event_lines import event_of
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness import LocalCluster, RankFailed
from holdfast.harness.invariants import check
from holdfast.rl.config.run_config import PRESETS, Algorithm, Objective, RunConfig
from holdfast.rl.grpo.batch import BatchColumns, EncodedBatch, TrainingTokens, collate
from holdfast.rl.grpo.loss import loss
from holdfast.rl.trainers.training import Training
from holdfast.store import WeightStore
from support.rl.small_batches import GROUPS, objective, random_batch, random_groups, tiny_llama, trainer_config
from support.waiting import PROGRAM_SECONDS, eventually

QUICK = Timeouts(heartbeat=0.2, suspect=2.0, operation=40.0, rebuild=20.0, join=20.0)
SHARDS = 4
BATCHES = 4
GATED = 2
"""The step whose batch comes late."""
SOURCE = tiny_llama(13, layers=2)
REDUCTIONS = {"fsdp2": "scatter_contributions", "ddp": "sum_contributions"}


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    zygote().preload(
        "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"
    )


def config_of(strategy: str, batches: int = BATCHES, **more: Any) -> RunConfig:
    rate = {"rate": 0.01, "rate_warmup": 2, "rate_decay": 10, "rate_floor": 0.1}
    return trainer_config(strategy, batches, **{"units": SHARDS, **rate, **more})


class InsideReduction:
    """An op hook: `act` at the beginning of a reduction of a step, on these ranks of the first epoch."""

    def __init__(self, session: Session, op: str, at: Mapping[int, tuple[int, ...]], number: int) -> None:
        self._session, self._op, self._at, self._number = session, op, at, number
        self._first = 0

    @hookimpl
    def before_op(self, event: OpEvent) -> None:
        self._first = self._first or event.epoch
        session = self._session
        here = event.op == self._op and event.epoch == self._first and session.rank in self._at.get(session.step, ())
        if here:
            time.sleep(0.2)  # the other ranks are inside of it
            os.kill(os.getpid(), self._number)


def train(
    session: Session,
    config: RunConfig,
    faults: Mapping[int, tuple[int, ...]] = {},
    number: int = signal.SIGKILL,
    url: str = "",
    gate: str = "",
    joined: bool = False,
    checkpoints: str = "",
) -> tuple[str, list[tuple[int, float, float]]]:
    """The digest of the final weights, and loss and norm of each batch that was committed here.

    If it is `joined`, rank 0 gets the batch of the gate in another epoch only.
    """
    reports, epochs = [], set[int | None]()

    def take(step: int, over: Any) -> EncodedBatch:
        if step == GATED:
            epochs.add(session.epoch)
        waits = joined and session.rank == 0 and len(epochs) == 1
        while step == GATED and gate and (waits or not Path(gate).exists()):
            over()
            time.sleep(0.01)
        return random_batch(step, config.algorithm.updates)

    hook = InsideReduction(session, REDUCTIONS[config.trainer.strategy], faults, number)
    store = WeightStore(url, replicas=1, keep=BATCHES + 1, hold=False) if url else None
    register(hook)
    training = Training(config, SOURCE, store, take, reports.append, checkpoints=checkpoints)
    try:
        digest = training.run(session)
    finally:
        unregister(hook)
        training.close()
    return digest, [(each.step, each.figures["loss"], each.figures["gradient_norm"]) for each in reports]


def run(
    strategy: str, size: int, spares: int = 0, backend: str = "shm", stop: bool = False, grow: bool = False, **more: Any
) -> tuple[str, list[tuple[int, float, float]]]:
    """Digest and reports of a job, alike on all of its ranks. With `grow`, the killed are replaced, but late."""
    arguments = {each: more.pop(each) for each in ("faults", "url", "checkpoints") if each in more}
    options = {"timeouts": QUICK, "shards": SHARDS, "size": size, "min_size": 1, "on_error": "raise"}
    with LocalCluster(size, backend, spares=spares, session=options) as ranks:
        gate = ranks.logs / "gate"
        number = int(signal.SIGSTOP if stop else signal.SIGKILL)
        job = ranks.start(train, config_of(strategy, **more), gate=str(gate), joined=grow, number=number, **arguments)
        job.wait_for_spares()
        if grow:
            job.wait_for("committed", step=1, timeout=60.0)
            job.add()
            eventually(lambda: len(job.view().members) == size)
        gate.touch()
        results, events = job.results(PROGRAM_SECONDS), job.events()
    assert check([event_of(event) for event in events]) == []
    assert len({digest for digest, _ in results}) == 1 and results[0][0]
    reports = max((reports for _, reports in results), key=len)
    return results[0][0], reports


with_shards = pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.thorough)])
"""For bodies in which whole weights are the simpler case of shards."""


def published(strategy: str, size: int, folder: Path, **options: Any) -> tuple[Any, dict[int, Any]]:
    """The result of `run`, and all versions that were published meanwhile."""
    url = f"sqlite://{folder}/weights.sqlite"
    with WeightStore(url, replicas=1, keep=BATCHES + 1) as store:
        result = run(strategy, size, url=url, **options)
        return result, {version: store.load(version) for version in store.versions()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {strategy: published(strategy, 1, tmp_path_factory.mktemp(strategy)) for strategy in REDUCTIONS}


@pytest.fixture(scope="module")
def alone(undisturbed: dict[str, Any]) -> dict[str, Any]:
    """The results of one trainer, which any number of them must reach in spite of faults."""
    return {strategy: result for strategy, (result, _) in undisturbed.items()}


@pytest.mark.parametrize("strategy", REDUCTIONS)
@pytest.mark.parametrize(("size", "backend"), [(3, "shm"), pytest.param(2, "gloo", marks=pytest.mark.thorough)])
def test_any_number_of_trainers_have_the_same_bits(strategy: str, size: int, backend: str, alone: Any) -> None:
    assert run(strategy, size, backend=backend) == alone[strategy]


FAULTS: dict[str, dict[str, Any]] = {
    "killed-spare": {"size": 2, "spares": 1, "faults": {2: (1,)}},
    "killed-shrink": {"size": 3, "faults": {2: (0,)}},
    "two-at-once": {"size": 3, "faults": {1: (1, 2)}, "copies": 2},
    "stopped": {"size": 2, "spares": 1, "faults": {2: (0,)}, "stop": True},
}
FIRST = {("fsdp2", "killed-spare"), ("fsdp2", "two-at-once"), ("fsdp2", "stopped"), ("ddp", "killed-shrink")}
"""What the first tier has: a newcomer and survivors alone with shards, survivors alone with all weights."""


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param(strategy, fault, marks=() if (strategy, fault) in FIRST else pytest.mark.thorough)
        for strategy in REDUCTIONS
        for fault in FAULTS
    ],
)
def test_faults_inside_the_reduction_do_not_change_a_bit(strategy: str, fault: str, alone: Any) -> None:
    assert run(strategy, **FAULTS[fault])[0] == alone[strategy][0]


@with_shards
def test_a_trainer_that_joins_later_does_not_change_a_bit(strategy: str, alone: Any) -> None:
    """One of two is killed in step 1; the other goes on, and is joined before step 2."""
    assert run(strategy, 2, faults={1: (1,)}, grow=True)[0] == alone[strategy][0]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", REDUCTIONS)
@pytest.mark.parametrize(
    "more",
    [
        {"micro_batch": 1},
        {"updates": 3, "micro_batch": 2, "batches": 1},
        {"objective": objective("grpo", entropy=0.1, kl=0.5), "temperature": 0.7, "max_norm": 1e9},
        {"objective": objective("dapo", truncation=2.0)},
        {"lora_rank": 2},
    ],
    ids=["micro-batches", "several-updates", "entropy-and-reference", "dapo-truncated", "lora"],
)
def test_every_setting_has_the_same_bits_on_one_trainer_and_on_three_with_a_kill(
    strategy: str, more: dict[str, Any], alone: Any
) -> None:
    if "lora_rank" in more:
        pytest.importorskip("peft", reason="adapters need peft: pip install 'holdfast[lora]'")
    more = {"batches": 3, **more}
    one = run(strategy, 1, **more)
    assert one[0] != alone[strategy][0]
    assert run(strategy, 3, faults={1: (1,)}, **more)[0] == one[0]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", REDUCTIONS)
def test_a_trainer_that_joins_within_a_batch_gets_its_old_policy(strategy: str) -> None:
    """A spare takes the place of one that dies in the second of three updates, which the old policy bounds."""
    more = {"updates": 3, "batches": 1, "objective": objective("grpo", truncation=2.0)}
    assert run(strategy, 2, spares=1, faults={1: (1,)}, **more)[0] == run(strategy, 1, **more)[0]


def test_both_strategies_learn_alike(alone: Any) -> None:
    """Losses and norms agree up to rounding, so they are the same algorithm."""
    for mine, other in zip(alone["fsdp2"][1], alone["ddp"][1], strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-6)


def predicted(model: torch.nn.Module, made: TrainingTokens, temperature: float) -> torch.Tensor:
    logits = model(input_ids=made.tokens, attention_mask=made.attention).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(2, made.tokens[:, 1:, None])[:, :, 0]


def trained_plainly(
    chosen: Objective, batches: int, updates: int, temperature: float, rate: float
) -> list[tuple[int, float, float]]:
    """Step, mean loss and last norm of each batch, by a loop over one whole model."""
    model, frozen = SOURCE.build(), SOURCE.build().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    reports = []
    for step in range(0, batches * updates, updates):
        groups, losses, norm = random_groups(step), [], math.nan
        edges = [GROUPS * part // updates for part in range(updates + 1)]
        parts = [collate(BatchColumns.of(groups[slice(*each)]), chosen) for each in pairwise(edges)]
        with torch.no_grad():
            old, reference = ([predicted(each, made, temperature) for made in parts] for each in (model, frozen))
        for made, before, apart in zip(parts, old, reference, strict=True):
            inputs = dataclasses.replace(made.inputs, reference=apart)
            behind = before if chosen.truncation else inputs.generated
            found = loss(predicted(model, made, temperature), behind, inputs, chosen)
            optimizer.zero_grad()
            torch.autograd.backward(found)
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            losses.append(found.item())
        reports.append((step, sum(losses) / len(losses), norm))
    return reports


@pytest.mark.parametrize(
    ("algorithm", "updates", "truncation"),
    [
        *((each, 3, 1.2) for each in PRESETS),
        *(pytest.param(each, 1, 0.0, marks=pytest.mark.thorough if each != "grpo" else ()) for each in PRESETS),
    ],
)
def test_a_trainer_minimises_the_loss_of_its_algorithm(algorithm: Algorithm, updates: int, truncation: float) -> None:
    """Clip, truncation, KL and masks. The old policy is that before the batch's first update."""
    plain: dict[str, Any] = {"batches": 2, "updates": updates, "temperature": 0.8, "rate": 0.02}
    chosen = objective(algorithm, truncation=truncation, kl=0.05, clip_low=0.003, clip_high=0.006)
    wanted = trained_plainly(chosen, **plain)
    _, found = run("ddp", 1, objective=chosen, **plain, rate_warmup=1, rate_floor=1.0)
    for mine, other in zip(found, wanted, strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=1e-5)
    if updates > 1:
        unclipped = objective(algorithm, truncation=truncation, kl=0.05, clip_low=0.999, clip_high=1e6)
        assert trained_plainly(unclipped, **plain)[0] != pytest.approx(wanted[0], rel=2e-3, abs=1e-5)


@with_shards
def test_every_committed_version_is_published_whole(strategy: str, tmp_path: Path, undisturbed: Any) -> None:
    """A trainer dies in step 2, beside its publication of version 2; each version is that of an undisturbed run."""
    (result, _), versions = published(strategy, 3, tmp_path, faults={2: (1,)})
    assert result == undisturbed[strategy][0][0]
    assert list(versions) == list(range(BATCHES + 1)) == list(undisturbed[strategy][1])
    for version, state in undisturbed[strategy][1].items():
        assert all(torch.equal(tensor, versions[version][name]) for name, tensor in state.items())
    assert SOURCE.build().load_state_dict(versions[BATCHES])


@pytest.mark.thorough
def test_a_run_goes_on_from_its_checkpoint_with_another_number_of_trainers(tmp_path: Path, alone: Any) -> None:
    """With shards: a driver that is resumed with one trainer more tests whole weights."""
    strategy, saved = "fsdp2", {"checkpoint_every": 2}
    options = {"timeouts": QUICK, "shards": SHARDS, "size": 2, "min_size": 1, "on_error": "raise"}
    with LocalCluster(2, "shm", session=options) as ranks:
        job = ranks.start(train, config_of(strategy, **saved), faults={3: (0, 1)}, checkpoints=str(tmp_path))
        with pytest.raises(RankFailed):
            job.results(PROGRAM_SECONDS)
    digest, reports = run(strategy, 3, checkpoints=str(tmp_path), **saved)
    assert digest == alone[strategy][0]
    assert [each[0] for each in reports] == [2, 3], "batches 0 and 1 are not trained on again"
