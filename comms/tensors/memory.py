"""Whether a tensor has memory of its own, on its device, that covers it; and that memory as a plain tensor.

Tensors without it (FakeTensor, DTensor, those of torch.func, freed storages) look like any other to code that asks for
a shape and a dtype, but have no address that bytes could be copied from or to.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.comms._native import plain
from holdfast.comms.errors import Unsupported

Tensor = torch.Tensor
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def check_memory(tensor: Any, what: str = "tensor") -> None:
    """TypeError or `Unsupported`, naming it as `what`, unless it is a dense tensor whose memory is its own."""
    plain_tensor(tensor, what)


def plain_tensor(tensor: Any, what: str = "tensor", device: torch.device | None = None) -> Tensor:
    """`tensor`, or the same memory as a `torch.Tensor` where it is of another type. Errors as in `check_memory`, and
    ValueError if it is not on `device`, which may leave open which of its type it is.

    What transports do to it then does not depend on what a subclass makes of torch's functions.
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


def locate(tensor: Any) -> tuple[int, int]:
    """The address and the size in bytes of a contiguous tensor. Errors as in `check_memory`, and ValueError."""
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
    if tensor.layout is not torch.strided and not hasattr(tensor, "to_local"):
        raise Unsupported(f"{what} is a tensor of layout {tensor.layout}", "pass a dense tensor: to_dense()")
    if tensor.is_nested:
        raise Unsupported(f"{what} is a nested tensor", "pass its parts one by one: unbind()")
    held = None if torch.nn.parameter.is_lazy(tensor) else _held(tensor)
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


def _held(tensor: Tensor) -> int | None:
    """How many bytes its storage holds; None if that has no memory, or on another device."""
    try:
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" or storage.device != tensor.device:
            return None
        return storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # that of torch.func, functionalization and wrappers
        return None


def _extent(tensor: Tensor) -> int:
    """How many elements of its storage lie before the end of the tensor; 0 if it has no elements."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1
