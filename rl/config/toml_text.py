"""Where values stand in a TOML document, and values as TOML: tomllib has neither positions nor a writer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

Key = tuple[str | int, ...]
"""The path of a value: names of tables and keys, and numbers of an array's elements."""

_ELEMENT = re.compile(r"\s*\[\[([^\[\]]+)\]\]")
_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_VALUE = re.compile(r"""\s*([A-Za-z0-9_."' -]+?)\s*=""")


def lines_of(document: str) -> dict[Key, int]:
    """The line (from 1) of each table and key that is written on a line of its own."""
    found: dict[Key, int] = {}
    here: Key = ()
    for number, line in enumerate(document.splitlines(), start=1):
        if element := _ELEMENT.match(line):
            name = _names(element[1])
            count = sum(key[:-1] == name and isinstance(key[-1], int) for key in found if key)
            here = (*name, count)
        elif table := _TABLE.match(line):
            here = _names(table[1])
        elif value := _VALUE.match(line):
            found.setdefault((*here, *_names(value[1])), number)
            continue
        else:
            continue
        found.setdefault(here, number)
    return found


def nearest_line(lines: Mapping[Key, int], key: Key) -> int | None:
    """The line of a value, or of the nearest table around it."""
    return next((lines[key[:end]] for end in range(len(key), 0, -1) if key[:end] in lines), None)


def dump(document: Mapping[str, object]) -> str:
    """A document of tables, arrays of tables and plain values as TOML."""
    return "\n".join(_table(document, "")) + "\n"


def dotted(key: Key) -> str:
    """A path as it is written: `reward[0].weight`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _table(values: Mapping[str, object], name: str) -> Iterator[str]:
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping) or _is_array(value)}
    for key, value in values.items():
        if key not in tables:
            yield f"{key} = {_plain(value)}"
    for key, value in tables.items():
        full = f"{name}.{key}" if name else key
        for each in [value] if isinstance(value, Mapping) else value:  # type: ignore[attr-defined]
            yield ""
            yield f"[{full}]" if isinstance(value, Mapping) else f"[[{full}]]"
            yield from _table(each, full)


def _is_array(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _plain(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value)
