"""Prompts, completions, episodes, groups and requests are refused when they contradict themselves."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from holdfast.rl.data.episode import Completion, Episode, Group, Prompt, SamplingRequest
from holdfast.rl.errors import InvalidEpisode

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
REQUEST = SamplingRequest(prompts=((1,), (2, 3)), samples=2, seeds=(1, 2, 3, 4), max_new_tokens=8, temperature=1.0)


@pytest.mark.parametrize(
    "value", [PROMPT, COMPLETION, EPISODE, REQUEST, Group(number=0, prompt=PROMPT, episodes=(EPISODE,))]
)
def test_a_round_trip_keeps_it(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


def test_the_version_of_a_group_is_that_of_its_oldest_policy_token() -> None:
    assert Group(number=0, prompt=PROMPT, episodes=(EPISODE,)).version == 5, "0 belongs to the environment's token"


@pytest.mark.parametrize(
    "value, wrong, words",
    [
        (PROMPT, {"number": -1}, "negative"),
        (PROMPT, {"tokens": ()}, "no tokens"),
        (PROMPT, {"tokens": (1, -1)}, "token number -1"),
        (COMPLETION, {"logprobs": (0.0,)}, "tokens has length 2, logprobs has 1"),
        (COMPLETION, {"versions": (1, 2, 3)}, "versions has 3"),
        (COMPLETION, {"logprobs": (0.0, math.nan)}, "logprobs holds nan"),
        (EPISODE, {"mask": (True,)}, "prompt 7: tokens has length 3, mask has 1"),
        (EPISODE, {"reward": math.inf}, "reward holds inf"),
        (EPISODE, {"parts": {"exact": math.nan}}, "parts holds nan"),
        (EPISODE, {"turns": 0}, "turns=0"),
        (Group(number=0, prompt=PROMPT, episodes=(EPISODE,)), {"episodes": ()}, "no episode"),
        (Group(number=0, prompt=PROMPT, episodes=(EPISODE,)), {"number": -1}, "number is -1"),
        (
            Group(number=0, prompt=PROMPT, episodes=(EPISODE,)),
            {"prompt": Prompt(number=8, tokens=(1,))},
            "another prompt",
        ),
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
