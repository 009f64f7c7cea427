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


def codec_of(tokenizer: Tokenizer) -> TextCodec:
    """The codec for a policy's tokenizer."""
    return LineCodec(tokenizer)
