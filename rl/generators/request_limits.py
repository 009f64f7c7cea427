"""`RequestLimits`: refuses sampling requests that a model cannot serve, before anything is drawn."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.rl.data.episode import SamplingRequest
from holdfast.rl.generators.errors import BadRequest


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The tokens of a sample, prompt included, and those that the model knows, numbered from 0."""

    length: int
    vocabulary: int

    def check(self, request: SamplingRequest) -> None:
        """Raise `BadRequest` unless the request keeps within the limits."""
        longest = max(map(len, request.prompts)) + request.max_new_tokens
        if longest > self.length:
            raise BadRequest(
                f"its longest prompt and max_new_tokens make {longest} tokens, and a sample has at most {self.length}",
                "shorten the prompt, or lower max_new_tokens",
            )
        highest = max(map(max, request.prompts))
        if highest >= self.vocabulary:
            raise BadRequest(
                f"a prompt has token {highest}, and the model {self.vocabulary} tokens",
                "take the model's own tokenizer",
            )
