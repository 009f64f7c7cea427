"""The reward that a configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.data.episode import Prompt
from holdfast.rl.data.errors import BadDataset
from holdfast.rl.rewards.ensemble import Verifier, WeakVerifierEnsemble
from holdfast.rl.rewards.length_penalty import LengthPenalty
from holdfast.rl.rewards.matching import ExactMatch, FormatMatch
from holdfast.rl.rewards.reward import FunctionReward, JudgedAnswer, Reward
from holdfast.rl.rewards.rubric import Criterion, Rubric


class _AnswerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that was drawn for a prompt, whether it is right or not."""

    prompt: str
    text: str
    answer: str = ""


async def reward_of(config: RunConfig) -> Reward:
    """The reward of a configuration: one criterion, or the weighted sum of several.

    Raises `NoSuchCode`, and for an ensemble `BadDataset` and `NotIdentifiable`.
    """
    criteria = [
        Criterion(
            f"{each.kind}-{number}" if len(config.reward) > 1 else each.kind,
            each.weight,
            await _criterion(each, config),
        )
        for number, each in enumerate(config.reward)
    ]
    return Rubric(criteria)


async def _criterion(criterion: CriterionConfig, config: RunConfig) -> Reward:
    match criterion.kind:
        case "exact":
            return ExactMatch(criterion.pattern)
        case "format":
            return FormatMatch(criterion.pattern)
        case "length":
            most = config.sampling.max_new_tokens
            return LengthPenalty(most, criterion.margin or most)
        case "python":
            return _function(criterion.function)
        case "ensemble":
            verifiers = [Verifier(_function(each)) for each in criterion.verifiers]
            return await WeakVerifierEnsemble.calibrated(verifiers, read_answers(Path(criterion.answers)))


def _function(code: str) -> Reward:
    function: Any = load_code(code)
    return FunctionReward(code.rpartition(":")[2], function)


def read_answers(path: Path) -> list[JudgedAnswer]:
    """The answers of a file with a `{"prompt", "answer", "text"}` a line. Raises `BadDataset`."""
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadDataset(str(path), None, f"cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            each = msgspec.json.decode(line, type=_AnswerLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadDataset(str(path), number, f'not a line of {{"prompt", "answer", "text"}}: {error}') from None
        prompt = Prompt(number=number, tokens=(0,), text=each.prompt, answer=each.answer)
        found.append(JudgedAnswer(prompt=prompt, text=each.text, length=len(each.text)))
    return found
