"""Exports weights as a folder that transformers loads, or as one file of safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.rl.generators.models import save_model
from holdfast.store.errors import CopyFailed
from holdfast.store.interop.disk_copy import disk_errors, new_directory, sync

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_folder(model: PreTrainedModel, tokenizer: str, out: Path) -> None:
    """Write a new folder with the model, and with the tokenizer of the folder `tokenizer` if that is not empty.

    It appears whole or not at all. Raises `CopyFailed`.
    """
    with new_directory(out.absolute()) as draft:
        save_model(model, draft)
        if tokenizer:
            from transformers import AutoTokenizer

            make: Any = AutoTokenizer
            make.from_pretrained(tokenizer, local_files_only=True).save_pretrained(draft)


def export_file(model: PreTrainedModel, metadata: Mapping[str, str], out: Path) -> None:
    """Write a new file of safetensors, with `metadata` in its header. Tied weights are in it once.

    It appears whole or not at all. Raises `CopyFailed`.
    """
    from safetensors.torch import save_model as save_file

    with new_file(out) as draft:
        save_file(model, str(draft), {"format": "pt", **metadata})


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path` for a file, which is moved to `path` once it is on the disk.

    After an error no file is left. Raises `CopyFailed` if `path` exists or cannot be made.
    """
    with disk_errors(path):
        if path.exists():
            raise CopyFailed(path, "it exists already; name a new file")
        draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            yield draft
            sync(draft)
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
        sync(path.parent)
