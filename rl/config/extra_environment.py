"""Finds the interpreters of systems that have a virtual environment of their own, which `make extra-NAME` sets up."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from holdfast.comms.errors import HoldfastError


class ExtraNotInstalled(HoldfastError):
    """There is no environment for a system that needs one of its own."""

    def __init__(self, extra: str, python: str) -> None:
        self.extra, self.python = extra, python
        super().__init__(f"{extra} is not installed: there is no interpreter {python}; run make extra-{extra}")


def extra_python(extra: str, given: str = "", folder: Path = Path()) -> Path:
    """The interpreter of an extra: the one that is given, from `folder` on, or that of its environment.

    Raises `ExtraNotInstalled`.
    """
    own = Path(sys.prefix) / "extras" / extra / "bin" / "python"
    chosen = folder / Path(given).expanduser() if given else own
    if shutil.which(chosen) is None:
        raise ExtraNotInstalled(extra, str(chosen))
    return chosen.absolute()
