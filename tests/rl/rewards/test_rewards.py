"""Rewards score answers; one that raises, hangs or returns NaN fails one episode and names itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from holdfast.rl.data.episode import Completion, Group, Prompt
from holdfast.rl.data.prompts import CharacterTokenizer
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.errors import RewardFailed
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.rewards.reward import (
    Criterion,
    ExactMatch,
    FormatMatch,
    FunctionReward,
    JudgedAnswer,
    LengthPenalty,
    Reward,
    Rubric,
    Score,
    score_each,
)

PROMPT = Prompt(number=7, tokens=(1,), text="7+8+5=", answer="20")
TOKENIZER = CharacterTokenizer()


def answer(text: str, length: int = 0) -> JudgedAnswer:
    return JudgedAnswer(prompt=PROMPT, text=text, length=length or len(text))


def values(reward: Reward, *answers: JudgedAnswer) -> list[float]:
    return [each.value for each in asyncio.run(_scores(reward, answers))]


async def _scores(reward: Reward, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
    return await reward.score(answers)


def completion(text: str, stopped: bool = False) -> Completion:
    tokens = tuple(TOKENIZER.encode(text))
    many = len(tokens)
    finish = "stop" if stopped else "length"
    return Completion(tokens=tokens, logprobs=(-0.1,) * many, versions=(3,) * many, finish=finish)  # type: ignore[arg-type]


def test_exact_match_compares_with_the_reference() -> None:
    assert values(ExactMatch(), answer("20"), answer(" 20\n"), answer("2"), answer("20 0")) == [1.0, 1.0, 0.0, 0.0]


def test_the_answer_may_be_extracted() -> None:
    reward = ExactMatch(extract=r"<answer>(.*?)</answer>")
    texts = ("<answer>20</answer>", "<answer>1</answer> no: <answer> 20 </answer>", "20", "<answer>20")
    assert values(reward, *map(answer, texts)) == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="one group"):
        ExactMatch(extract="no group")


def test_a_format_is_matched_as_a_whole() -> None:
    assert values(FormatMatch(r"\d\d"), answer("20"), answer("200"), answer("a20")) == [1.0, 0.0, 0.0]


def test_long_answers_cost_up_to_one() -> None:
    lengths = (1, 6, 8, 10, 25)
    assert values(LengthPenalty(most=10, margin=4), *(answer("x", each) for each in lengths)) == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="margin=11"):
        LengthPenalty(most=10, margin=11)


def test_a_rubric_adds_weighted_criteria_and_names_the_parts() -> None:
    rubric = Rubric(
        [
            Criterion("exact", 1.0, ExactMatch()),
            Criterion("format", 0.5, FormatMatch(r"\d+")),
            Criterion("shouting", -2.0, FunctionReward("shouting", lambda each: float("!" in each.text))),
        ]
    )
    scores = asyncio.run(_scores(rubric, [answer("20"), answer("3"), answer("20!")]))
    assert [each.value for each in scores] == [1.5, 0.5, -2.0]
    assert scores[1].parts == {"exact": 0.0, "format": 1.0, "shouting": 0.0}
    with pytest.raises(ValueError, match="names of their own"):
        Rubric([Criterion("a", 1.0, ExactMatch()), Criterion("a", 1.0, ExactMatch())])


def test_a_criterion_that_raises_is_named() -> None:
    rubric = Rubric([Criterion("exact", 1.0, ExactMatch()), Criterion("broken", 1.0, FunctionReward("f", _divide))])
    (score, failed) = asyncio.run(score_each(rubric, [answer("20"), answer("0")], 60.0))
    assert isinstance(score, Score)
    assert isinstance(failed, RewardFailed)
    assert "'rubric' failed for an answer to prompt 7: criterion 'broken'" in str(failed)


def _divide(each: JudgedAnswer) -> float:
    return 20 / int(each.text)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e308, -1e39])
def test_a_score_that_no_loss_can_be_computed_with_fails_its_answer_alone(bad: float) -> None:
    reward = FunctionReward("odd", lambda each: bad if each.text == "1" else 0.5)
    first, second = asyncio.run(score_each(reward, [answer("1"), answer("2")], 60.0))
    assert isinstance(first, RewardFailed)
    assert (first.reward, first.number) == ("odd", 7)
    assert str(bad) in str(first)
    assert second == Score(0.5)


def test_a_part_that_is_not_finite_is_named() -> None:
    class Odd:
        name = "odd"

        async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
            return [Score(1.0, {"style": math.nan}) for _ in answers]

    (failed,) = asyncio.run(score_each(Odd(), [answer("1")], 60.0))
    assert "style is nan" in str(failed)


def test_a_reward_that_hangs_or_miscounts_fails() -> None:
    class Hangs:
        name = "hangs"

        async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
            await asyncio.Event().wait()
            return []

    class Miscounts:
        name = "miscounts"

        async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
            return []

    for reward, words in ((Hangs(), "no score after 0.01 s"), (Miscounts(), "0 scores for 1 answers")):
        for failed in asyncio.run(score_each(reward, [answer("1"), answer("2")], 0.01)):
            assert words in str(failed)


async def judged(judge: Judge, *completions: Completion) -> Group | FailedGroup:
    async with judge:
        return await judge.evaluate(PROMPT, completions)


def test_a_group_is_made_of_what_could_be_judged() -> None:
    seen: list[RewardFailed] = []
    judge = Judge(FunctionReward("inverse", _divide), TOKENIZER, seen.append)
    group = asyncio.run(judged(judge, completion("5\n", stopped=True), completion("0"), completion("4")))
    assert isinstance(group, Group)
    assert [each.reward for each in group.episodes] == [4.0, 5.0], "the stop token is not in the text"
    assert group.episodes[0].tokens == tuple(TOKENIZER.encode("5\n"))
    assert (group.number, group.version) == (7, 3)
    assert judge.failures == len(seen) == 1


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    judge = Judge(FunctionReward("inverse", _divide), TOKENIZER)
    failed = asyncio.run(judged(judge, completion("5"), completion("0")))
    assert isinstance(failed, FailedGroup)
    assert "ZeroDivisionError" in failed.reasons[0]
