"""Packs users' tensors (any strides, views, gradients) into contiguous memory for transports, and back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence

import torch

from holdfast.comms import _native
from holdfast.comms.tensors.memory import locate

Tensor = torch.Tensor
_torch = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
_storage_nbytes, _storage_offset, _scalar_type = (
    ctypes.cast(function, ctypes.c_void_p).value or 0
    for function in (
        _torch.aoti_torch_get_storage_size,
        _torch.aoti_torch_get_storage_offset,
        _torch.aoti_torch_get_dtype,
    )
)
_native.register_tensor_type(torch.empty(0, device="cpu"), _storage_nbytes, _storage_offset, _scalar_type, locate)
plain, span = _native.plain, _native.span
_DLPACK_KINDS = {"cpu": 1, "cuda": 10 if torch.version.hip else 2}

DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
"""Every dtype of this torch, in an order that all ranks share."""
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}


def names(dtypes: Iterable[torch.dtype]) -> frozenset[str]:
    """The names of dtypes without "torch.", as in capability tables."""
    return frozenset(str(dtype).removeprefix("torch.") for dtype in dtypes)


def dlpack_device(device: torch.device) -> tuple[int, int] | None:
    """DLPack's kind and number of a device; None if `plain` cannot tell that a tensor is there."""
    kind = _DLPACK_KINDS.get(device.type)
    if kind is None or (device.type != "cpu" and device.index is None):
        return None
    return kind, device.index or 0


def packed(tensor: Tensor) -> Tensor:
    """`tensor` as contiguous memory outside autograd: `tensor` itself if possible, else an alias or a copy."""
    if plain(tensor):
        return tensor
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg().contiguous()
    if flat.dim() and flat.stride(-1) != 1:  # at most one element: contiguous, but `view` as bytes would fail
        return flat.as_strided((flat.numel(),), (1,)).view(flat.shape)
    return flat


def unpack(flat: Tensor, target: Tensor) -> None:
    """Copy the contents of `flat = packed(target)` back into `target`, unless they share memory."""
    if flat is not target and flat.data_ptr() != target.data_ptr():
        target.detach().copy_(flat.view(target.shape))


def unpack_all(flats: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for flat, target in zip(flats, targets, strict=True):
        unpack(flat, target)


def parts(flat: Tensor, count: int) -> list[Tensor]:
    """Divide contiguous memory into `count` equal parts."""
    line = flat.view(-1)
    length = line.numel() // count
    return [line[i * length : (i + 1) * length] for i in range(count)]


def rows(flat: Tensor, like: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Divide contiguous memory, shaped like `like`, along dimension 0 into parts of `counts` rows."""
    line = flat.view(-1)
    total = like.shape[0] if like.dim() else 1
    width = line.numel() // total if total else 0
    result, start = [], 0
    for count in counts:
        result.append(line[start : start + count * width])
        start += count * width
    return result
