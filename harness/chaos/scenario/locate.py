"""Finds the line of a value in a TOML document, for error messages: tomllib keeps no positions."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_TABLE = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]")
_ELEMENT = re.compile(r"^\s*\[\[\s*([^\[\]]+?)\s*\]\]")
_KEY = re.compile(r"""^\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")
_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def path_of(text: str) -> Path:
    """The path in a message of msgspec: `$.fault[0].type` is ("fault", 0, "type")."""
    parts: list[str | int] = []
    for name, index in _PART.findall(text.removeprefix("$")):
        parts.append(name if name else int(index) if index != "..." else 0)
    return tuple(parts)


def line_of(document: str, path: Path) -> int | None:
    """The line (from 1) of the value at `path`, or of the nearest table around it; None without one."""
    found: dict[Path, int] = {}
    counts: dict[str, int] = {}
    here: Path = ()
    for number, line in enumerate(document.splitlines(), start=1):
        if element := _ELEMENT.match(line):
            name = element[1]
            here = (name, counts.get(name, 0))
            counts[name] = counts.get(name, 0) + 1
            found[here] = number
        elif table := _TABLE.match(line):
            here = tuple(table[1].split("."))
            found.setdefault(here, number)
        elif key := _KEY.match(line):
            found.setdefault((*here, *key[1].split(".")), number)
    while path:
        if path in found:
            return found[path]
        path = path[:-1]
    return None
