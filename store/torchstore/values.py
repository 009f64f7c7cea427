"""Turns values into parts of the store and back, by the store's own packing and plans of reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, again
from holdfast.comms.tensors.packing import plain_tensor
from holdfast.ft.state.boxes import whole
from holdfast.ft.state.codec import decode_state, encode_state
from holdfast.store.data.digests import copy_and_digest
from holdfast.store.data.manifest import Manifest
from holdfast.store.data.packing import PartBlock
from holdfast.store.errors import NoSuchSlice, ObjectRefused
from holdfast.store.read.read_plan import ReadPlan, has_rows, plan_into
from holdfast.store.reshard.plan import BoxTarget
from holdfast.store.torchstore.record import Form, KeyPart
from holdfast.store.torchstore.transport import Request

_DAMAGED = "what the store holds is not what was put: its memory was damaged; put it anew"


def raise_together(wrong: Sequence[Exception]) -> None:
    """Raise the only error, or one that says all."""
    if len(wrong) == 1:
        raise again(wrong[0])
    if wrong:
        raise Mismatch(f"{len(wrong)} keys are wrong, nothing was done: " + "; ".join(map(str, wrong)))


# -- putting


def blocks_of(entries: Mapping[str, Any]) -> tuple[dict[str, Form], list[PartBlock]]:
    """The form of each value and the blocks to pack, or one error with everything that is wrong.

    Raises `Unsupported` for tensors without memory of their own or with placements such as `Partial`, `ObjectRefused`
    for an object that msgpack cannot hold.
    """
    forms, blocks, wrong = dict[str, Form](), list[PartBlock](), list[Exception]()
    for key, value in entries.items():
        try:
            if not isinstance(key, str):
                raise TypeError(f"a key is text, not {type(key).__name__}")
            forms[key], found = _tensor(key, value) if isinstance(value, torch.Tensor) else _object(key, value)
            blocks += found
        except (HoldfastError, TypeError, ValueError) as error:
            wrong.append(error)
    raise_together(wrong)
    return forms, blocks


def _tensor(key: str, value: torch.Tensor) -> tuple[Form, list[PartBlock]]:
    request = Request.from_any(key, value)
    assert request.tensor_val is not None
    local, placed = plain_tensor(request.tensor_val, repr(key)), request.placed
    dtype, shape = str(local.dtype).removeprefix("torch."), tuple(local.shape)
    if placed is None:
        return Form("tensor", shape, dtype), [PartBlock(key, local, shape)]
    form = Form("shard", placed.shape, dtype, request.coordinates, request.mesh_shape)
    parts = ((box, local[tuple(slice(*side) for side in at)]) for box, at in placed.blocks)
    return form, [
        PartBlock(key, part, placed.shape, None if box == whole(placed.shape) else box) for box, part in parts
    ]


def _object(key: str, value: Any) -> tuple[Form, list[PartBlock]]:
    try:
        description, tensors = encode_state(value)
    except TypeError as error:
        raise ObjectRefused(key, str(error)) from error
    named = {key: torch.frombuffer(bytearray(description), dtype=torch.uint8)}
    named |= {f"{key}\0{number}": plain_tensor(each, repr(key)) for number, each in enumerate(tensors)}
    return Form("object", (len(tensors),)), [PartBlock(name, each, tuple(each.shape)) for name, each in named.items()]


# -- getting


@dataclass(frozen=True, slots=True)
class OpenPart:
    """The bytes of a part, and its manifest. Raises `CorruptData`."""

    memory: torch.Tensor
    manifest: Manifest

    @staticmethod
    def of(part: KeyPart, memory: torch.Tensor) -> OpenPart:
        manifest = Manifest.decode(memory[part.manifest_at : part.nbytes].numpy().data, part.manifest_at)
        if manifest.digest != part.digest:
            raise CorruptData(_DAMAGED)
        return OpenPart(memory, manifest)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Tensors to fill, and what gives the value once they are."""

    into: dict[str, torch.Tensor]
    wanted: list[BoxTarget]
    finish: Callable[[], Any]


def read_values(
    requests: Mapping[str, Request],
    found: Mapping[str, tuple[KeyPart, ...]],
    opened: Mapping[int, OpenPart],
) -> dict[str, Any]:
    """The values of keys, read from their parts (`opened`, by identity) into new tensors or the given ones, verified.

    Raises, before anything is changed, `NoSuchSlice` if what is stored does not cover what is asked for, `Mismatch` for
    a target of another shape, or if an object is to be read into a tensor.
    """
    readings, wrong = dict[str, _Reading](), list[Exception]()
    groups = defaultdict[tuple[int, ...], list[str]](list)
    for key, request in requests.items():
        try:
            form = found[key][0].form(key)
            readings[key] = _reading(request, form, opened[id(found[key][0])].manifest)
            groups[tuple(map(id, found[key]))].append(key)
        except HoldfastError as error:
            wrong.append(error)
    raise_together(wrong)
    planned: list[tuple[Sequence[OpenPart], ReadPlan, list[torch.Tensor]]] = []
    for group, keys in groups.items():
        parts = [opened[each] for each in group]
        into = {name: tensor for key in keys for name, tensor in readings[key].into.items()}
        wanted = [target for key in keys for target in readings[key].wanted]
        try:
            plan = plan_into([part.manifest.layout for part in parts], wanted, into)
        except Mismatch as error:
            raise NoSuchSlice(f"what is stored lacks elements that are asked for: {error}") from error
        planned.append((parts, plan, list(into.values())))
    for there, plan, targets in planned:
        _fill(there, plan, targets)
    return {key: reading.finish() for key, reading in readings.items()}


def _reading(request: Request, form: Form, manifest: Manifest) -> _Reading:
    if form.kind == "object":
        if request.tensor_val is not None:
            raise Mismatch(f"{request.key!r} holds an object, which cannot be read into a tensor")
        names = [request.key, *(f"{request.key}\0{number}" for number in range(form.shape[0]))]
        entries = [manifest.layout.by_name[name][0] for name in names]
        into = {each.name: torch.empty(each.shape, dtype=each.torch_dtype, device="cpu") for each in entries}
        wanted = [BoxTarget(each.name, each.name, whole(each.shape), whole(each.shape)) for each in entries]
        description, *tensors = into.values()
        return _Reading(into, wanted, lambda: decode_state(description.numpy().tobytes(), tensors))
    placed, asked, given = request.placed, request.asked, request.tensor_val
    of, local = form.shape, form.shape
    boxes = [(whole(of), whole(of))]
    if placed is not None:
        of, local, boxes = (
            placed.shape,
            tuple(placed.local.shape),
            [(block.box, block.local) for block in placed.blocks],
        )
    elif asked is not None:
        of, local, boxes = asked.global_shape, asked.local_shape, [(asked.box, whole(asked.local_shape))]
    if of != form.shape:
        raise NoSuchSlice(f"{request.key!r} has shape {form.shape}, what is to be read is of one of shape {of}")
    if given is not None and tuple(given.shape) != local:
        raise Mismatch(f"{request.key!r}: a target of shape {tuple(given.shape)} for elements of shape {local}")
    dtype = getattr(torch, form.dtype)
    target = None if given is None else plain_tensor(given, repr(request.key))
    if target is not None and target.dtype == dtype and has_rows(target):
        filled = target
    else:
        filled = torch.empty(local, dtype=dtype, device="cpu")
    wanted = [BoxTarget(request.key, request.key, box, at) for box, at in boxes]
    return _Reading({request.key: filled}, wanted, lambda: _put(filled, target))


def _put(filled: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    return filled if target is None or target is filled else target.copy_(filled)


def _fill(parts: Sequence[OpenPart], plan: ReadPlan, targets: Sequence[torch.Tensor]) -> None:
    addresses = np.array([target.data_ptr() for target in targets], np.uint64)
    for part, each in zip(parts, plan, strict=True):
        sums = copy_and_digest(*each.addressed(part.memory.data_ptr(), addresses))
        if (sums != part.manifest.sums[each.pieces]).any():
            raise CorruptData(_DAMAGED)
