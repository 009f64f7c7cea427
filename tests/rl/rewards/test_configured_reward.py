"""Rewards by the words of a configuration: functions of one's own, and ensembles of them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from holdfast.rl.config.load import parse_config
from holdfast.rl.config.named_code import NoSuchCode
from holdfast.rl.config.resume import placed, resolved
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Prompt
from holdfast.rl.data.errors import BadDataset
from holdfast.rl.rewards.configured_reward import reward_of
from holdfast.rl.rewards.errors import NotIdentifiable
from holdfast.rl.rewards.reward import JudgedAnswer, Score
from holdfast.rl.rewards.reward_processes import RewardProcesses

REWARDS = """
def brief(answer):
    return 1.0 / answer.length

def says(word):
    return lambda answer: float(word in answer.text)

one, two, three = says("a"), says("b"), says("c")
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


ENSEMBLE = """[[reward]]
kind = "ensemble"
verifiers = ["rewards.py:one", "rewards.py:two", "rewards.py:three"]
answers = "answers.jsonl"
"""


def test_an_ensemble_learns_its_weights_from_texts_without_labels(tmp_path: Path) -> None:
    """Two verifiers see the truth nine times of ten, the third seven times."""
    draw, skills = random.Random(1), {"a": 0.9, "b": 0.9, "c": 0.7}
    lines = []
    for _ in range(400):
        right = draw.random() < 0.5
        seen = "".join(word for word, skill in skills.items() if (draw.random() < skill) == right)
        lines.append(json.dumps({"prompt": "p", "text": seen or "-"}))
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    config = configured(tmp_path, ENSEMBLE)
    all_, good, bad, none = values(config, "abc", "ab", "c", "-")
    assert all_ > good > 0.7 > 0.3 > bad > none
    assert values(config, "ab") == [good], "an answer's reward does not depend on those before"


@pytest.mark.parametrize(
    ("lines", "error"), [('{"prompt": "p", "text": "a"}', NotIdentifiable), ('{"prompt": "p"}', BadDataset)]
)
def test_texts_that_tell_nothing_are_refused(tmp_path: Path, lines: str, error: type[Exception]) -> None:
    (tmp_path / "answers.jsonl").write_text(lines)
    with pytest.raises(error):
        values(configured(tmp_path, ENSEMBLE), "a")
