"""Code outside of holdfast that a configuration names: functions of the user, and interpreters with other systems."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.comms.errors import HoldfastError, describe


class ExtraNotInstalled(HoldfastError):
    """There is no environment for a system that needs one of its own."""

    def __init__(self, extra: str, python: str) -> None:
        self.extra, self.python = extra, python
        super().__init__(f"{extra} is not installed: there is no interpreter {python}; run make extra-{extra}")


class NoSuchCode(HoldfastError):
    """A name of a configuration leads to no code."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"{name!r}: {reason}; write FILE.py:NAME, or MODULE:NAME of an installed module")


def load_code(name: str) -> Any:
    """What a name leads to; its module is imported. Raises `NoSuchCode`."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise NoSuchCode(name, "it has no colon with a name behind it")
    try:
        found = _file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:
        raise NoSuchCode(name, describe(error)) from error
    if not hasattr(found, attribute):
        raise NoSuchCode(name, f"{module} has no {attribute}")
    return getattr(found, attribute)


def file_of(name: str) -> str:
    """The file that a name mentions; empty if it mentions a module."""
    module = name.rpartition(":")[0]
    return module if module.endswith(".py") else ""


def placed_code(name: str, folder: Path) -> str:
    """The name with its file made absolute."""
    file = file_of(name)
    return f"{(folder / file).absolute()}:{name.rpartition(':')[2]}" if file else name


def _file(path: Path) -> ModuleType:
    """The module of a file, which is run once."""
    path = path.resolve()
    name = f"holdfast_user_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def placed_python(given: str, folder: Path) -> Path:
    """Where an interpreter that is given lies, from `folder` on; `~` is a home, as in a shell."""
    return (folder / os.path.expanduser(given)).absolute()  # noqa: PTH111 (Path's raises for a user that is not there)


def extra_python(extra: str, given: str = "", folder: Path = Path()) -> Path:
    """The interpreter of an extra: the one that is given, from `folder` on, or that of its environment.

    Raises `ExtraNotInstalled`.
    """
    own = Path(sys.prefix) / "extras" / extra / "bin" / "python"
    chosen = placed_python(given, folder) if given else own
    if shutil.which(chosen) is None:
        raise ExtraNotInstalled(extra, str(chosen))
    return chosen.absolute()
