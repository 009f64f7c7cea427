"""Numbers and nouns that agree."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """`count` with its noun: 1 rebuild, 2 rebuilds, 1,000 steps."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
