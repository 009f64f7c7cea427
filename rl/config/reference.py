"""The fields of a configuration as tables of Markdown, from the types alone."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec

from holdfast.rl.config.objective import PRESETS, Objective
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml_text import dump


def sections() -> Iterator[str]:
    """A heading and a table for each section."""
    yield "\n".join(["## Top level", "", *_table(RunConfig)])
    for field in msgspec.structs.fields(RunConfig):
        if section := _section(field.type):
            heading = f"[{field.name}]" if section is field.type else f"[[{field.name}]]"
            said = (inspect.getdoc(section) or "").split("\n\n")[0]
            yield "\n".join([f"## `{heading}`", "", said, "", *_table(section)])
            if section is Objective:
                yield "\n".join(_presets())


def _table(kind: type[Any]) -> Iterator[str]:
    yield from ("| field | allowed | default | meaning |", "|---|---|---|---|")
    for field in msgspec.structs.fields(kind):
        if not _section(field.type):
            yield f"| `{field.name}` | {_allowed(field.type)} | `{_default(field)}` | {_said(field.type)} |"


def _presets() -> Iterator[str]:
    yield from ("| algorithm | other defaults |", "|---|---|")
    for name, fields in PRESETS.items():
        yield f"| `{name}` | {', '.join(f'`{key} = {_written(value)}`' for key, value in fields.items())} |"


def _section(kind: Any) -> type[Any] | None:
    """The struct of a table, or of the tables of an array."""
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and not isinstance(each, types.GenericAlias) and issubclass(each, msgspec.Struct):
            return each
    return None


def _meta(kind: Any) -> msgspec.Meta:
    return next((each for each in get_args(kind) if isinstance(each, msgspec.Meta)), msgspec.Meta())


def _said(kind: Any) -> str:
    return (_meta(kind).description or "").replace("|", "\\|")


def _allowed(kind: Any) -> str:
    plain, meta = get_args(kind)[0], _meta(kind)
    if get_origin(plain) is Literal:
        return ", ".join(f"`{_written(each)}`" for each in get_args(plain))
    if get_origin(plain) is tuple:
        return f"list of {_noun(get_args(plain)[0])}"
    if get_origin(plain) is dict:
        return "table"
    limits = [("> ", meta.gt), (">= ", meta.ge), ("< ", meta.lt), ("<= ", meta.le)]
    return " ".join([_noun(plain), *(f"{sign}{limit:g}" for sign, limit in limits if limit is not None)])


def _noun(kind: Any) -> str:
    kind = get_args(kind)[0] if get_args(kind) else kind
    return {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}[kind]


def _default(field: msgspec.structs.FieldInfo) -> str:
    return "{}" if field.default is msgspec.NODEFAULT else _written(field.default)


def _written(value: object) -> str:
    return dump({"value": list(value) if isinstance(value, tuple) else value}).removeprefix("value = ").strip()
