"""Finds out in which format a directory is, and publishes it."""

from __future__ import annotations

from pathlib import Path

from holdfast.store.errors import CopyFailed
from holdfast.store.interop import dcp, safetensors
from holdfast.store.interop.dcp_metadata import NAME
from holdfast.store.interop.version_source import Progress
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
    path = Path(directory)
    if any((path / name).exists() for name in (safetensors.INDEX, safetensors.WHOLE)):
        publish = safetensors.import_version
    elif (path / NAME).exists():
        publish = dcp.import_version
    else:
        raise CopyFailed(path, f"it has neither safetensors ({safetensors.INDEX}) nor a checkpoint of torch ({NAME})")
    return publish(store, path, version, part=part, parts=parts, timeout=timeout, progress=progress)
