"""Rewards by the words of a configuration: functions of one's own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.rl.config.named_code import NoSuchCode
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import parse_config, placed, resolved
from holdfast.rl.data.episode import Prompt
from holdfast.rl.rewards.judge import RewardProcesses, reward_of
from holdfast.rl.rewards.reward import JudgedAnswer, Score

REWARDS = """
def brief(answer):
    return 1.0 / answer.length
"""


def configured(folder: Path, text: str) -> RunConfig:
    """The configuration as a run reads it again from its own directory."""
    (folder / "rewards.py").write_text(REWARDS)
    config = placed(parse_config(text, "run.toml", folder=folder), folder)
    return parse_config(resolved(config), "resolved.toml")


def values(config: RunConfig, *texts: str) -> list[float]:
    async def body() -> list[float]:
        prompt = Prompt(number=0, tokens=(1,))
        answers = [JudgedAnswer(prompt=prompt, text=text, length=len(text)) for text in texts]
        reward = reward_of(config)
        assert isinstance(reward, RewardProcesses), "code of the user's runs where it can be ended"
        try:
            await reward.start()
            scores = await reward.score_each(answers, 60.0)
        finally:
            await reward.close()
        return [each.value for each in scores if isinstance(each, Score)]

    return asyncio.run(body())


def test_a_function_of_a_file_beside_the_configuration_is_a_criterion(tmp_path: Path) -> None:
    text = '[[reward]]\nkind = "python"\nfunction = "rewards.py:brief"\nweight = 3.0'
    assert values(configured(tmp_path, text), "x", "xxx") == [3.0, 1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [("rewards.py:absent", "has no absent"), ("no_such_module:f", "No module named 'no_such_module'")],
)
def test_a_function_that_is_not_there_is_named(tmp_path: Path, function: str, words: str) -> None:
    with pytest.raises(NoSuchCode, match=words):
        values(configured(tmp_path, f'[[reward]]\nkind = "python"\nfunction = "{function}"'), "x")
