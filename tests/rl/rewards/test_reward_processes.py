"""Rewards that hang, block the interpreter, or end their process fail their own answer; all others are judged."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.rl.data.episode import Prompt
from holdfast.rl.errors import RewardFailed
from holdfast.rl.rewards.judge import Judge, RewardProcesses
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
    is_bounded,
)
from support.waiting import PATIENCE

T = TypeVar("T")
PROMPT = Prompt(number=7, tokens=(1,))
LIMIT = 0.3


def answers(*texts: str) -> list[JudgedAnswer]:
    return [JudgedAnswer(prompt=PROMPT, text=text, length=1) for text in texts]


def used(reward: Callable[[JudgedAnswer], float] | Reward, work: Callable[[RewardProcesses], Awaitable[T]]) -> T:
    """What `work` returns with the processes of a reward."""
    given = FunctionReward("mine", reward) if callable(reward) else reward

    async def make() -> Reward:
        return given

    async def body() -> T:
        processes = RewardProcesses(make)
        try:
            await processes.start()
            return await work(processes)
        finally:
            await processes.close()

    return asyncio.run(body())


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


@pytest.mark.parametrize("wrap", [FunctionReward, lambda name, it: two_criteria(FunctionReward(name, it))])
def test_a_reward_that_raises_or_ends_anything_fails_its_answer_alone(
    wrap: Callable[[str, Callable[[JudgedAnswer], float]], Reward],
) -> None:
    texts = ("exit", "a", "interrupt", "b", "cancel", "c", "die", "d")

    async def work(processes: RewardProcesses) -> list[float | str]:
        return outcomes(await processes.score_each(answers(*texts), 60.0))

    found = dict(zip(texts, used(wrap("mine", ends), work), strict=True))
    assert [found[name] for name in "abcd"] == [1.0] * 4
    for name, word in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt"), ("cancel", "CancelledError")):
        assert word in str(found[name])
    assert "its process ended" in str(found["die"])


def two_criteria(reward: Reward) -> Rubric:
    return Rubric([Criterion("mine", 1.0, reward), Criterion("length", 1.0, LengthPenalty(10, 5))])


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
    ("reward", "bounded"),
    [
        (ExactMatch(), True),
        (LengthPenalty(10, 5), True),
        (Rubric([Criterion("exact", 1.0, ExactMatch())]), True),
        (ExactMatch("<(.*)>"), False),
        (FormatMatch("a"), False),
        (FunctionReward("mine", len), False),  # type: ignore[arg-type]
        (two_criteria(FormatMatch("a")), False),
    ],
)
def test_only_what_ends_by_itself_judges_in_the_event_loop(reward: Reward, bounded: bool) -> None:
    assert is_bounded(reward) is bounded
    judge = Judge(reward, None)  # type: ignore[arg-type]
    assert isinstance(judge._reward, RewardProcesses) is not bounded


@pytest.mark.parametrize("error", [ValueError, SystemExit])
async def test_a_process_that_cannot_be_started_fails_the_answers(tmp_path: Path, error: type[BaseException]) -> None:
    async def broken() -> Reward:
        raise error("no verifier here")

    processes = RewardProcesses(broken, log=tmp_path / "rewards.log")
    with pytest.raises(Exception, match="no verifier here"):
        await processes.start()
    (failed,) = await processes.score_each(answers("a"), 60.0)
    assert "no verifier here" in str(failed)
    await processes.close()


def test_a_reward_may_be_awaited(tmp_path: Path) -> None:
    class Awaits:
        name = "awaits"

        async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
            await asyncio.sleep(1000.0 if answers[0].text == "x" else 0.0)
            return [Score(1.0) for _ in answers]

    async def work(processes: RewardProcesses) -> list[float | str]:
        found = outcomes(await processes.score_each(answers("x", "a"), LIMIT))
        assert processes.ended == 0, "it could be cancelled"
        return found

    assert used(Awaits(), work) == ["no score after 0.3 s", 1.0]
