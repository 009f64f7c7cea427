"""A configuration as TOML: read, with everything that is wrong with it at once; written; and compared with another."""

from __future__ import annotations

import copy
import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import inspect

from holdfast.rl.config.contradictions import contradictions
from holdfast.rl.config.named_code import placed_code, placed_python
from holdfast.rl.config.run_config import PRESETS, RunConfig
from holdfast.rl.errors import BadConfig, ConfigChanged, ConfigProblem, Key, dotted, key_of

_ELEMENT = re.compile(r"\s*\[\[([^\[\]]+)\]\]")
_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_VALUE = re.compile(r"""\s*([A-Za-z0-9_."' -]+?)\s*=""")


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a file, with `overrides` such as `trainer.rate=1e-4`. Raises `BadConfig`."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadConfig([ConfigProblem(str(path), "", f"cannot be read: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        raise BadConfig([ConfigProblem(str(path), "", f"not UTF-8: {error.reason}")]) from None
    return parse_config(text, str(path), overrides, path.parent)


def parse_config(text: str, source: str, overrides: Sequence[str] = (), folder: Path = Path()) -> RunConfig:
    """The configuration in a TOML document; `folder` is where its paths begin. Raises `BadConfig`."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number of very many digits, and for arrays in arrays
        line = re.search(r"at line (\d+)", str(error))
        where = f"{source}:{line[1]}" if line else source
        raise BadConfig([ConfigProblem(where, "", f"not TOML: {error}")]) from None
    return config_of(raw, source, overrides, folder, lines_of(text))


def config_of(
    document: Mapping[str, Any],
    source: str,
    overrides: Sequence[str] = (),
    folder: Path = Path(),
    lines: Mapping[Key, int] = MappingProxyType({}),
) -> RunConfig:
    """The configuration in a document that TOML could hold; `lines` says where it is written. Raises `BadConfig`."""
    raw = copy.deepcopy(dict(document))
    problems: list[ConfigProblem] = []
    overridden: dict[Key, str] = {}
    for each in overrides:
        name, equals, value = each.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key) or not _put(raw, key, _value(value.strip())):
            problems.append(ConfigProblem(f"--set {each}", "", "write it as section.field=value"))
        else:
            overridden[key] = f"--set {each}"

    def place(key: Key) -> str:
        for end in range(len(key), 0, -1):
            if key[:end] in overridden:
                return overridden[key[:end]]
        line = nearest_line(lines, key)
        return source if line is None else f"{source}:{line}"

    wrong: list[tuple[Key, str]] = []
    config = _converted(raw, wrong)
    for fields, reason in contradictions(config, folder):
        keys = [key_of(field) for field in fields.split()]
        if not any(key[: len(each)] == each for key in keys for each, _ in wrong):
            written = next((key for key in keys if key in overridden or key in lines), keys[0])
            problems.append(ConfigProblem(place(written), dotted(keys[0]), reason))
    problems += [ConfigProblem(place(key), dotted(key), reason) for key, reason in wrong]
    if problems:
        raise BadConfig(sorted(problems, key=_position))
    return config


def _position(problem: ConfigProblem) -> tuple[int, str]:
    line = re.search(r":(\d+)$", problem.place)
    return (int(line[1]) if line else 0, problem.key)


def _value(text: str) -> object:
    """The value of an override: TOML, or a text without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError, RecursionError):
        return text


def _put(raw: dict[str, Any], key: tuple[str, ...], value: object) -> bool:
    for name in key[:-1]:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            return False
    raw[key[-1]] = value
    return True


def _converted(raw: dict[str, Any], problems: list[tuple[Key, str]]) -> RunConfig:
    """Convert a document; a value that cannot be converted is a problem, and its default stands in."""
    loss = raw.get("objective")
    if isinstance(loss, dict) and isinstance(name := loss.get("algorithm"), str):
        raw["objective"] = {**PRESETS.get(name, {}), **loss}
    for key, value in list(leaves(raw)):
        if key[:2] == ("environment", "arguments") or not isinstance(value, int | float):
            continue  # what an environment takes is its own
        if isinstance(value, int) and abs(value) >= 2**63:
            problems.append((key, f"{_shown(value)} is not allowed: expected a number of 64 bits"))
            _remove(raw, key)
        elif not math.isfinite(value):
            problems.append((key, f"{value!r} is not allowed: expected a finite number"))
            _remove(raw, key)
    while True:
        try:
            return msgspec.convert(raw, RunConfig)
        except msgspec.ValidationError as error:
            problems.append(explained(error, RunConfig, raw))
            if not _remove(raw, problems[-1][0]):
                return RunConfig()


def _remove(raw: Any, key: Key) -> bool:
    """Remove a value from a document, or the array that it is an element of. Returns whether it was there."""
    while key and isinstance(key[-1], int):
        key = key[:-1]
    try:
        for part in key[:-1]:
            raw = raw[part]
        del raw[key[-1]]
    except (LookupError, TypeError):  # it is the whole document, or its array has gone before
        return False
    return True


def leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value in a document that is no table or array, with its path."""
    if isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*key, name))
    else:
        yield key, value


_UNKNOWN = re.compile("Object contains unknown field")
_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def explained(error: msgspec.ValidationError, kind: Any, raw: Any, also: tuple[str, ...] = ()) -> tuple[Key, str]:
    """The path of an error of `msgspec.convert(raw, kind)`, and its reason with what is allowed there.

    `also` are keys of the table itself which were read before.
    """
    reason, at, where = str(error).rpartition(" - at `$")
    if not at:
        reason, where = where, ""
    path = tuple(int(index) if index else name for name, index in _PART.findall(where.rstrip("`")))
    if _UNKNOWN.match(str(error)):
        for tried in (path, ()):  # the name of a field may look like a path
            key, found, inner = _followed(tried, kind, raw)
            tags = (each for each in (getattr(found, "tag_field", None),) if each)
            fields = [*tags, *also, *(each.encode_name for each in getattr(found, "fields", ()))]
            unknown = next((name for name in inner if name not in fields), None) if isinstance(inner, dict) else None
            if unknown is not None:
                near = difflib.get_close_matches(unknown, fields, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(fields)}"
                return (*key, unknown), f"no such field; {hint}"
    key, found, raw = _followed(path, kind, raw)
    if not reason.startswith(("Expected", "Invalid")):  # a rule of the table itself
        return key, reason
    if isinstance(found, inspect.StructType):
        return key, f"must be a table, not {_shown(raw)}"
    if isinstance(getattr(found, "item_type", None), inspect.StructType):
        return key, f"must be tables: write [[{dotted(key)}]]"
    expected = reason[:1].lower() + reason[1:]
    if isinstance(found, inspect.LiteralType):
        expected = f"expected {', '.join(map(repr, found.values))}"
    elif isinstance(found, inspect.UnionType) and reason.startswith("Invalid"):
        expected = f"expected {', '.join(repr(getattr(each, 'tag', '')) for each in found.types)}"
    return key, f"{_shown(raw)} is not allowed: {expected}"


def _followed(path: Key, kind: Any, raw: Any) -> tuple[Key, inspect.Type, Any]:
    """The part of a path that leads to something in a document, with the type there, and the value."""
    found, key = _resolved(inspect.type_info(kind), raw), list[str | int]()
    for part in path:
        inside = isinstance(raw, dict) and part in raw
        if not inside and not (isinstance(raw, list) and isinstance(part, int) and part < len(raw)):
            break
        if isinstance(found, inspect.StructType):
            found = next((each.type for each in found.fields if each.encode_name == part), found)
        else:
            found = getattr(found, "item_type", found)
        raw = raw[part]
        key.append(part)
        found = _resolved(found, raw)
    return tuple(key), found, raw


def _shown(value: Any) -> str:
    """A value as an error shows it."""
    try:
        return repr(value)
    except ValueError:  # Python refuses to write very long numbers in decimals
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"the {type(value).__name__}"


def _resolved(kind: inspect.Type, raw: Any) -> inspect.Type:
    """A type without its descriptions; of several tables, the one that `raw` names."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    tables = kind.types if isinstance(kind, inspect.UnionType) and isinstance(raw, dict) else ()
    return next(
        (each for each in tables if isinstance(each, inspect.StructType) and raw.get(each.tag_field) == each.tag), kind
    )


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


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


MAY_CHANGE: frozenset[Key] = frozenset(
    {
        ("steps",),
        ("algorithm", "concurrency"),
        ("trainer", "replicas"),
        ("trainer", "spares"),
        ("trainer", "copies"),
        ("trainer", "backend"),
        ("trainer", "strategy"),
        ("generator",),
        ("store",),
        ("engine",),
        ("evaluation",),
        ("checkpoint",),
        ("telemetry",),
        ("environment", "addresses"),
        ("environment", "servers"),
        ("environment", "sessions"),
        ("environment", "timeout"),
        ("environment", "attempts"),
    }
)
"""What may differ when a run is resumed: how many processes do the work, and where, not what they compute."""


def resolved(config: RunConfig) -> str:
    """The whole configuration as TOML, with every default; read again it is equal."""
    return msgspec.toml.encode(config).decode()


_PATHS = (("model", "path"), ("data", "train"), ("data", "held_out"))
"""The fields that name a file or a folder, but for code and interpreters."""


def placed(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with its paths, relative to `folder`, made absolute, so that a run goes on from anywhere."""
    raw = msgspec.to_builtins(config)
    for section, name in _PATHS:
        if path := raw[section][name]:
            raw[section][name] = str((folder / path).absolute())
    for section in ("generator", "trainer"):
        if python := raw[section]["python"]:
            raw[section]["python"] = str(placed_python(python, folder))
    kind, _, code = config.environment.name.partition(":")
    if kind == "python":
        raw["environment"]["name"] = f"{kind}:{placed_code(code, folder)}"
    for criterion in raw["reward"]:
        criterion["function"] = placed_code(criterion["function"], folder)
    return msgspec.convert(raw, RunConfig)


def check_unchanged(begun: RunConfig, now: RunConfig) -> None:
    """Raise `ConfigChanged`, with both values of each field, unless a run that was `begun` may go on as `now`."""
    old, new = (dict(leaves(msgspec.to_builtins(each))) for each in (begun, now))
    differences = [
        f"{dotted(key)} was {old.get(key, 'absent')!r} and is {new.get(key, 'absent')!r}"
        for key in sorted({**old, **new}, key=dotted)
        if old.get(key) != new.get(key) and not any(key[:end] in MAY_CHANGE for end in range(1, len(key) + 1))
    ]
    if differences:
        raise ConfigChanged(differences)
