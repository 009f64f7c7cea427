"""The file beside a version's tensors on disk: its number, its structure, and the checksums of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.store.data.skeleton import decode
from holdfast.store.interop.new_directory import disk_errors

NAME = "holdfast.json"
LARGEST = 256 << 20
"""The most bytes of a record: far more than that of a model with a million tensors."""

Format = Literal["safetensors", "dcp"]


class DiskRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a directory holds. `checksums` has the xxh3 (64 bits) of each tensor's bytes, row-major.

    `skeleton` describes the state dict: its structure, its values that are not tensors, and which tensors are tied.
    """

    layout: Literal[1] = 1
    version: int
    format: Format
    nbytes: int
    checksums: dict[str, int]
    skeleton: bytes

    def write(self, directory: Path) -> None:
        (directory / NAME).write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def read_record(directory: Path) -> DiskRecord | None:
    """The record in a directory; None if there is none. Raises `CorruptData`, `CopyFailed`."""
    path = directory / NAME
    with disk_errors(path):
        try:
            if path.stat().st_size > LARGEST:
                raise CorruptData(f"{path} is larger than any record of a version")
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        record = msgspec.json.decode(data, type=DiskRecord)
        if decode(record.skeleton).tensors.keys() != record.checksums.keys():
            raise CorruptData(f"{path} has checksums of other tensors than its state dict has")
        return record
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} is not the record of a version: {error}") from error
