"""Import the public names of a package at first use: the `holdfast` command must not wait for torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def on_demand(homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that has its public names in the modules `homes` (name -> module).

    An AttributeError from within such a module becomes an ImportError, with it as the cause: `from PACKAGE import NAME`
    reports any AttributeError as "cannot import name", without its cause.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"no public name {name!r}: there are {', '.join(homes)}")
        try:
            module = importlib.import_module(homes[name])
        except AttributeError as error:
            raise ImportError(f"{homes[name]} cannot be imported: AttributeError: {error}") from error
        return getattr(module, name)

    return get
