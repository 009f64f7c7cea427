"""Versions on disk: directories of safetensors, and of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.store.errors import CopyFailed

if TYPE_CHECKING:
    from holdfast.store.interop.disk_copy import Progress
    from holdfast.store.weight_store import WeightStore


def import_version(
    store: WeightStore,
    directory: str | Path,
    version: int | None = None,
    *,
    part: int = 0,
    parts: int = 1,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> int:
    """Publish a directory of safetensors or of torch.distributed.checkpoint, whichever it is.

    See the functions of that name for both. Raises `CopyFailed` for a directory that is neither.
    """
    from holdfast.store.interop import dcp, safetensors

    path = Path(directory)
    if any((path / name).exists() for name in (safetensors.INDEX, safetensors.WHOLE)):
        publish = safetensors.import_version
    elif (path / dcp.METADATA).exists():
        publish = dcp.import_version
    else:
        there = f"neither safetensors ({safetensors.INDEX}) nor a checkpoint of torch ({dcp.METADATA})"
        raise CopyFailed(path, f"it has {there}")
    return publish(store, path, version, part=part, parts=parts, timeout=timeout, progress=progress)
