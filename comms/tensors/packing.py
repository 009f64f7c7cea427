"""Users' tensors (any strides, views, subclasses) as contiguous memory for transports, and back.

Tensors without memory of their own (FakeTensor, DTensor, those of torch.func, freed storages) have a shape and a dtype
like any other, but no address to copy bytes from or to: they are refused.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from holdfast.comms import _native
from holdfast.comms.errors import Unsupported

Tensor = torch.Tensor
plain, span = _native.plain, _native.span
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def check_memory(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or `Unsupported`, naming it as `what`, unless it is a dense tensor with memory of its own."""
    plain_tensor(tensor, what)


def plain_tensor(tensor: Any, what: str = "tensor", device: torch.device | None = None) -> Tensor:
    """`tensor`, or for a subclass an alias of its memory as a plain `torch.Tensor`.

    Transports then do not depend on how a subclass overrides torch's functions. Raises the errors of `check_memory`,
    and ValueError if it is not on `device`; a `device` without an index matches every device of its type.
    """
    if plain(tensor) and (device is None or device.type == "cpu"):
        return tensor  # type: ignore[no-any-return]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: expected a tensor, not {type(tensor).__name__}")
    with torch._C.DisableTorchFunctionSubclass():
        if device is not None and not _same_device(tensor.device, device):
            raise ValueError(f"{what} is on {tensor.device}, which a communicator on {device} cannot use")
        _check(tensor, what)
        if type(tensor) in _PLAIN_TYPES and (not tensor.is_inference() or torch.is_inference_mode_enabled()):
            return tensor
        return _alias(tensor)


def is_sparse(tensor: Any) -> bool:
    """Whether this is a sparse COO tensor, whatever a subclass says of itself."""
    if type(tensor) in _PLAIN_TYPES:  # the context below costs more than this check
        return bool(tensor.layout is torch.sparse_coo)
    if not isinstance(tensor, Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.sparse_coo


def locate(tensor: Any) -> tuple[int, int]:
    """The address and the size in bytes of a contiguous tensor. Raises the errors of `check_memory`, and ValueError."""
    check_memory(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.is_contiguous():
            raise ValueError("a tensor that is not contiguous has no single stretch of memory")
        return tensor.data_ptr(), tensor.nbytes


def _same_device(found: torch.device, wanted: torch.device) -> bool:
    return found.type == wanted.type and wanted.index in (None, found.index)


def _alias(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        alias = torch._neg_view(alias) if tensor.is_neg() else alias
        return alias.conj() if tensor.is_conj() else alias


def _check(tensor: Tensor, what: str) -> None:
    if tensor.is_nested:
        raise Unsupported(f"{what} is a nested tensor", "pass its parts one by one: unbind()")
    if tensor.layout is not torch.strided and not hasattr(tensor, "to_local"):
        raise Unsupported(f"{what} is a tensor of layout {tensor.layout}", "pass a dense tensor: to_dense()")
    held = None if torch.nn.parameter.is_lazy(tensor) else held_bytes(tensor)
    if held is None:
        kind = "meta tensor" if tensor.is_meta else type(tensor).__name__
        hint = "call this with a real tensor, outside of tracing and of torch.func"
        hint = "pass the part that is here: to_local()" if hasattr(tensor, "to_local") else hint
        raise Unsupported(f"{what} is a {kind} that has no memory of its own", hint)
    needed = _extent(tensor) * tensor.element_size()
    if held < needed:
        raise Unsupported(
            f"the storage of {what} holds {held} bytes, of the {needed} that it needs: it was freed or resized",
            "use the tensor while its memory is there; parameters of FSDP, after unshard()",
        )


def held_bytes(tensor: Tensor) -> int | None:
    """The bytes that the tensor's storage holds; None if it has no memory, or memory on another device."""
    try:
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" or storage.device != tensor.device:
            return None
        return storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # storages of torch.func, functionalization and wrapper tensors
        return None


def _extent(tensor: Tensor) -> int:
    """The number of storage elements up to the end of the tensor; 0 for a tensor without elements."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


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
