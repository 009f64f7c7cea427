"""A configuration as TOML: read, with everything that is wrong with it at once; written; and compared with another."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from holdfast.rl.config.contradictions import contradictions
from holdfast.rl.config.named_code import placed_code
from holdfast.rl.config.run_config import PRESETS, Objective, RunConfig
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
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{source}:{line[1]}" if line else source
        raise BadConfig([ConfigProblem(where, "", f"not TOML: {error}")]) from None
    problems: list[ConfigProblem] = []
    overridden: dict[Key, str] = {}
    for each in overrides:
        name, equals, value = each.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key) or not _put(raw, key, _value(value.strip())):
            problems.append(ConfigProblem(f"--set {each}", "", "write it as section.field=value"))
        else:
            overridden[key] = f"--set {each}"
    lines = lines_of(text)

    def place(key: Key) -> str:
        for end in range(len(key), 0, -1):
            if key[:end] in overridden:
                return overridden[key[:end]]
        line = nearest_line(lines, key)
        return source if line is None else f"{source}:{line}"

    reader = _TableReader()
    config: RunConfig = reader.struct(RunConfig, raw, ())
    bad = [key for key, _ in reader.problems]
    for fields, reason in contradictions(config, folder):
        keys = [key_of(field) for field in fields.split()]
        if not any(key[: len(each)] == each for key in keys for each in bad):
            written = next((key for key in keys if key in overridden or key in lines), keys[0])
            problems.append(ConfigProblem(place(written), dotted(keys[0]), reason))
    problems += [ConfigProblem(place(key), dotted(key), reason) for key, reason in reader.problems]
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
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _put(raw: dict[str, Any], key: tuple[str, ...], value: object) -> bool:
    for name in key[:-1]:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            return False
    raw[key[-1]] = value
    return True


class _TableReader:
    """Converts tables to structs; a value that cannot be converted is a problem, and its default stands in."""

    def __init__(self) -> None:
        self.problems: list[tuple[Key, str]] = []

    def struct(self, kind: type[Any], raw: Mapping[str, Any], key: Key) -> Any:
        if kind is Objective and isinstance(raw.get("algorithm", ""), str):
            raw = {**PRESETS.get(raw.get("algorithm", ""), {}), **raw}
        fields = {each.name: each for each in msgspec.structs.fields(kind)}
        for name in raw.keys() - fields.keys():
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(fields)}"
            self.problems.append(((*key, name), f"no such field; {hint}"))
        values = {}
        for name, each in fields.items():
            if name in raw:
                value = self._field(each.type, raw[name], (*key, name))
                if value is not _INVALID:
                    values[name] = value
        return kind(**values)

    def _field(self, kind: Any, value: Any, key: Key) -> Any:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if isinstance(value, dict):
                return self.struct(kind, value, key)
            return self._refuse(key, f"must be a table, not {value!r}")
        element = next((each for each in get_args(kind) if isinstance(each, type)), None)
        if element is not None and issubclass(element, msgspec.Struct):
            if isinstance(value, list) and all(isinstance(each, dict) for each in value):
                return tuple(self.struct(element, each, (*key, number)) for number, each in enumerate(value))
            return self._refuse(key, f"must be tables: write [[{dotted(key)}]]")
        try:
            converted = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            return self._refuse(key, f"{value!r} is not allowed: {_expected(kind) or _lower(str(error))}")
        if isinstance(converted, float) and not math.isfinite(converted):
            return self._refuse(key, f"{value!r} is not allowed: expected a finite number")
        if isinstance(converted, int) and abs(converted) >= 2**63:
            return self._refuse(key, f"{value!r} is not allowed: expected a number of 64 bits")
        return converted

    def _refuse(self, key: Key, reason: str) -> Any:
        self.problems.append((key, reason))
        return _INVALID


_INVALID: Any = object()


def _expected(kind: Any) -> str:
    """The choices of a field that has choices."""
    choice = next((each for each in get_args(kind) if get_origin(each) is Literal), None)
    return f"expected {', '.join(map(repr, get_args(choice)))}" if choice else ""


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


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
    return dump(msgspec.to_builtins(config))


def dump(document: Mapping[str, object]) -> str:
    """A document of tables, arrays of tables and plain values as TOML."""
    return "\n".join(_table(document, "")) + "\n"


def placed(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with its paths, relative to `folder`, made absolute, so that a run goes on from anywhere."""

    def absolute(path: str) -> str:
        return str((folder / path).absolute()) if path else ""

    kind, _, code = config.environment.name.partition(":")
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=absolute(config.model.path)),
        environment=msgspec.structs.replace(
            config.environment,
            name=f"{kind}:{placed_code(code, folder)}" if kind == "python" else config.environment.name,
        ),
        reward=tuple(
            msgspec.structs.replace(each, function=placed_code(each.function, folder)) for each in config.reward
        ),
        data=msgspec.structs.replace(
            config.data, train=absolute(config.data.train), held_out=absolute(config.data.held_out)
        ),
        generator=msgspec.structs.replace(config.generator, python=absolute(config.generator.python)),
        trainer=msgspec.structs.replace(config.trainer, python=absolute(config.trainer.python)),
    )


def check_unchanged(begun: RunConfig, now: RunConfig) -> None:
    """Raise `ConfigChanged`, with both values of each field, unless a run that was `begun` may go on as `now`."""
    old, new = (dict(_leaves(msgspec.to_builtins(each))) for each in (begun, now))
    differences = [
        f"{dotted(key)} was {old.get(key, 'absent')!r} and is {new.get(key, 'absent')!r}"
        for key in sorted({**old, **new}, key=dotted)
        if old.get(key) != new.get(key) and not any(key[:end] in MAY_CHANGE for end in range(1, len(key) + 1))
    ]
    if differences:
        raise ConfigChanged(differences)


def _leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, (*key, name))
    elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
        for number, each in enumerate(value):
            yield from _leaves(each, (*key, number))
    else:
        yield key, list(value) if isinstance(value, tuple) else value


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
