"""Versions on disk: directories of safetensors, and of torch.distributed.checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.store.errors import CopyFailed

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from holdfast.store.interop.disk_copy import OpenedCopy, Progress
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
    """Publish a directory of safetensors or of torch.distributed.checkpoint as a version; returns its number.

    The number is that of the exported version; directories from elsewhere need `version`. With `parts` processes each
    publishes its share of the tensors, of about equal bytes, as its `part`. Files are mapped: the weights are in memory
    once, as the store's replica; but tensors that DCP saved sharded are put together in memory. Tensors of an exported
    version are compared with their checksums. No code from the directory runs: of DCP's pickles, a type that DCP does
    not write itself is refused.

    Raises `CorruptData` with all that is wrong with the directory before anything is published, `Unsupported` for
    values of other types, `CopyFailed` if it cannot be read or is neither, and the errors of `publish`.
    """
    from holdfast.store.interop import dcp, safetensors
    from holdfast.store.interop.disk_copy import publish_copy

    path = Path(directory)
    opened: AbstractContextManager[OpenedCopy]
    if any((path / name).exists() for name in (safetensors.INDEX, safetensors.WHOLE)):
        opened = safetensors.SafetensorsDirectory(path)
    elif (path / dcp.METADATA).exists():
        opened = nullcontext(dcp.DcpDirectory(path))
    else:
        there = f"neither safetensors ({safetensors.INDEX}) nor a checkpoint of torch ({dcp.METADATA})"
        raise CopyFailed(path, f"it has {there}")
    with opened as found:
        return publish_copy(store, found, version, part, parts, timeout, progress)
