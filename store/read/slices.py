"""The tensors, or slices of tensors, that `WeightStore.load` is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import Box, whole
from holdfast.store.data.manifest import TensorEntry, quoted
from holdfast.store.data.rebuild import rebuild
from holdfast.store.read.version_reader import VersionReader
from holdfast.store.reshard.plan import BoxTarget


class Slice(NamedTuple):
    """A box of a tensor: the index of its first element along each dimension, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return tuple((low, low + size) for low, size in zip(self.offsets, self.shape, strict=True))


def chosen(reader: VersionReader, names: str | Iterable[str] | Mapping[str, Slice] | None) -> dict[str, Box]:
    """What is asked for: the box of each tensor. Raises `Mismatch`, listing all faults, for what is not there."""
    there = {**reader.tensors, **{name: reader.tensors[source] for name, source in reader.skeleton.ties.items()}}
    if names is None:
        return {name: whole(entry.shape) for name, entry in reader.tensors.items()}
    if isinstance(names, str):
        found = {name: whole(entry.shape) for name, entry in there.items() if name.startswith(names)}
        if not found:
            raise Mismatch(f"the version has no tensor whose name begins with {names!r}")
        return found
    slices = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
    faults = []
    if missing := sorted(slices.keys() - there.keys()):
        faults.append(f"the version has no {quoted(missing)}")
    boxes: dict[str, Box] = {}
    for name in [name for name in slices if name in there]:
        shape, wanted = there[name].shape, slices[name]
        if wanted is None:
            boxes[name] = whole(shape)
        elif len(wanted.offsets) != len(shape) or len(wanted.shape) != len(shape):
            faults.append(
                f"{there[name]} has {len(shape)} dimensions, the slice {wanted.offsets} {wanted.shape} others"
            )
        else:
            boxes[name] = wanted.box
            if any(not 0 <= low <= high <= size for (low, high), size in zip(wanted.box, shape, strict=True)):
                faults.append(f"the slice {wanted.offsets} of shape {wanted.shape} is outside of {there[name]}")
    if faults:
        raise Mismatch("; ".join(faults))
    return boxes


def copied(reader: VersionReader, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
    """The boxes as new tensors on the CPU."""
    found, wanted = {}, []
    for name, box in boxes.items():
        source = reader.skeleton.source(name)
        shape = [high - low for low, high in box]
        found[name] = torch.empty(shape, dtype=reader.tensors[source].torch_dtype, device="cpu")
        wanted.append(BoxTarget(name, source, box, whole(shape)))
    reader.fill(wanted, found)
    return found


def mapped(reader: VersionReader, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
    """The boxes as views of mapped memory. Raises `Unsupported` for tensors that cannot be mapped."""
    source = reader.skeleton.source
    found = reader.map([source(name) for name in boxes])
    return {name: found[source(name)][tuple(slice(low, high) for low, high in box)] for name, box in boxes.items()}


def mapped_state(reader: VersionReader, like: Mapping[str, TensorEntry], strict: bool) -> dict[str, Any]:
    """The whole state dict, in mapped memory that was verified.

    If `like` has tensors, the version must have them, and with `strict` no others: `Mismatch`, listing all faults.
    """
    there = {**reader.tensors, **{name: reader.tensors[source] for name, source in reader.skeleton.ties.items()}}
    faults = [f"the version has no {quoted(missing)}"] if (missing := sorted(like.keys() - there.keys())) else []
    if like and strict and (extra := sorted(there.keys() - like.keys())):
        faults.append(f"the version also has {quoted(extra)}; give strict=False to take them")
    faults += [
        f"the version has {there[name]}, `into` has {mine}"
        for name, mine in like.items()
        if name in there and (there[name].dtype, there[name].shape) != (mine.dtype, mine.shape)
    ]
    if faults:
        raise Mismatch("; ".join(faults))
    return rebuild(reader.skeleton, reader.map(list(reader.tensors), verify=True))
