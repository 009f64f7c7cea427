"""Finds memory that tensors of one op share: refuses overlapping outputs, copies inputs that outputs overlap.

Libraries differ when an op overwrites an input that it still reads; a copy of the input is right with all of them. Only
where NCCL allows an input in place of its own output (this rank's part), the input is not copied.

Weights are tied, sliced from one buffer or laid out with `as_strided`. Where such tensors overlap, the last write wins;
so code that fills tensors by name checks them first: `check_agreement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from holdfast.comms.errors import Mismatch

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


def groups_sharing_memory(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Groups of names of tensors that may have bytes in common, with each other or within themselves.

    This compares extents, so tensors that interleave without a common byte are a group, too; `check_agreement` compares
    bytes.
    """
    extents = sorted((str(each.device), *span(each), name) for name, each in tensors.items() if each.numel())
    groups: list[list[str]] = []
    device, end = "", 0
    for where, first, last, name in extents:
        if groups and where == device and first < end:
            groups[-1].append(name)
            end = max(end, last)
        else:
            groups.append([name])
            device, end = where, last
    return [group for group in groups if len(group) > 1 or overlaps_itself(tensors[group[0]])]


def alias_key(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for tensors with the same elements at the same addresses."""
    return (
        tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(),
        tensor.is_neg(),
    )  # fmt: skip


def check_agreement(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], where: str) -> None:
    """Raise `Mismatch` unless all targets hold their sources after each has been written.

    The targets, on one device, have the shapes and dtypes of the sources, which are on the CPU. `where` names the
    targets in the error.
    """
    first = _disagreeing(targets, sources, list(targets))
    if first is None:
        return
    for other in targets:
        if other != first and _disagreeing(targets, sources, (first, other)) is not None:
            one, two = sorted((first, other))
            raise Mismatch(
                f"{one!r} and {two!r} of {where} share memory, and are to be filled with different bytes; clone "
                "one of them, or tie both sides alike"
            )
    raise Mismatch(
        f"elements of {first!r} of {where} share memory, and are to be filled with different bytes; clone it"
    )


def _disagreeing(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], names: Sequence[str]) -> str | None:
    """Write the sources into a copy of the targets' memory; return the first target that lost its source's bytes."""
    extents = [span(targets[name]) for name in names]
    begin, end = min(first for first, _ in extents), max(last for _, last in extents)
    shadow = np.zeros(end - begin, np.uint8)
    written = [(name, _window(shadow, targets[name], begin), _stored(sources[name], targets[name])) for name in names]
    for _, window, stored in written:
        window[...] = stored
    return next((name for name, window, stored in written if not np.array_equal(window, stored)), None)


def _window(shadow: npt.NDArray[np.uint8], target: Tensor, begin: int) -> npt.NDArray[np.uint8]:
    width = target.itemsize
    strides = (*(stride * width for stride in target.stride()), 1)
    return np.lib.stride_tricks.as_strided(shadow[target.data_ptr() - begin :], (*target.shape, width), strides)


def _stored(source: Tensor, target: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes in memory of a target that holds `source`."""
    source = source.detach()
    source = source.conj() if target.is_conj() else source
    source = torch.neg(source) if target.is_neg() else source
    plain = torch.empty(target.shape, dtype=target.dtype, device="cpu").copy_(source)
    return plain.view(-1).view(torch.uint8).numpy().reshape(*target.shape, target.itemsize)
