"""Weights without labels: near the true ones, better than a majority vote, and not fooled by copies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.toml import load_config
from holdfast.rl.data.episode import Prompt
from holdfast.rl.data.prompts import arithmetic_held_out
from holdfast.rl.rewards.reward import JudgedAnswer
from support.source_tree import ROOT

EXAMPLE = ROOT / "examples" / "rl" / "weak_verifiers.py"
example: Any = sys.modules[load_code(f"{EXAMPLE}:estimate").__module__]
"""The example, as a configuration's `function` loads it."""
estimate, NotIdentifiable = example.estimate, example.NotIdentifiable

SEEDS = range(20)


def draw(seed: int, right: float, skills: Sequence[tuple[float, float]], answers: int = 2000) -> tuple[np.ndarray, ...]:
    """Which answers are right, and the votes of verifiers with these (P(1 | right), P(1 | wrong))."""
    random = np.random.default_rng(seed)
    truth = random.random(answers) < right
    rates = np.where(truth[:, None], [hit for hit, _ in skills], [alarm for _, alarm in skills])
    return truth, random.random(rates.shape) < rates


def gain(weights: Any, truth: np.ndarray, votes: np.ndarray) -> float:
    """How much more often the weighted votes are right than a majority vote."""
    weighted = np.array([weights.probability(row) for row in votes.tolist()])
    ours, majority = ((guesses > 0.5) == truth for guesses in (weighted, votes.mean(1)))
    return float(ours.mean() - majority.mean())


@pytest.mark.parametrize("right", [0.3, 0.5, 0.7])
def test_estimates_are_near_the_truth(right: float) -> None:
    skills = [(0.9, 0.1), (0.8, 0.3), (0.7, 0.2), (0.6, 0.4), (0.75, 0.4)]
    _, votes = draw(1, right, skills, answers=20_000)
    found = estimate(votes.tolist())
    assert found.right == pytest.approx(right, abs=0.06)
    assert np.abs(np.array([found.hits, found.false_alarms]).T - skills).max() < 0.08


def test_the_ensemble_beats_a_majority_vote_of_unequal_verifiers() -> None:
    skills = [(0.92, 0.1), (0.8, 0.25), (0.6, 0.45), (0.55, 0.45), (0.55, 0.48), (0.6, 0.5), (0.7, 0.4)]
    gains = []
    for seed in SEEDS:
        truth, votes = draw(seed, (0.3, 0.5, 0.7)[seed % 3], skills)
        gains.append(gain(estimate(votes.tolist()), truth, votes))
    assert min(gains) > 0.0
    assert float(np.mean(gains)) > 0.08


def test_copies_of_a_weak_verifier_do_not_outvote_the_good_ones() -> None:
    """Four verifiers that share nine votes in ten are one voice; the majority vote believes them."""
    skills = [(0.88, 0.15), (0.85, 0.2), (0.8, 0.2), (0.75, 0.3), (0.7, 0.25), (0.6, 0.4)]
    gains = []
    for seed in SEEDS:
        truth, votes = draw(seed, 0.5, skills)
        random = np.random.default_rng(1000 + seed)
        _, others = draw(seed, 0.5, [(0.6, 0.4)] * 3)
        copies = np.where(random.random(others.shape) < 0.9, votes[:, 5:], others)
        votes = np.concatenate([votes, copies], 1)
        found = estimate(votes.tolist())
        gains.append(gain(found, truth, votes))
        assert sum(found.for_one[5:]) < found.for_one[0]
    assert min(gains) > 0.0
    assert float(np.mean(gains)) > 0.1


def test_degenerate_verifiers_are_dropped() -> None:
    _, votes = draw(0, 0.5, [(0.9, 0.1), (0.8, 0.2), (0.8, 0.3), (1.0, 1.0), (0.0, 0.0), (0.5, 0.5), (0.2, 0.8)])
    found = estimate(votes.tolist())
    assert found.dropped == (3, 4, 5, 6)
    assert found.for_one[3:] == (0.0,) * 4


@pytest.mark.parametrize(
    "votes, words",
    [
        ([[True, False, True]] * 10, "10 answers, and the least is 50"),
        ([[True, True, False]] * 100, "0 of 3 verifiers"),
        (np.random.default_rng(0).integers(0, 2, (200, 2)).tolist(), "2 of 2 verifiers"),
    ],
)
def test_votes_that_determine_nothing_are_refused(votes: list[list[bool]], words: str) -> None:
    with pytest.raises(NotIdentifiable, match=words):
        estimate(votes)


def test_an_ensemble_is_a_reward() -> None:
    """The verifiers look at single characters of the answer, which tell with different accuracy whether it is right."""
    truth, votes = draw(5, 0.5, [(0.95, 0.05), (0.8, 0.3), (0.7, 0.2)], answers=2000)
    answers = [
        JudgedAnswer(
            prompt=Prompt(number=number, tokens=(1,)), text="".join("01"[vote] for vote in row.astype(int)), length=3
        )
        for number, row in enumerate(votes)
    ]
    ensemble = example.WeakVerifierEnsemble([lambda each, i=i: float(each.text[i]) for i in range(3)], answers)
    guesses = [ensemble(each) > 0.5 for each in answers]
    assert float(np.mean([guess == right for guess, right in zip(guesses, truth, strict=True)])) > 0.88
    with pytest.raises(ValueError, match="could not convert"):  # a verifier that fails makes the reward fail
        ensemble(JudgedAnswer(prompt=answers[0].prompt, text="1x1", length=3))


def test_the_example_rewards_sums_by_verifiers_that_cannot_add() -> None:
    assert load_config(EXAMPLE.with_suffix(".toml")).reward[0].function == "weak_verifiers.py:right"
    prompts = [(number, each) for number, each in enumerate(arithmetic_held_out())]

    def reward(number: int, prompt: str, text: str) -> float:
        judged = Prompt(number=number, tokens=(0,), text=prompt)
        return float(example.right(JudgedAnswer(prompt=judged, text=text, length=2)))

    right = [reward(number, each.prompt, each.answer) for number, each in prompts]
    wrong = [reward(number, each.prompt, f"{(int(each.answer) + 5) % 28:02d}") for number, each in prompts]
    assert float(np.mean(right)) > 0.8 and float(np.mean(wrong)) < 0.2
