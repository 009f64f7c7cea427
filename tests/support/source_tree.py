"""The source tree: its modules, and what they import."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
"""What a process of a test puts on PYTHONPATH, to import `support`."""

PACKAGES = ("comms", "backends", "ft", "store", "rl", "harness")


NAMESPACE = Path("harness/namespace")
"""Modules of `holdfast` that lie in no subpackage."""


def modules() -> list[Path]:
    """Every Python file of the six packages, relative to the root."""
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: str) -> Any:
    """The module of a program of the documentation, which lies in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, relative to the root."""
    return ast.parse((ROOT / path).read_text(), str(path))


def nodes(*packages: str) -> Iterator[tuple[Path, ast.AST]]:
    """Every node of the syntax trees of these packages, or of all, with the path of its file."""
    for path in modules():
        if path.parts[0] in (packages or PACKAGES):
            yield from ((path, node) for node in ast.walk(parsed(path)))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import in a file; `from a import b` counts as a.b too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def module_name(path: Path) -> str:
    """The module name of a file: `comms/errors.py` is `holdfast.comms.errors`."""
    parts = path.with_suffix("").parts
    return ".".join(("holdfast", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def runtime_imports(path: Path) -> Iterator[tuple[int, str]]:
    """The imports of a file, without those for type checkers."""
    hidden = {
        child.lineno
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.walk(node)
        if isinstance(child, ast.stmt)
    }
    return ((line, name) for line, name in imports(path) if line not in hidden)
