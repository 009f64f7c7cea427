"""Prompts in their order, and what is refused: bad data sets, and episodes that contradict themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rl.data.episode import Completion, Episode, Group, Prompt, SamplingRequest
from holdfast.rl.data.prompts import (
    CharacterTokenizer,
    Problem,
    PromptSource,
    arithmetic_held_out,
    arithmetic_training,
    read_problems,
)
from holdfast.rl.errors import BadDataset, InvalidEpisode

TOKENIZER = CharacterTokenizer()


@given(count=st.integers(1, 30), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_an_epoch_holds_every_problem_once(count: int, seed: int, epoch: int) -> None:
    problems = [Problem(f"{number}=") for number in range(count)]
    source = PromptSource(problems, TOKENIZER, seed)
    prompts = [source.prompt(number) for number in range(epoch * count, (epoch + 1) * count)]
    assert sorted(each.text for each in prompts) == sorted(each.prompt for each in problems)
    assert [each.number for each in prompts] == list(range(epoch * count, (epoch + 1) * count))
    assert prompts == [PromptSource(problems, TOKENIZER, seed).prompt(each.number) for each in prompts]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[str, ...]:
        source = PromptSource(arithmetic_training(), TOKENIZER, seed)
        return tuple(source.prompt(epoch * len(source) + place).text for place in range(len(source)))

    assert len({order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_the_arithmetic_task_holds_out_problems_that_are_never_trained_on() -> None:
    trained, held_out = (
        {each.prompt for each in problems} for problems in (arithmetic_training(), arithmetic_held_out())
    )
    assert trained and held_out and not trained & held_out
    for each in (*arithmetic_training(), *arithmetic_held_out()):
        assert int(each.answer) == sum(map(int, each.prompt.rstrip("=").split("+")))
    assert TOKENIZER.decode(TOKENIZER.encode("7+8+5= \n")) == "7+8+5= \n"


def test_problems_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "03"}\n\n{"prompt": "9+9="}\n')
    assert read_problems(path) == (Problem("1+2=", "03"), Problem("9+9="))


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"prompt": "1="}\n{"prompt": 2}\n', r"sums.jsonl:2: .*Expected `str`, got `int`"),
        ('{"prompt": "1=", "reply": "x"}', r"sums.jsonl:1: .*reply"),
        ("{", r"sums.jsonl:1: not a line"),
        ("\n", "no prompts"),
        (None, r"sums.jsonl: cannot be read: No such file"),
    ],
)
def test_a_bad_line_or_a_missing_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "sums.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadDataset, match=words):
        read_problems(path)


def test_a_prompt_that_the_tokenizer_does_not_know_is_named() -> None:
    with pytest.raises(BadDataset, match=r"sums: the tokenizer cannot encode prompt 2, 'a='"):
        PromptSource([Problem("1="), Problem("a=")], TOKENIZER, 0, "sums")
    with pytest.raises(BadDataset, match="has no tokens"):
        PromptSource([Problem("")], TOKENIZER, 0)
    with pytest.raises(BadDataset, match="no prompts"):
        PromptSource([], TOKENIZER, 0)


PROMPT = Prompt(number=7, tokens=(1, 2), text="1+2=", answer="3")
COMPLETION = Completion(tokens=(3, 4), logprobs=(-0.5, 0.0), versions=(5, 6), finish="stop")
EPISODE = Episode(
    prompt=PROMPT,
    tokens=(3, 9, 4),
    logprobs=(-0.5, 0.0, -1.0),
    versions=(6, 0, 5),
    mask=(True, False, True),
    reward=1.0,
    finish="stop",
    turns=2,
    parts={"exact": 1.0},
)
GROUP = Group(number=0, prompt=PROMPT, episodes=(EPISODE,))
REQUEST = SamplingRequest(prompts=((1,), (2, 3)), samples=2, seeds=(1, 2, 3, 4), max_new_tokens=8, temperature=1.0)


@pytest.mark.parametrize("value", [PROMPT, COMPLETION, EPISODE, REQUEST, GROUP])
def test_a_round_trip_keeps_it(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


def test_the_version_of_a_group_is_that_of_its_oldest_policy_token() -> None:
    assert GROUP.version == 5, "0 belongs to the environment's token"


@pytest.mark.parametrize(
    "value, wrong, words",
    [
        (PROMPT, {"number": -1}, "negative"),
        (PROMPT, {"tokens": ()}, "no tokens"),
        (PROMPT, {"tokens": (1, -1)}, "token number -1"),
        (COMPLETION, {"logprobs": (0.0,)}, "tokens has length 2, logprobs has 1"),
        (COMPLETION, {"versions": (1, 2, 3)}, "versions has 3"),
        (COMPLETION, {"logprobs": (0.0, math.nan)}, "logprobs holds nan"),
        (COMPLETION, {"finish": "aborted"}, "let it go on, or draw it again"),
        (EPISODE, {"mask": (True,)}, "prompt 7: tokens has length 3, mask has 1"),
        (EPISODE, {"reward": math.inf}, "reward holds inf"),
        (EPISODE, {"reward": math.nan}, "reward"),
        (EPISODE, {"reward": 1e308}, "reward"),
        (EPISODE, {"reward": -1e39}, "reward"),
        (EPISODE, {"parts": {"exact": math.nan}}, "parts holds nan"),
        (EPISODE, {"turns": 0}, "turns=0"),
        (GROUP, {"episodes": ()}, "no episode"),
        (GROUP, {"number": -1}, "number is -1"),
        (GROUP, {"prompt": Prompt(number=8, tokens=(1,))}, "another prompt"),
        (REQUEST, {"seeds": (1,)}, "1 seeds, and 4 samples"),
        (REQUEST, {"samples": 0}, "samples=0"),
        (REQUEST, {"prompts": ((1,), ())}, "without tokens"),
        (REQUEST, {"max_new_tokens": 0}, "max_new_tokens=0"),
        (REQUEST, {"temperature": math.nan}, "temperature"),
        (REQUEST, {"top_p": 0.0}, "top_p"),
        (REQUEST, {"stop": (-5,)}, "token number -5"),
    ],
)
def test_a_contradiction_is_refused_by_name(value: msgspec.Struct, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidEpisode, match=words):
        msgspec.structs.replace(value, **wrong)


def test_a_contradiction_in_bytes_is_refused_too() -> None:
    wild = msgspec.msgpack.encode({"tokens": [1], "logprobs": [], "versions": [1], "finish": "stop"})
    with pytest.raises(InvalidEpisode):
        msgspec.msgpack.decode(wild, type=Completion)
