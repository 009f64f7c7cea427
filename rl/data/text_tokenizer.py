"""A tokenizer without a file: one token for each printable character of ASCII, and the end of a line."""

from __future__ import annotations

from collections.abc import Sequence

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_UNKNOWN = CHARACTERS.index("?")


class TextTokenizer:
    """Characters as tokens. Others than the 96 that it has become question marks."""

    vocabulary = len(CHARACTERS)

    def encode(self, text: str) -> list[int]:
        """Characters to token numbers."""
        found = [CHARACTERS.find(character) for character in text]
        return [_UNKNOWN if each < 0 else each for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Token numbers to characters."""
        return "".join(map(CHARACTERS.__getitem__, tokens))
