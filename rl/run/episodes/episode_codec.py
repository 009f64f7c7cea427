"""How the texts of an environment become tokens for the policy."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.rl.data.prompts import Tokenizer
from holdfast.rl.environments.play import TextCodec


class LineCodec:
    """Each observation is a line of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, turn: int) -> Sequence[int]:
        """The tokens of an observation."""
        return self._tokenizer.encode(f"\n{text}\n" if turn else f"{text}\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of what the policy drew."""
        return self._tokenizer.decode(tokens)


class PromptCodec(LineCodec):
    """The first observation is encoded as a prompt is, for a policy that learns from prompts too."""

    def encode(self, text: str, turn: int) -> Sequence[int]:
        """The tokens of an observation."""
        return super().encode(text, turn) if turn else self._tokenizer.encode(text)


def codec_of(tokenizer: Tokenizer, *, beside_prompts: bool) -> TextCodec:
    """The codec for a policy's tokenizer; `beside_prompts`: other groups of the run are prompts."""
    return PromptCodec(tokenizer) if beside_prompts else LineCodec(tokenizer)
