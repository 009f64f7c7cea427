"""The copies of versions in a directory (`version-0000000007` and the like, each whole), and the way back from them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.store.errors import CopyFailed
from holdfast.store.interop.formats import import_version
from holdfast.store.interop.version_source import Progress
from holdfast.store.weight_store import WeightStore

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


def restore(
    store: WeightStore,
    directory: str | Path,
    *,
    part: int = 0,
    parts: int = 1,
    timeout: float | None = None,
    progress: Progress | None = None,
    damaged: Callable[[Path, HoldfastError], None] | None = None,
) -> int | None:
    """Publish the newest version that `DiskRetention` has left whole in `directory`; returns its number.

    Returns the store's latest version if it is as new, and None if there is no copy. A damaged copy is reported to
    `damaged`, and the one before is taken. Several processes may call this at once; with `parts` each publishes its
    share of the tensors.

    Raises the errors of `publish`, and the error of the newest copy if every copy is damaged.
    """
    first: HoldfastError | None = None
    latest = store.latest()
    for number, path in reversed(copies(Path(directory)).items()):
        if latest is not None and latest >= number:
            break
        try:
            return import_version(store, path, part=part, parts=parts, timeout=timeout, progress=progress)
        except (CorruptData, CopyFailed) as error:
            first = first or error
            if damaged is not None:
                damaged(path, error)
    if latest is None and first is not None:
        raise first
    return latest
