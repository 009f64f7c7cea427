"""Finds tensors of a state that share memory, and refuses to fill them with different bytes.

Weights are tied, sliced from one buffer or laid out with `as_strided`. Where such tensors overlap, the last write wins;
so code that fills tensors by name checks them first: `check_agreement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.overlap import overlaps_itself, span

Tensor = torch.Tensor


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
