"""Finds memory that tensors of one op share: refuses overlapping outputs, copies inputs that outputs overlap.

Libraries differ when an op overwrites an input that it still reads; a copy of the input is right with all of them. Only
where NCCL allows an input in place of its own output (this rank's part), the input is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def check_outputs(outputs: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise ValueError, with its name, if elements of an output share memory with each other or another output."""
    for output, name in zip(outputs, names, strict=True):
        if not output.is_contiguous() and overlaps_itself(output):
            raise ValueError(
                f"several elements of {name} share memory (expand() and as_strided() make such tensors): "
                "nothing can be received into it; pass a contiguous tensor and copy from that"
            )
    if len(outputs) < 2:
        return
    spans = sorted((*span(output), i) for i, output in enumerate(outputs) if output.numel())
    reached: list[tuple[int, int]] = []  # (end, index) of earlier spans that may reach this one
    for start, end, i in spans:
        reached = [(stop, j) for stop, j in reached if stop > start]
        for _, j in reached:
            if _share(outputs[i], outputs[j]):
                raise ValueError(f"{names[min(i, j)]} and {names[max(i, j)]} share memory: each needs its own")
        reached.append((end, i))


def overlapping(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[int]:
    """The numbers of the inputs that an op which writes `outputs` would overwrite. All are contiguous."""
    written = [extent(output) for output in outputs]
    found = []
    for number, (at, end) in enumerate(map(extent, inputs)):
        if any(at < stop and start < end for start, stop in written):
            found.append(number)
    return found


def extent(flat: Tensor) -> tuple[int, int]:
    """As `span`, of a contiguous tensor."""
    at = flat.data_ptr()
    return at, at + flat.nbytes


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the tensor's first byte and after its last byte; (0, 0) without elements."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of the tensor share memory."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return stride == 0 or _repeats(_addresses(tensor))
            reach += stride * (size - 1)
    return False


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with overlapping spans have a byte in common."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    return _repeats(torch.cat([_bytes(one), _bytes(other)]))


def _repeats(numbers: Tensor) -> bool:
    ordered = numbers.sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def _bytes(tensor: Tensor) -> Tensor:
    return (_addresses(tensor)[:, None] + torch.arange(tensor.itemsize, device="cpu")).view(-1)


def _addresses(tensor: Tensor) -> Tensor:
    """The address of every element."""
    found = torch.tensor([tensor.data_ptr()], dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = torch.arange(size, device="cpu") * (stride * tensor.itemsize)
        found = (found[:, None] + steps).view(-1)
    return found
