"""Pickles functions of scripts, notebooks and test modules by value, so that they run in other processes.

cloudpickle sends `__main__` by value anyway, and any other module by name, so that must be importable there. This
module finds the modules that are not, or that should not be imported again (test modules).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cloudpickle

_lock = threading.Lock()


def dumps(value: Any) -> bytes:
    """Pickle a value for a child process or its parent, with the modules of its contents by value where needed."""
    with _by_value(set(_modules(value))):
        data: bytes = cloudpickle.dumps(value)
    return data


def dumps_result(value: Any) -> bytes:
    """As `dumps`, for the result of a function. Raises TypeError, saying so, if it cannot be pickled."""
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(f"a result must be picklable, this {type(value).__name__} is not: {error}") from error


def _modules(value: Any, depth: int = 3) -> Iterator[str]:
    """The modules that define `value`, its type, and its contents down to `depth`."""
    for thing in (value, type(value)):
        if isinstance(name := getattr(thing, "__module__", None), str):
            yield name
    held: tuple[Any, ...] = ()
    if isinstance(value, functools.partial):
        held = (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        held = tuple(value.values())
    elif isinstance(value, tuple | list | set | frozenset):
        held = tuple(value)
    elif (wrapped := getattr(value, "__wrapped__", None)) is not None:
        held = (wrapped,)
    if depth > 0:
        for item in held:
            yield from _modules(item, depth - 1)


@contextmanager
def _by_value(names: set[str]) -> Iterator[None]:
    modules = [sys.modules[name] for name in names if name in sys.modules and not _importable(sys.modules[name])]
    with _lock:
        new = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in new:
                cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    """Whether a process with our `sys.path` would find this very module, and may import it again."""
    name = module.__name__
    if name == "__main__":
        return True
    leaf = name.rpartition(".")[2]
    if leaf.startswith("test_") or leaf.endswith("_test") or leaf == "conftest":
        return False
    return _found(name, getattr(module, "__file__", None))


@functools.cache
def _found(name: str, file: str | None) -> bool:
    if file is None:
        return True
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path, None)
        if spec is not None:
            return spec.origin == file
    return False
