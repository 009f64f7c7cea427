"""Rewards score answers, here and in processes; one that raises, hangs or ends its process fails one episode."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast.rl.config.named_code import NoSuchCode
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.config.toml import parse_config, placed, resolved
from holdfast.rl.data.episode import Completion, Group, Prompt
from holdfast.rl.data.prompts import CharacterTokenizer
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.errors import RewardFailed
from holdfast.rl.rewards.judge import Judge, RewardProcesses, reward_of
from holdfast.rl.rewards.reward import Criterion, ExactMatch, FormatMatch, JudgedAnswer, LengthPenalty, Rubric, Score
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


def completion(text: str, stopped: bool = False) -> Completion:
    tokens = tuple(TOKENIZER.encode(text))
    many = len(tokens)
    finish = "stop" if stopped else "length"
    return Completion(tokens=tokens, logprobs=(-0.1,) * many, versions=(3,) * many, finish=finish)  # type: ignore[arg-type]


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


def test_a_criterion_that_raises_is_named() -> None:
    rubric = Rubric([Criterion("exact", 1.0, ExactMatch()), Criterion("broken", 1.0, _divide)])
    score, failed = rubric.score(answer("20")), rubric.score(answer("0"))
    assert isinstance(score, Score)
    assert isinstance(failed, RewardFailed)
    assert "reward 'broken' failed for an answer to prompt 7: ZeroDivisionError" in str(failed)


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


async def judged(judge: Judge, *completions: Completion) -> Group | FailedGroup:
    return await judge.evaluate(PROMPT, completions)


def test_a_group_is_made_of_what_could_be_judged() -> None:
    seen: list[RewardFailed] = []
    judge = Judge(only("inverse", _divide), TOKENIZER, seen.append)
    group = asyncio.run(judged(judge, completion("5\n", stopped=True), completion("0"), completion("4")))
    assert isinstance(group, Group)
    assert [each.reward for each in group.episodes] == [4.0, 5.0], "the stop token is not in the text"
    assert group.episodes[0].tokens == tuple(TOKENIZER.encode("5\n"))
    assert (group.number, group.version) == (7, 3)
    assert judge.failures == len(seen) == 1
    failed = asyncio.run(judged(Judge(only("inverse", _divide), TOKENIZER), completion("5"), completion("0")))
    assert isinstance(failed, FailedGroup), "a group of one has nothing to compare with"
    assert "ZeroDivisionError" in failed.reasons[0]


T = TypeVar("T")
LIMIT = 0.3


async def started(processes: RewardProcesses, work: Callable[[RewardProcesses], Awaitable[T]]) -> T:
    """What `work` returns with these processes."""
    try:
        await processes.start()
        return await work(processes)
    finally:
        await processes.close()


def used(reward: Function, work: Callable[[RewardProcesses], Awaitable[T]]) -> T:
    """What `work` returns with the processes of a reward."""
    return asyncio.run(started(RewardProcesses(lambda: only("mine", reward)), work))


def outcomes(results: Sequence[Score | RewardFailed]) -> list[float | str]:
    return [each.value if isinstance(each, Score) else each.reason for each in results]


def hangs_at_x(answer: JudgedAnswer) -> float:
    if answer.text == "x":
        time.sleep(1000.0)
    return float(os.getpid())


def test_an_answer_whose_reward_hangs_fails_alone_and_its_process_is_replaced() -> None:
    async def work(processes: RewardProcesses) -> list[float | str]:
        results = await processes.score_each(answers("a", "x", "b"), LIMIT)
        assert processes.ended == 1
        return outcomes(results)

    before, failed, after = used(hangs_at_x, work)
    assert isinstance(before, float) and isinstance(after, float) and before != after
    assert failed == f"no score after 0.3 s; its process {before:.0f} was killed"
    assert not Path(f"/proc/{before:.0f}").exists()


def test_a_pattern_that_backtracks_does_not_stop_the_event_loop() -> None:
    """A regular expression holds the interpreter's lock until it is done."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(LIMIT / 10)

    async def work(processes: RewardProcesses) -> list[float | str]:
        ticking = asyncio.create_task(tick())
        found = outcomes(await processes.score_each(answers("aab", "a" * 40 + "!", "b"), LIMIT))
        ticking.cancel()
        return found

    right, failed, wrong = used(FormatMatch("(a+)+b"), work)
    assert (right, wrong) == (1.0, 0.0)
    assert "no score after 0.3 s" in str(failed)
    assert ticks > 10


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


def test_a_reward_that_raises_or_ends_anything_fails_its_answer_alone() -> None:
    texts = ("exit", "a", "interrupt", "b", "cancel", "c", "die", "d")

    async def work(processes: RewardProcesses) -> list[float | str]:
        return outcomes(await processes.score_each(answers(*texts), 60.0))

    found = dict(zip(texts, used(ends, work), strict=True))
    assert [found[name] for name in "abcd"] == [1.0] * 4
    for name, word in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt"), ("cancel", "CancelledError")):
        assert word in str(found[name])
    assert "its process ended" in str(found["die"])


def test_answers_of_one_moment_share_a_process_and_others_get_more() -> None:
    async def work(processes: RewardProcesses) -> tuple[int, int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.rl.rewards.judge._PATIENCE", PATIENCE)
            quick = await asyncio.gather(*(processes.score_each(answers("a", "b"), 60.0) for _ in range(20)))
        slow = await asyncio.gather(
            processes.score_each(answers("x"), 4 * LIMIT), processes.score_each(answers("a"), 60.0)
        )
        assert isinstance(slow[0][0], RewardFailed) and isinstance(slow[1][0], Score)
        return len({each.value for batch in quick for each in batch if isinstance(each, Score)}), processes.ended

    pids, ended = used(hangs_at_x, work)
    assert pids == 1
    assert ended == 1


def test_a_judgement_that_is_given_up_leaves_no_process() -> None:
    async def work(processes: RewardProcesses) -> None:
        judging = asyncio.create_task(processes.score_each(answers("x"), 60.0))
        await asyncio.sleep(0.1)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
        assert outcomes(await processes.score_each(answers("a"), 60.0))[0] > 0  # type: ignore[operator]

    used(hangs_at_x, work)


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


REWARDS = """
def brief(answer):
    return 1.0 / answer.length
"""


def configured(folder: Path, text: str) -> RunConfig:
    """The configuration as a run reads it again from its own directory."""
    (folder / "rewards.py").write_text(REWARDS)
    config = placed(parse_config(text, "run.toml", folder=folder), folder)
    return parse_config(resolved(config), "resolved.toml")


def configured_values(config: RunConfig, *texts: str) -> list[float | str]:
    async def work(processes: RewardProcesses) -> list[float | str]:
        return outcomes(await processes.score_each(answers(*texts), 60.0))

    reward = reward_of(config)
    assert isinstance(reward, RewardProcesses), "code of the user's runs where it can be ended"
    return asyncio.run(started(reward, work))


def test_a_function_of_a_file_beside_the_configuration_is_a_criterion(tmp_path: Path) -> None:
    text = '[[reward]]\nkind = "python"\nfunction = "rewards.py:brief"\nweight = 3.0'
    assert configured_values(configured(tmp_path, text), "x", "xxx") == [3.0, 1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [("rewards.py:absent", "has no absent"), ("no_such_module:f", "No module named 'no_such_module'")],
)
def test_a_function_that_is_not_there_is_named(tmp_path: Path, function: str, words: str) -> None:
    with pytest.raises(NoSuchCode, match=words):
        configured_values(configured(tmp_path, f'[[reward]]\nkind = "python"\nfunction = "{function}"'), "x")
