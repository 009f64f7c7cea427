"""Rewards score answers, here and in processes, and weak verifiers have weights; one that fails costs an episode."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from holdfast.rl.config.named_code import NoSuchCode, load_code
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.config.toml import load_config, parse_config, placed, resolved
from holdfast.rl.data.episode import Completion, Group, Prompt
from holdfast.rl.data.prompts import CharacterTokenizer, arithmetic_held_out
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.errors import RewardFailed
from holdfast.rl.rewards.judge import Judge, RewardProcesses, reward_of
from holdfast.rl.rewards.reward import Criterion, ExactMatch, FormatMatch, JudgedAnswer, LengthPenalty, Rubric, Score
from support.rl.small_batches import completion
from support.source_tree import ROOT
from support.waiting import PATIENCE

PROMPT = Prompt(number=7, tokens=(1,), text="7+8+5=", answer="20")
TOKENIZER = CharacterTokenizer()


def answer(text: str) -> JudgedAnswer:
    return JudgedAnswer(prompt=PROMPT, text=text, length=len(text))


def answers(*texts: str) -> list[JudgedAnswer]:
    return [*map(answer, texts)]


Function = Callable[[JudgedAnswer], float]


def only(name: str, function: Function) -> Rubric:
    return Rubric([Criterion(name, 1.0, function)])


def drawn(*texts: str) -> list[Completion]:
    """Completions of version 3; a stop token ends those that end with a line."""
    return [completion(TOKENIZER.encode(each), 3, "stop" if each.endswith("\n") else "length") for each in texts]


EXTRACTED = ("<answer>20</answer>", "<answer>1</answer> no: <answer> 20 </answer>", "20", "<answer>20")


@pytest.mark.parametrize(
    ("criterion", "texts", "values"),
    [
        (ExactMatch(), ("20", " 20\n", "2", "20 0"), [1.0, 1.0, 0.0, 0.0]),
        (ExactMatch(extract=r"<answer>(.*?)</answer>"), EXTRACTED, [1.0, 1.0, 0.0, 0.0]),
        (FormatMatch(r"\d\d"), ("20", "200", "a20"), [1.0, 0.0, 0.0]),
        (LengthPenalty(most=10, margin=4), ("x", "x" * 6, "x" * 8, "x" * 10, "x" * 25), [0, 0, -0.5, -1, -1]),
    ],
)
def test_a_criterion_scores_texts(criterion: Function, texts: tuple[str, ...], values: list[float]) -> None:
    assert [criterion(each) for each in answers(*texts)] == values


def test_a_criterion_that_cannot_score_is_refused() -> None:
    with pytest.raises(ValueError, match="one group"):
        ExactMatch(extract="no group")
    with pytest.raises(ValueError, match="margin=11"):
        LengthPenalty(most=10, margin=11)


def test_a_rubric_adds_weighted_criteria_and_names_the_parts() -> None:
    rubric = Rubric(
        [
            Criterion("exact", 1.0, ExactMatch()),
            Criterion("format", 0.5, FormatMatch(r"\d+")),
            Criterion("shouting", -2.0, lambda each: float("!" in each.text)),
        ]
    )
    scores = [rubric.score(answer(text)) for text in ("20", "3", "20!")]
    assert [each.value for each in scores if isinstance(each, Score)] == [1.5, 0.5, -2.0]
    assert scores[1] == Score(0.5, {"exact": 0.0, "format": 1.0, "shouting": 0.0})
    with pytest.raises(ValueError, match="names of their own"):
        Rubric([Criterion("a", 1.0, ExactMatch()), Criterion("a", 1.0, ExactMatch())])


def _divide(each: JudgedAnswer) -> float:
    return 20 / int(each.text)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e308, -1e39])
def test_a_score_that_no_loss_can_be_computed_with_fails_its_answer_alone(bad: float) -> None:
    rubric = only("odd", lambda each: bad if each.text == "1" else 0.5)
    failed = rubric.score(answer("1"))
    assert isinstance(failed, RewardFailed)
    assert (failed.reward, failed.number) == ("odd", 7)
    assert str(bad) in str(failed)
    assert rubric.score(answer("2")) == Score(0.5, {"odd": 0.5})


async def test_a_group_is_made_of_what_could_be_judged() -> None:
    seen: list[RewardFailed] = []
    judge = Judge(only("inverse", _divide), TOKENIZER, seen.append)
    group = await judge.evaluate(PROMPT, drawn("5\n", "0", "4"))
    assert isinstance(group, Group)
    assert [each.reward for each in group.episodes] == [4.0, 5.0], "the stop token is not in the text"
    assert group.episodes[0].tokens == tuple(TOKENIZER.encode("5\n"))
    assert (group.number, group.version) == (7, 3)
    assert judge.failures == len(seen) == 1
    rubric = Rubric([Criterion("exact", 1.0, ExactMatch()), Criterion("inverse", 1.0, _divide)])
    failed = await Judge(rubric, TOKENIZER).evaluate(PROMPT, drawn("5", "0"))
    assert isinstance(failed, FailedGroup), "a group of one has nothing to compare with"
    assert "reward 'inverse' failed for an answer to prompt 7: ZeroDivisionError" in failed.reasons[0]


LIMIT = 0.3


@asynccontextmanager
async def started(processes: RewardProcesses) -> AsyncIterator[RewardProcesses]:
    try:
        await processes.start()
        yield processes
    finally:
        await processes.close()


def processes_of(reward: Function) -> AbstractAsyncContextManager[RewardProcesses]:
    return started(RewardProcesses(lambda: only("mine", reward)))


def outcomes(results: Sequence[Score | RewardFailed]) -> list[float | str]:
    return [each.value if isinstance(each, Score) else each.reason for each in results]


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no process has to import all that this file does


def hangs_at_x(answer: JudgedAnswer) -> float:
    if answer.text == "x":
        time.sleep(1000.0)
    return float(os.getpid())


async def test_an_answer_whose_reward_hangs_fails_alone_and_its_process_is_replaced() -> None:
    async with processes_of(hangs_at_x) as processes:
        before, failed, after = outcomes(await processes.score_each(answers("a", "x", "b"), LIMIT))
        assert processes.ended == 1
    assert isinstance(before, float) and isinstance(after, float) and before != after
    assert failed == f"no score after 0.3 s; its process {before:.0f} was killed"
    assert not Path(f"/proc/{before:.0f}").exists()


def ends(answer: JudgedAnswer) -> float:
    match answer.text:
        case "exit":
            raise SystemExit(0)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "die":
            os._exit(0)
    return 1.0


async def test_a_reward_that_raises_or_ends_anything_fails_its_answer_alone() -> None:
    texts = ("exit", "a", "interrupt", "b", "cancel", "c", "die", "d")
    async with processes_of(ends) as processes:
        found = dict(zip(texts, outcomes(await processes.score_each(answers(*texts), 60.0)), strict=True))
    assert [found[name] for name in "abcd"] == [1.0] * 4
    for name, word in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt"), ("cancel", "CancelledError")):
        assert word in str(found[name])
    assert "its process ended" in str(found["die"])


async def test_answers_of_one_moment_share_a_process_and_others_get_more() -> None:
    async with processes_of(hangs_at_x) as processes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.rl.rewards.judge._PATIENCE", PATIENCE)
            quick = await asyncio.gather(*(processes.score_each(answers("a", "b"), 60.0) for _ in range(20)))
        slow = await asyncio.gather(
            processes.score_each(answers("x"), 4 * LIMIT), processes.score_each(answers("a"), 60.0)
        )
        assert isinstance(slow[0][0], RewardFailed) and isinstance(slow[1][0], Score)
        assert len({each.value for batch in quick for each in batch if isinstance(each, Score)}) == 1
        assert processes.ended == 1


async def test_a_judgement_that_is_given_up_leaves_no_process() -> None:
    async with processes_of(hangs_at_x) as processes:
        judging = asyncio.create_task(processes.score_each(answers("x"), 60.0))
        await asyncio.sleep(0.1)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
        assert outcomes(await processes.score_each(answers("a"), 60.0))[0] > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("criteria", "here"),
    [
        ({"kind": "exact"}, True),
        ({"kind": "length"}, True),
        ({"kind": "exact", "pattern": "<(.*)>"}, False),
        ({"kind": "format", "pattern": "a"}, False),
        ({"kind": "python", "function": "m:f"}, False),
    ],
)
def test_only_what_ends_by_itself_judges_in_the_event_loop(criteria: dict[str, Any], here: bool) -> None:
    for others in ((), (CriterionConfig(),)):
        config = RunConfig(reward=(CriterionConfig(**criteria), *others))
        assert isinstance(reward_of(config), Rubric) is here


@pytest.mark.parametrize("error", [ValueError, SystemExit])
async def test_a_process_that_cannot_be_started_fails_the_answers(tmp_path: Path, error: type[BaseException]) -> None:
    def broken() -> Rubric:
        raise error("no verifier here")

    processes = RewardProcesses(broken, log=tmp_path / "rewards.log")
    with pytest.raises(Exception, match="no verifier here"):
        await processes.start()
    (failed,) = await processes.score_each(answers("a"), 60.0)
    assert "no verifier here" in str(failed)
    await processes.close()


def configured(folder: Path, text: str) -> RunConfig:
    """The configuration as a run reads it again from its own directory."""
    (folder / "rewards.py").write_text("def brief(answer):\n    return 1.0 / answer.length\n")
    config = placed(parse_config(text, "run.toml", folder=folder), folder)
    return parse_config(resolved(config), "resolved.toml")


async def configured_values(config: RunConfig, *texts: str) -> list[float | str]:
    reward = reward_of(config)
    assert isinstance(reward, RewardProcesses), "code of the user's runs where it can be ended"
    async with started(reward) as processes:
        return outcomes(await processes.score_each(answers(*texts), 60.0))


async def test_a_function_of_a_file_beside_the_configuration_is_a_criterion(tmp_path: Path) -> None:
    text = '[[reward]]\nkind = "python"\nfunction = "rewards.py:brief"\nweight = 3.0'
    assert await configured_values(configured(tmp_path, text), "x", "xxx") == [3.0, 1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [("rewards.py:absent", "has no absent"), ("no_such_module:f", "No module named 'no_such_module'")],
)
async def test_a_function_that_is_not_there_is_named(tmp_path: Path, function: str, words: str) -> None:
    with pytest.raises(NoSuchCode, match=words):
        await configured_values(configured(tmp_path, f'[[reward]]\nkind = "python"\nfunction = "{function}"'), "x")


EXAMPLE = ROOT / "examples" / "rl" / "weak_verifiers.py"
example: Any = sys.modules[load_code(f"{EXAMPLE}:estimate").__module__]
"""The example, as a configuration's `function` loads it."""
estimate, NotIdentifiable = example.estimate, example.NotIdentifiable

SEEDS = range(10)


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
    assert min(gains) > 0.0 and float(np.mean(gains)) > 0.08


def test_copies_of_a_weak_verifier_do_not_outvote_the_good_ones() -> None:
    """Four verifiers that share nine votes in ten are one voice; the majority vote believes them."""
    skills = [(0.88, 0.15), (0.85, 0.2), (0.8, 0.2), (0.75, 0.3), (0.7, 0.25), (0.6, 0.4)]
    gains = []
    for seed in SEEDS:
        truth, votes = draw(seed, 0.5, skills)
        _, others = draw(seed, 0.5, [(0.6, 0.4)] * 3)
        shared = np.random.default_rng(1000 + seed).random(others.shape) < 0.9
        votes = np.concatenate([votes, np.where(shared, votes[:, 5:], others)], 1)
        found = estimate(votes.tolist())
        gains.append(gain(found, truth, votes))
        assert sum(found.for_one[5:]) < found.for_one[0]
    assert min(gains) > 0.0 and float(np.mean(gains)) > 0.1


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


def test_the_example_rewards_sums_by_verifiers_that_cannot_add() -> None:
    assert load_config(EXAMPLE.with_suffix(".toml")).reward[0].function == "weak_verifiers.py:right"
    prompts = [(number, each) for number, each in enumerate(arithmetic_held_out())]

    def reward(number: int, prompt: str, text: str) -> float:
        judged = Prompt(number=number, tokens=(0,), text=prompt)
        return float(example.right(JudgedAnswer(prompt=judged, text=text, length=2)))

    right = [reward(number, each.prompt, each.answer) for number, each in prompts]
    wrong = [reward(number, each.prompt, f"{(int(each.answer) + 5) % 28:02d}") for number, each in prompts]
    assert float(np.mean(right)) > 0.8 and float(np.mean(wrong)) < 0.2


def test_a_verifier_that_fails_makes_the_reward_of_its_answer_fail() -> None:
    verifiers = [lambda each: float(each.text), example.parity, example.size, example.rest]
    ensemble = example.WeakVerifierEnsemble(verifiers, example.sampled())
    with pytest.raises(ValueError, match="could not convert"):
        ensemble(JudgedAnswer(prompt=Prompt(number=0, tokens=(1,), text="1+1+1="), text="x", length=1))
