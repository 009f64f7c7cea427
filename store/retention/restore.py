"""Fills a store from the newest whole copy on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.store.errors import CopyFailed
from holdfast.store.interop.formats import import_version
from holdfast.store.interop.version_source import Progress
from holdfast.store.retention.copies import copies
from holdfast.store.weight_store import WeightStore


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
