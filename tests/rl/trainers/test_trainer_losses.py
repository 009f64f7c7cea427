"""The losses of whole trainers equal the papers' formulas, also over several updates with one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="trainers need transformers: pip install 'holdfast[rl]'")

from holdfast.ft import Session, Timeouts
from holdfast.harness import LocalCluster
from holdfast.rl.config.run_config import Algorithm, Objective, RunConfig
from holdfast.rl.data.episode import Group
from holdfast.rl.grpo.batch import EncodedBatch
from holdfast.rl.trainers.training import Training
from support.rl.small_batches import GROUPS, objective, random_batch, random_groups, tiny_llama, trainer_config

ALGORITHMS: tuple[Algorithm, ...] = ("grpo", "dr_grpo", "dapo", "gspo")
BATCHES, RATE, WORDS = 2, 0.02, 13
TEMPERATURE = 0.8
SOURCE = tiny_llama(WORDS)
QUICK = Timeouts(heartbeat=0.2, suspect=2.0, operation=40.0, rebuild=20.0, join=20.0)


Reports = list[tuple[float, float]]


def train(session: Session, config: RunConfig) -> Reports:
    """Of each batch the mean loss, and the norm of the last gradient."""
    reports: list[Any] = []

    def take(step: int, over: Any) -> EncodedBatch:
        return random_batch(step, config.algorithm.updates)

    Training(config, SOURCE, None, take, reports.append).run(session)
    return [(each.figures["loss"], each.figures["gradient_norm"]) for each in reports]


# -- the same by the papers


Rows = dict[int, torch.Tensor]
"""Log-probabilities of each episode's tokens, by the id of the episode."""


def predicted(model: torch.nn.Module, groups: Sequence[Group]) -> Rows:
    found = {}
    for each in (each for group in groups for each in group.episodes):
        tokens = torch.tensor([*each.prompt.tokens, *each.tokens])
        logits = model(input_ids=tokens[None]).logits[0] / TEMPERATURE
        first = len(each.prompt.tokens)
        found[id(each)] = logits.log_softmax(-1)[first - 1 : -1].gather(1, tokens[first:, None])[:, 0]
    return found


def by_the_papers(groups: Sequence[Group], new: Rows, old: Rows, reference: Rows, chosen: Objective) -> torch.Tensor:
    """GRPO eq. 3, Dr. GRPO eq. 2, DAPO eq. 8, GSPO eq. 5: the negated objective of an update."""
    sums, lengths = [], []
    for group in groups:
        rewards = torch.tensor([each.reward for each in group.episodes])
        advantages = rewards - rewards.mean()
        if chosen.algorithm != "dr_grpo":
            advantages = advantages / (rewards.std() + 1e-4)
        for advantage, each in zip(advantages, group.episodes, strict=True):
            mask = torch.tensor(each.mask)
            if chosen.algorithm == "dapo" and each.finish == "length":
                mask = torch.zeros_like(mask)
            generated = torch.tensor(each.logprobs)
            before = old[id(each)] if chosen.truncation else generated
            change, drift = new[id(each)] - before, before - generated
            if chosen.algorithm == "gspo":
                change, drift = (values[mask].mean().expand(len(mask)) for values in (change, drift))
            ratio = change.exp()
            clipped = ratio.clamp(1 - chosen.clip_low, 1 + chosen.clip_high)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            if chosen.truncation:
                gain = gain * drift.exp().clamp(max=chosen.truncation)
            apart = reference[id(each)] - new[id(each)]
            gain = gain - chosen.kl * (apart.exp() - apart - 1)
            sums.append(gain[mask].sum())
            lengths.append(int(mask.sum()))
    if chosen.algorithm == "dapo":
        return -torch.stack(sums).sum() / sum(lengths)
    if chosen.algorithm == "dr_grpo":
        return -torch.stack(sums).mean()
    return -torch.stack([total / length for total, length in zip(sums, lengths, strict=True)]).mean()


def trained_by_the_papers(chosen: Objective, updates: int) -> Reports:
    model, frozen = SOURCE.build(), SOURCE.build().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    reports: Reports = []
    for step in range(0, BATCHES * updates, updates):
        groups, losses, norm = random_groups(step), [], math.nan
        with torch.no_grad():
            old, reference = predicted(model, groups), predicted(frozen, groups)
        for part in range(updates):
            mine = groups[GROUPS * part // updates : GROUPS * (part + 1) // updates]
            found = by_the_papers(mine, predicted(model, mine), old, reference, chosen)
            optimizer.zero_grad()
            torch.autograd.backward(found)
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            losses.append(found.item())
        reports.append((sum(losses) / len(losses), norm))
    return reports


def run(config: RunConfig) -> Reports:
    options = {"timeouts": QUICK, "shards": 2, "size": 1, "on_error": "raise"}
    with LocalCluster(1, "shm", session=options) as ranks:
        reports: Reports = ranks.start(train, config).results(90.0)[0]
    return reports


@pytest.mark.parametrize(
    ("algorithm", "updates", "truncation"),
    [
        *((each, 3, 1.2) for each in ALGORITHMS),
        *(pytest.param(each, 1, 0.0, marks=pytest.mark.thorough if each != "grpo" else ()) for each in ALGORITHMS),
    ],
)
def test_a_trainer_computes_the_papers_losses(algorithm: Algorithm, updates: int, truncation: float) -> None:
    """Clip, truncation, KL and masks. The old policy is that before the batch's first update."""
    chosen = objective(algorithm, truncation=truncation, kl=0.05, clip_low=0.01, clip_high=0.02)
    wanted = trained_by_the_papers(chosen, updates)
    config = trainer_config(
        "ddp", BATCHES, objective=chosen, updates=updates, temperature=TEMPERATURE, units=2, rate=RATE
    )
    for mine, other in zip(run(config), wanted, strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=1e-5)
    if updates > 1:
        unclipped = objective(algorithm, truncation=truncation, kl=0.05, clip_low=0.999, clip_high=1e6)
        assert trained_by_the_papers(unclipped, updates)[0] != pytest.approx(wanted[0], rel=2e-3, abs=1e-5)
