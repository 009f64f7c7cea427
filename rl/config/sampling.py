"""How completions are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.rl.data.episode import Prompt, SamplingRequest
from holdfast.rl.data.seeds import seed_of, seeds_of


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a group's completions are drawn: `group` for each prompt, each with a seed of its own."""

    group: Annotated[int, Meta(ge=2, description="Completions of each prompt, which are compared.")] = 8
    batch: Annotated[int, Meta(ge=1, description="Prompts of a request, whose completions are drawn together.")] = 8
    max_new_tokens: Annotated[int, Meta(ge=1, description="The limit of a completion's tokens.")] = 128
    temperature: Annotated[float, Meta(gt=0, description="The temperature.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Draw from the likeliest tokens of this total.")] = 1.0
    stop: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...], Meta(description="Token numbers that end a completion.")
    ] = ()

    def request(self, seed: int, prompt: Prompt, draw: int, version: int | None) -> SamplingRequest:
        """The request for a prompt's group, the `draw`-th time: equal arguments give an equal request."""
        seeds = seeds_of("sample", seed, prompt.number, draw, each=range(self.group))
        return SamplingRequest(
            prompts=(prompt.tokens,),
            samples=self.group,
            seeds=seeds,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            version=version,
        )

    def turn(
        self, seed: int, number: int, draw: int, seen: Mapping[int, tuple[int, ...]], version: int | None
    ) -> SamplingRequest:
        """The request for the next turn of a group's samples, each after the tokens that it has `seen`."""
        return SamplingRequest(
            prompts=tuple(seen.values()),
            samples=1,
            seeds=tuple(seed_of("turn", seed, number, draw, sample, len(before)) for sample, before in seen.items()),
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            version=version,
        )

    def greedy(self, prompts: tuple[Prompt, ...], version: int | None) -> SamplingRequest:
        """The request for the likeliest completion of each prompt."""
        return self.greedy_turn(tuple(each.tokens for each in prompts), version)

    def greedy_turn(self, seen: tuple[tuple[int, ...], ...], version: int | None) -> SamplingRequest:
        """The request for the likeliest tokens after those that were `seen`."""
        return SamplingRequest(
            prompts=seen,
            samples=1,
            seeds=(0,) * len(seen),
            max_new_tokens=self.max_new_tokens,
            temperature=0.0,
            stop=self.stop,
            version=version,
        )
