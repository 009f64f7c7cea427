"""Packages that tests need, but that must not be importable everywhere: `make peers` installs each on its own."""

from __future__ import annotations

import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def site_of(name: str) -> str | None:
    """The folder that makes a package importable; "" if it is already; None if it is not installed."""
    if find_spec(name) is not None:
        return ""
    prefix = Path(sys.prefix) / "peers" / name
    folder = sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)})
    return folder if (Path(folder) / name).is_dir() else None
