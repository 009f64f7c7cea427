"""`Hint`: a setting that a backend lets its users change, for a communicator or for one op.

A backend announces its hints in `BackendInfo.hints`. Whatever is passed as `hints=` is checked against them before a
byte moves: a hint is never ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

Value = bool | int | float | str
Hints = Mapping[str, Value]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MOST_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Hint:
    """One setting: its name, the type of its values, and what it does.

    `least` and `most` bound numbers, both included; `choices` are the values of a text, any if there are none. A
    `default` of None means that the backend decides. A hint with `per_op` is also taken by single ops.
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    description: str
    default: Value | None = None
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    per_op: bool = False

    @property
    def range(self) -> str:
        """The values that it takes, in words."""
        if self.choices:
            return " or ".join(map(repr, self.choices))
        if self.kind in (bool, str):
            return "true or false" if self.kind is bool else "text"
        name = "an integer" if self.kind is int else "a number"
        bounds = (("from", self.least), ("to", self.most))
        return " ".join([name, *(f"{bound} {limit}" for bound, limit in bounds if not math.isinf(limit))])

    def parse(self, value: object) -> Value:
        """`value` as one of this hint's type, read from text if it is one. Raises ValueError."""
        try:
            parsed: Value = msgspec.convert(value, self.kind, strict=False)
        except msgspec.ValidationError:
            fits = False
        else:
            if isinstance(parsed, str):
                fits = 0 < len(parsed) <= _MOST_CHARACTERS and (not self.choices or parsed in self.choices)
            else:
                fits = self.least <= parsed <= self.most  # false for NaN
        if not fits:
            raise ValueError(f"hint {self.name!r} must be {self.range}, not {value!r:.80}")
        return parsed


def parse_hints(backend: str, announced: Sequence[Hint], given: Hints | None, per_op: bool = False) -> dict[str, Value]:
    """The hints for `backend`, checked. Raises ValueError for unknown names and values, TypeError for no mapping.

    With `per_op` only the hints of single ops are known.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"hints must be a mapping of names to values, not {type(given).__name__}")
    known = {hint.name: hint for hint in announced if hint.per_op or not per_op}
    for name in given:
        if name not in known:
            where = "ops over " if per_op else ""
            there = f"{where}{backend!r} has {', '.join(sorted(known))}" if known else f"{where}{backend!r} has none"
            raise ValueError(f"unknown hint {name!r}: {there}; `holdfast backends --hints` lists all")
    return {name: known[name].parse(value) for name, value in given.items()}


def malformed(hint: object) -> str | None:
    """Why a backend may not announce `hint`; None if it may."""
    if not isinstance(hint, Hint):
        return f"hints must be Hint objects, not {type(hint).__name__}"
    if not isinstance(hint.name, str) or not _NAME.fullmatch(hint.name):
        return f"{hint.name!r} is not the name of a hint; use lower-case letters, digits and '_'"
    if hint.kind not in (bool, int, float, str):
        return f"hint {hint.name!r}: kind must be bool, int, float or str"
    if not hint.description:
        return f"hint {hint.name!r} has no description"
    if hint.default is not None:
        try:
            hint.parse(hint.default)
        except ValueError as error:
            return f"its default does not fit: {error}"
    return None
