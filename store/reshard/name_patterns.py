"""Patterns of dotted names: `*` stands for one word between dots, `**` for any number of them."""

from __future__ import annotations

import re
from functools import lru_cache

_WILDCARDS = re.compile(r"\*\*|\*")
_WORDS = {"**": "(.+)", "*": r"([^.]+)"}


@lru_cache(maxsize=1 << 10)
def _compiled(pattern: str) -> re.Pattern[str]:
    literals = map(re.escape, _WILDCARDS.split(pattern))
    words = [_WORDS[each] for each in wildcards(pattern)] + [""]
    return re.compile("".join(part for pair in zip(literals, words, strict=True) for part in pair))


def wildcards(pattern: str) -> list[str]:
    """The wildcards of a pattern, in order."""
    return _WILDCARDS.findall(pattern)


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the wildcards of a pattern stand for in a name; None if it does not match."""
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groups()


def fill(pattern: str, words: tuple[str, ...]) -> str:
    """The name that a pattern gives with these words for its wildcards."""
    literals = _WILDCARDS.split(pattern)
    return "".join(part for pair in zip(literals, (*words, ""), strict=True) for part in pair)
