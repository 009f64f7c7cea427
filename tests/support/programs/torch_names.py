"""Which names torch's modules have, by version, as interpreters of environments with these versions say.

`PYTHONPATH=tests python -m support.programs.torch_names PYTHON ...` writes `torch_names.toml` for the modules of torch
that holdfast imports; `make torch-env-newest` makes such an environment. What the table has of a version stays: torch
for CPUs has no ProcessGroupNCCL.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from support import source_tree

TABLE = Path(__file__).with_name("torch_names.toml")
OWN_NAMESPACES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch._C._distributed_c10d")
"""The modules whose attributes are checked as well, where a module of ours has given them a name."""

Uses = dict[str, dict[str, str]]
"""By module of torch, the names used of it, each with a place that uses it."""


@cache
def uses() -> Uses:
    """The modules of torch that holdfast imports, and the names that it takes from them."""
    found: Uses = {}
    for path in source_tree.modules():
        _uses_of(source_tree.parsed(path), str(path), found)
    return found


def _uses_of(tree: ast.Module, path: str, found: Uses) -> None:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            for name in node.names:
                found.setdefault(node.module, {})[name.name] = f"{path}:{node.lineno}"
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if f"{name.name}.".startswith("torch."):
                    found.setdefault(name.name, {})
                    if name.asname:
                        aliases[name.asname] = name.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            if module in OWN_NAMESPACES:
                found.setdefault(module, {})[node.attr] = f"{path}:{node.lineno}"


def table() -> dict[str, dict[str, set[str]]]:
    """By version ("2.11") and module, the names that the table has."""
    by_module: dict[str, dict[str, str]] = tomllib.loads(TABLE.read_text())
    versions = sorted({version for names in by_module.values() for version in names if version != "every"})
    return {
        version: {
            module: {*names.get("every", "").split(), *names[version].split()}
            for module, names in by_module.items()
            if version in names
        }
        for version in versions
    }


def _write(versions: dict[str, dict[str, set[str]]]) -> None:
    lines = ["# Made by torch_names.py beside it. A version without a line has no such module."]
    for module in sorted({module for modules in versions.values() for module in modules}):
        having = {version: modules[module] for version, modules in versions.items() if module in modules}
        every = set.intersection(*having.values())
        lines += ["", f'["{module}"]', f'every = "{" ".join(sorted(every))}"']
        lines += [f'"{version}" = "{" ".join(sorted(names - every))}"' for version, names in sorted(having.items())]
    TABLE.write_text("\n".join(lines) + "\n")


PROGRAM = """
import importlib, importlib.util, json, sys
import torch
found = {}
for module, names in json.loads(sys.argv[1]).items():
    try:
        there = importlib.import_module(module)
    except ImportError:
        continue
    inside = [name for name in names if hasattr(there, "__path__") and importlib.util.find_spec(f"{module}.{name}")]
    found[module] = sorted({*inside, *dir(there)})
print(json.dumps([torch.__version__, found]))
"""


def main(interpreters: list[str]) -> None:
    used = json.dumps({module: sorted(names) for module, names in uses().items()})
    versions = table()
    for python in interpreters:
        printed = subprocess.run([python, "-c", PROGRAM, used], capture_output=True, text=True, check=True, timeout=300)
        version, found = json.loads(printed.stdout)
        known = versions.setdefault(".".join(version.split(".")[:2]), {})
        for module, names in found.items():
            known[module] = {*names, *known.get(module, ())}
    _write(versions)


if __name__ == "__main__":
    main(sys.argv[1:])
