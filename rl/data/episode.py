"""Prompts, completions, episodes and groups: what generators make, rewards judge and trainers learn from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Literal

import msgspec

from holdfast.rl.errors import InvalidEpisode

Finish = Literal["stop", "length"]
"""Why a completion ended: by a stop token, or by its limit of tokens."""

EpisodeFinish = Literal["stop", "length", "turns"]
"""Why an episode ended: by itself; with a completion that its limit of tokens cut ("length"); by the limit of turns, or
for want of room for another one."""

MOST_REWARD = 1e12
"""The largest size of a reward. Sums of squares, losses and gradients of float32 are finite up to there, and beyond."""


def is_usable_reward(reward: float) -> bool:
    """Whether a reward can be learned from: it is a finite number of a size that arithmetic in float32 bears."""
    return abs(reward) <= MOST_REWARD


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt. `number` is its position in the data order, unique in a run; `answer` is the reward's reference."""

    number: int
    tokens: tuple[int, ...]
    text: str = ""
    answer: str = ""

    def __post_init__(self) -> None:
        if self.number < 0:
            raise InvalidEpisode("Prompt", self.number, "its number is negative")
        if not self.tokens:
            raise InvalidEpisode("Prompt", self.number, "it has no tokens")
        _check_tokens("Prompt", self.number, self.tokens)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a generator drew after a prompt, a stop token included.

    `logprobs` are those of the tokens under the weights that drew them, `versions` the weights' version of each token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish

    def __post_init__(self) -> None:
        _check_drawn("Completion", None, self.tokens, (self.logprobs, self.versions))
        if self.finish not in ("stop", "length"):
            why = f"it did not end, but was cut off ({self.finish!r}): let it go on, or draw it again"
            raise InvalidEpisode("Completion", None, why)


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens after a prompt, of the policy and (in tasks of several turns) of the environment.

    `mask` is true where the policy drew the token. `logprobs` and `versions` of other tokens mean nothing. `parts`
    are the named parts of the reward.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    mask: tuple[bool, ...]
    reward: float
    finish: EpisodeFinish
    turns: int = 1
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        number = self.prompt.number
        _check_drawn("Episode", number, self.tokens, (self.logprobs, self.versions, self.mask))
        if not is_usable_reward(self.reward):
            _check_finite("Episode", number, "reward", (self.reward,))
            raise InvalidEpisode("Episode", number, f"its reward {self.reward} is beyond {MOST_REWARD:g}")
        if not math.isfinite(sum(self.parts.values())):
            _check_finite("Episode", number, "parts", self.parts.values())
        if self.turns < 1:
            raise InvalidEpisode("Episode", number, f"turns={self.turns}, and the least is 1")


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of one prompt. Their rewards are compared with each other."""

    number: int
    prompt: Prompt
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        if self.number < 0:
            raise InvalidEpisode("Group", self.prompt.number, f"its number is {self.number}")
        for each in self.episodes:
            if each.prompt is not self.prompt and each.prompt != self.prompt:
                raise InvalidEpisode("Group", self.prompt.number, "an episode has another prompt")
        if not any(any(each.mask) for each in self.episodes):
            raise InvalidEpisode("Group", self.prompt.number, "no episode has a token that the policy drew")

    @property
    def version(self) -> int:
        """The oldest version of a token that the policy drew."""
        drawn = [
            each.versions if all(each.mask) else tuple(compress(each.versions, each.mask)) for each in self.episodes
        ]
        return min([min(versions) for versions in drawn if versions])


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for `samples` completions of each prompt; those of a prompt stand side by side in the reply.

    `seeds` has one for each sample, so a reply is a function of the request and the weights. `temperature` 0 means
    the likeliest token. `stop` are token numbers. If `version` is given, the generator waits for exactly that one.
    A request that is `alone` is joined with no other: which ones come at the same time must not change its bits.
    """

    prompts: tuple[tuple[int, ...], ...]
    samples: int
    seeds: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    version: int | None = None
    alone: bool = False

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise InvalidEpisode("SamplingRequest", None, "there is no prompt, or one without tokens")
        for name in ("samples", "max_new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise InvalidEpisode("SamplingRequest", None, f"{name}={value}, and the least is 1")
        wanted = len(self.prompts) * self.samples
        if len(self.seeds) != wanted:
            raise InvalidEpisode("SamplingRequest", None, f"{len(self.seeds)} seeds, and {wanted} samples")
        if min(self.seeds) < 0 or max(self.seeds) >= 1 << 64:
            raise InvalidEpisode("SamplingRequest", None, "a seed is not a number of 64 bits without a sign")
        if not 0.0 <= self.temperature < math.inf:
            raise InvalidEpisode("SamplingRequest", None, f"temperature={self.temperature} is not finite and >= 0")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidEpisode("SamplingRequest", None, f"top_p={self.top_p} is not in (0, 1]")
        if min(map(min, self.prompts)) < 0 or (self.stop and min(self.stop) < 0):
            for tokens in (*self.prompts, self.stop):
                _check_tokens("SamplingRequest", None, tokens)


def _check_drawn(kind: str, number: int | None, tokens: tuple[int, ...], fields: tuple[Sequence[float], ...]) -> None:
    """Check what was drawn: `fields` are log-probs, versions and, of an episode, the mask."""
    for name, field in zip(("logprobs", "versions", "mask"), fields, strict=False):
        if len(field) != len(tokens):
            raise InvalidEpisode(kind, number, f"tokens has length {len(tokens)}, {name} has {len(field)}")
    if tokens and min(tokens) < 0:
        _check_tokens(kind, number, tokens)
    if not math.isfinite(sum(fields[0])):  # first as a whole: it is done for each episode at each hop
        _check_finite(kind, number, "logprobs", fields[0])


def _check_tokens(kind: str, number: int | None, tokens: Iterable[int]) -> None:
    if (least := min(tokens, default=0)) < 0:
        raise InvalidEpisode(kind, number, f"token number {least} is negative")


def _check_finite(kind: str, number: int | None, name: str, values: Collection[float]) -> None:
    if wild := [each for each in values if not math.isfinite(each)]:
        raise InvalidEpisode(kind, number, f"{name} holds {wild[0]}, which is not finite")
