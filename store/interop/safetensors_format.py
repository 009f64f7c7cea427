"""Writes one safetensors file, tensor by tensor, and names its dtypes.

The safetensors package reads the files. It does not write them here because it keeps the interpreter lock while it
writes, which would stop training, and needs all tensors of a file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from holdfast.store.data.dense import as_bytes
from holdfast.store.inspection.reports import TensorReport

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""torch's names of dtypes, and the format's."""

_PAD = 8


def file_order(tensors: Iterable[TensorReport]) -> list[TensorReport]:
    """Tensors in an order that aligns each of them: widest elements first, then by name."""
    return sorted(tensors, key=lambda each: (-each.torch_dtype.itemsize, each.name))


def write_file(path: Path, tensors: Sequence[TensorReport], data: Iterable[tuple[TensorReport, torch.Tensor]]) -> None:
    """Write a file of `tensors`; `data` yields them, contiguous on the CPU, in the same order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for each in tensors:
        header[each.name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [offset, offset + each.nbytes],
        }
        offset += each.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _PAD)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, tensor in data:
            found = as_bytes(tensor)
            assert found is not None
            file.write(found.numpy().data)
