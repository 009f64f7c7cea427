"""The copies in a directory: `version-0000000007` and the like, each whole."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_NAME = re.compile(r"version-([0-9]{10,19})", re.ASCII)


def copy_path(directory: Path, number: int) -> Path:
    return directory / f"version-{number:010}"


def copies(directory: Path) -> dict[int, Path]:
    """The versions that are whole in a directory, oldest first; none if it does not exist."""
    if not directory.is_dir():
        return {}
    found = {int(match[1]): path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def remove_copy(path: Path) -> None:
    """Remove a copy: it vanishes at once, then its files go."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
