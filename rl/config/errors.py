"""Errors of a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.comms.errors import HoldfastError

Key = tuple[str | int, ...]
"""The path of a value: names of tables and keys, and numbers of an array's elements."""


def dotted(key: Key) -> str:
    """A path as it is written: `reward[0].weight`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class ConfigProblem(msgspec.Struct, frozen=True):
    """One thing that is wrong: `place` is a file with a line, or an override."""

    place: str
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.reason}" if self.key else f"{self.place}: {self.reason}"


class BadConfig(HoldfastError):
    """A configuration cannot be used. `problems` has everything that is wrong with it."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class ConfigChanged(HoldfastError):
    """A run would be resumed with a configuration that gives other weights. `differences` names the fields."""

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        super().__init__(
            "the run was begun with another configuration: " + "; ".join(self.differences) + "; resume with the old "
            "values, or begin a new run in another directory"
        )
