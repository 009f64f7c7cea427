"""Which names torch's modules have, by version, read from wheels without installing them.

`PYTHONPATH=tests python -m support.programs.torch_names WHEEL ...` writes `torch_names.toml` for the modules of torch
that holdfast imports. A wheel may also be a folder of installed packages. Names are what a module's source binds at its
top level; those of a compiled module are in its stubs.
"""

from __future__ import annotations

import ast
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from support import source_tree

TABLE = Path(__file__).with_name("torch_names.toml")
OWN_NAMESPACES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch._C._distributed_c10d")
"""The modules whose attributes are checked as well, where a module of ours has given them a name."""

Read = Callable[[str], str | None]
"""The text of a file in a wheel; None if there is none."""
Uses = dict[str, dict[str, str]]
"""By module of torch, the names used of it, each with a place that uses it."""


# What holdfast uses.


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
        if isinstance(node, ast.ImportFrom) and node.module and _is_torch(node.module) and not node.level:
            for name in node.names:
                found.setdefault(node.module, {})[name.name] = f"{path}:{node.lineno}"
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if _is_torch(name.name):
                    found.setdefault(name.name, {})
                    if name.asname:
                        aliases[name.asname] = name.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            if module in OWN_NAMESPACES:
                found.setdefault(module, {})[node.attr] = f"{path}:{node.lineno}"


def _is_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


# What a wheel has.


def names_in(read: Read, modules: list[str]) -> dict[str, set[str]]:
    """The names of those of `modules` that the wheel has."""
    return {module: names for module in modules if (names := module_names(read, module)) is not None}


def module_names(read: Read, module: str) -> set[str] | None:
    @cache
    def names(module: str) -> frozenset[str] | None:
        place = module.replace(".", "/")
        for path in (f"{place}/__init__.py", f"{place}.py", f"{place}/__init__.pyi", f"{place}.pyi"):
            if (text := read(path)) is not None:
                break
        else:
            return None
        bound: set[str] = set()
        package = module if "/__init__" in path else module.rpartition(".")[0]
        for statement in _statements(ast.parse(text).body):
            match statement:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                    bound.add(name)
                case ast.Assign(targets=targets):
                    bound.update(
                        node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
                    )
                case ast.AnnAssign(target=ast.Name(id=name)):
                    bound.add(name)
                case ast.Import(names=imported):
                    bound.update(each.asname or each.name.partition(".")[0] for each in imported)
                case ast.ImportFrom(names=imported):
                    source = _absolute(statement, package)
                    for each in imported:
                        bound.update(exported(source) if each.name == "*" else [each.asname or each.name])
        return frozenset(bound)

    @cache
    def exported(module: str) -> frozenset[str]:
        """What `from module import *` binds."""
        text = read(module.replace(".", "/") + ".py") or read(module.replace(".", "/") + "/__init__.py") or ""
        listed: set[str] = set()
        for statement in _statements(ast.parse(text).body):
            if isinstance(statement, ast.Assign | ast.AugAssign):
                target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                if getattr(target, "id", "") == "__all__":
                    listed.update(ast.literal_eval(statement.value))
        return frozenset(listed or (name for name in names(module) or () if not name.startswith("_")))

    found = names(module)
    return None if found is None else set(found)


def submodule(read: Read, module: str) -> bool:
    """Whether the wheel has a module of that name."""
    return module_names(read, module) is not None


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")[: len(package.split(".")) - (statement.level - 1)] if statement.level else []
    return ".".join([*parents, *([statement.module] if statement.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those under conditions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


# The table.


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
    lines = ["# Made from torch's wheels by torch_names.py beside it. A version without a line has no such module."]
    for module in sorted({module for modules in versions.values() for module in modules}):
        having = {version: modules[module] for version, modules in versions.items() if module in modules}
        every = set.intersection(*having.values())
        lines += ["", f'["{module}"]', f'every = "{" ".join(sorted(every))}"']
        lines += [f'"{version}" = "{" ".join(sorted(names - every))}"' for version, names in sorted(having.items())]
    TABLE.write_text("\n".join(lines) + "\n")


def _open(place: str) -> tuple[str, Read]:
    """The version ("2.11") of a wheel or a folder of installed packages, and how to read its files."""
    if Path(place).is_dir():
        version = next(Path(place).glob("torch-*.dist-info")).name

        def from_folder(path: str) -> str | None:
            file = Path(place) / path
            return file.read_text() if file.is_file() else None

        return _minor(version), cache(from_folder)
    archive = zipfile.ZipFile(place)
    files = set(archive.namelist())

    def from_wheel(path: str) -> str | None:
        return archive.read(path).decode() if path in files else None

    return _minor(Path(place).name), cache(from_wheel)


def _minor(name: str) -> str:
    """The "2.11" of "torch-2.11.0-cp311.whl"."""
    return ".".join(name.split("-")[1].split(".")[:2])


def main(places: list[str]) -> None:
    used = uses()
    modules = sorted(module for module in used if module != "torch")
    versions: dict[str, dict[str, set[str]]] = {}
    for place in places:
        version, read = _open(place)
        versions[version] = names_in(read, modules)
        for module, names in versions[version].items():
            names.update(name for name in used[module] if submodule(read, f"{module}.{name}"))
        versions[version]["torch"] = {name for name in used["torch"] if submodule(read, f"torch.{name}")}
    _write(versions)


if __name__ == "__main__":
    main(sys.argv[1:])
