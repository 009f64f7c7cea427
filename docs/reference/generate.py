"""Fills `<!-- generated: NAME -->` in pages of the reference from the code, as mkdocs builds them."""

from __future__ import annotations

import ast
import atexit
import inspect
import re
import tempfile
import tomllib
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[2]
PACKAGES = ("comms", "backends", "ft", "store", "rl", "harness")
MARKER = re.compile(r"<!-- generated: ([a-z-]+) -->")
FOR_THE_REPOSITORY = re.compile(r"^> In the repository .*\n\n?", re.M)
"""A line that tells a reader of the Markdown file where the page is whole."""


@event_priority(100)
def on_config(config: Any) -> Any:
    """Let mkdocstrings see the six packages as `holdfast`, and nothing else that lies in the tree."""
    folder = tempfile.TemporaryDirectory(prefix="holdfast-docs-")
    atexit.register(folder.cleanup)
    package = Path(folder.name) / "holdfast"
    package.mkdir()
    for name in PACKAGES:
        (package / name).symlink_to(ROOT / name)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [folder.name]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The hook of mkdocs. Raises KeyError for a marker that names no table."""
    return MARKER.sub(lambda match: TABLES[match[1]](), FOR_THE_REPOSITORY.sub("", markdown))


def environment_variables() -> set[str]:
    """Every HOLDFAST_ name that Python code of the six packages contains."""
    return {name for path in sources() for name in re.findall(r"\bHOLDFAST_[A-Z_]+\b", path.read_text())}


def events() -> str:
    """A table of all kinds of events: their names in logs, when each is written, and its fields."""
    from holdfast.ft.event_lines import KINDS
    from holdfast.ft.events import Event

    every = {field.name for field in msgspec.structs.fields(Event)}
    rows = ["| kind | when | fields |", "|---|---|---|"]
    for name, kind in KINDS.items():
        fields = (f"`{field.name}`" for field in msgspec.structs.fields(kind) if field.name not in every)
        when = " ".join((inspect.getdoc(kind) or "").split())
        rows.append(f"| `{name}` | {when} | {', '.join(fields)} |")
    return "\n".join(rows)


def sources(*packages: str) -> Iterator[Path]:
    """Every Python file of these packages (default: of all six)."""
    for package in packages or PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def errors() -> str:
    """A table of all error classes: what they derive from, and what they mean."""
    from holdfast.comms import errors as comms_errors
    from holdfast.ft import registers
    from holdfast.ft.control import errors as control_errors
    from holdfast.rl import errors as rl_errors
    from holdfast.store import errors as store_errors

    rows = ["| error | is a | meaning |", "|---|---|---|"]
    for module in (comms_errors, registers, control_errors, store_errors, rl_errors):
        rows += [_error_row(kind) for kind in _errors_of(module)]
    return "\n".join(rows)


def _errors_of(module: ModuleType) -> list[type[BaseException]]:
    return [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, BaseException) and each.__module__ == module.__name__
    ]


def _error_row(kind: type[BaseException]) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
    said = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return f"| `{kind.__module__.removesuffix('.errors')}.{kind.__name__}` | {bases} | {said} |"


def metrics() -> str:
    """A table of all metrics: name, type, labels, and help text, as a scrape returns them."""
    from holdfast.ft.telemetry.event_log import EventLog
    from holdfast.ft.telemetry.metrics import Metrics, OpTally

    served = Metrics("0", "job", EventLog("docs", ""), OpTally(None), lambda: 0)
    try:
        families = list(served.registry.collect())
    finally:
        served.close()
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        name = family.name + "_total" * (family.type == "counter")
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows)


def command_line() -> str:
    """Every command of `holdfast`, with its arguments and options."""
    import typer.main

    from holdfast.harness.cli.app import app

    return "\n".join(_command("holdfast", typer.main.get_command(app), 2))


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    if name != "holdfast":
        yield f"{'#' * level} {name}\n"
        yield _usage(command.help or "")
        yield from _parameters(command)
    context = command.context_class(command, info_name=name)
    for child in getattr(command, "list_commands", lambda _: [])(context):
        yield from _command(f"{name} {child}", command.get_command(context, child), level + (name != "holdfast"))


def _usage(text: str) -> str:
    """Help text as Markdown: its indented lines are examples."""
    lines = inspect.cleandoc(text).replace("\b\n", "").splitlines()
    lines = [
        line if line.startswith("    ") else line.replace("<", "&lt;").replace("[bold]", "**").replace("[/bold]", "**")
        for line in lines
    ]
    return "\n".join(lines) + "\n"


def _parameters(command: Any) -> Iterator[str]:
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        option = parameter.param_type_name == "option"
        names = (
            ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
            if option
            else f"`{parameter.name.upper()}`"
        )
        default = parameter.default
        shown = "" if default in (None, False, (), "") or callable(default) or parameter.required else f"`{default}`"
        meaning = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
        rows.append(f"| {names} | {shown} | {meaning} |")
    if rows:
        yield "| argument or option | default | meaning |\n|---|---|---|"
        yield "\n".join(rows) + "\n"


def layout() -> str:
    """A table for each package: its folders, two levels down, and the first lines of their docstrings."""
    sections = []
    for package in PACKAGES:
        rows = []
        for path in sorted((ROOT / package).rglob("__init__.py")):
            folder = path.parent.relative_to(ROOT)
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            if said and len(folder.parts) <= 3:
                line = " ".join(said.split("\n\n")[0].split())
                rows.append(f"| `{folder}/` | {line} |")
        sections.append("\n".join([f"## {package}", "", "| folder | holds |", "|---|---|", *rows]))
    return "\n\n".join(sections)


def rl_config() -> str:
    """A table for each section of a run's configuration: fields, what is allowed, defaults, meanings."""
    from holdfast.rl.config.run_config import Objective, RunConfig

    tables = ["\n".join(["## Top level", "", *_fields(RunConfig)])]
    for field in msgspec.structs.fields(RunConfig):
        if section := _section(field.type):
            heading = f"[{field.name}]" if section is field.type else f"[[{field.name}]]"
            about = (inspect.getdoc(section) or "").split("\n\n")[0]
            tables.append("\n".join([f"## `{heading}`", "", about, "", *_fields(section)]))
            if section is Objective:
                tables.append("\n".join(_presets()))
    return "\n\n".join(tables)


def _fields(kind: type[Any]) -> Iterator[str]:
    yield from ("| field | allowed | default | meaning |", "|---|---|---|---|")
    meanings = _meanings(kind)
    for field in msgspec.structs.fields(kind):
        if not _section(field.type):
            yield f"| `{field.name}` | {_allowed(field.type)} | `{_default(field)}` | {meanings[field.name]} |"


def _presets() -> Iterator[str]:
    from holdfast.rl.config.run_config import PRESETS

    yield from ("| algorithm | other defaults |", "|---|---|")
    for name, fields in PRESETS.items():
        yield f"| `{name}` | {', '.join(f'`{key} = {_written(value)}`' for key, value in fields.items())} |"


def _section(kind: Any) -> type[Any] | None:
    """The struct of a table, or of the tables of an array."""
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and not isinstance(each, types.GenericAlias) and issubclass(each, msgspec.Struct):
            return each
    return None


def _meanings(kind: type[Any]) -> dict[str, str]:
    """The text below each field of a class."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split()).replace("|", "\\|")
    return found


def _allowed(kind: Any) -> str:
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    meta = next((each for each in get_args(kind) if isinstance(each, msgspec.Meta)), msgspec.Meta())
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
    return msgspec.toml.encode({"value": value}).decode().removeprefix("value = ").strip()


LIBRARIES = {
    "holdfast": "holdfast",
    "torchcomms": "TorchComms",
    "c10d": "c10d",
    "mpi4py": "mpi4py",
    "nccl": "NCCL",
    "nixl": "NIXL",
}


def compared() -> str:
    """What each library calls the same, a table for each group of `compared.toml`."""
    data = tomllib.loads((ROOT / "docs/reference/compared.toml").read_text())
    lines = []
    for group in data["group"]:
        lines += [f"## {group['title']}", "", " | ".join(["", "", *LIBRARIES.values(), ""]).strip()]
        lines.append("|---" * (len(LIBRARIES) + 1) + "|")
        lines += [
            "| " + " | ".join([row["what"], *(_calls(row.get(key, "")) for key in LIBRARIES)]) + " |"
            for row in group["rows"]
        ]
        lines.append("")
    return "\n".join(lines)


def torch_surface() -> str:
    """What each new name of torch.distributed does over each transport, from `torch-surface.toml`."""
    data = tomllib.loads((ROOT / "docs/reference/torch-surface.toml").read_text())
    transports = ("shm", "gloo", "ucx", "mpi", "nccl")
    rows = [
        f"| name | torch | {' | '.join(f'`{name}`' for name in transports)} |",
        "|---" * (len(transports) + 2) + "|",
    ]
    for row in data["row"]:
        cells = [row.get(name, row.get("all")) for name in transports]
        texts = ["works" if words is None else f"`Unsupported`: {words}" for words in cells]
        rows.append(f"| `{row['name']}` | {row['since']} | {' | '.join(texts)} |")
    return "\n".join(rows)


def _calls(names: str) -> str:
    """Names as code; a reason or a remark as text; a dash for nothing."""
    if not names or names.startswith(("Unsupported:", "(")):
        return names or "-"
    return ", ".join(re.sub(r"^([^(]+?)( \(.*\))?$", r"`\1`\2", name) for name in names.split(", "))


TABLES: dict[str, Callable[[], str]] = {
    "errors": errors,
    "events": events,
    "metrics": metrics,
    "command-line": command_line,
    "layout": layout,
    "rl-config": rl_config,
    "compared": compared,
    "torch-surface": torch_surface,
}
