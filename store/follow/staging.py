"""State dicts beside that of a reader, laid out like it.

Versions are read into them, then copied into the reader's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.comms.tensors.overlap import span
from holdfast.comms.tensors.shared import alias_key, groups_sharing_memory
from holdfast.store.catalog.fleet_targets import Digests
from holdfast.store.data.dense import copy_elements
from holdfast.store.data.rebuild import build_value, rebuild
from holdfast.store.data.tree import FlatState, flatten_targets
from holdfast.store.reshard.placed_tensor import is_dtensor, local_of

Tensors = Mapping[str, torch.Tensor]
ALIGNMENT = 64


@dataclass(slots=True, eq=False)
class StagingState:
    """A state dict for a version; its tensors lie in `locals`, by dotted name.

    Once `complete` it holds `version`; `digests` are those of its parts. `seen` is the version of the register at which
    it was wanted. A `reserved` one is about to be overwritten.
    """

    state: dict[str, Any]
    locals: Tensors
    version: int | None = None
    digests: Digests = ()
    complete: bool = False
    reserved: bool = False
    seen: int = 0

    def holds(self, version: int, digests: Digests) -> bool:
        """Whether this has the bytes of a version; `digests` are () if the store does not have it any more."""
        return self.complete and not self.reserved and self.version == version and digests in (self.digests, ())


def staging_for(into: FlatState) -> StagingState:
    """A new state dict with the structure of `into`.

    Its tensors are on the CPU, pinned if those of `into` are on CUDA. Tensors that share memory there share it here, so
    that a version that contradicts itself in it is refused before the swap.
    """
    there = {name: local_of(tensor) for name, tensor in into.tensors.items()}
    found: dict[str, torch.Tensor] = {}
    for group in groups_sharing_memory(there):
        found.update(_sharing({name: there[name] for name in group}))
    for name, local in there.items():
        if name not in found:
            found[name] = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
    tensors = {name: _placed_like(tensor, found[name]) for name, tensor in into.published.items()}
    return StagingState(rebuild(into.skeleton, tensors), found)


def _sharing(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors that lie to each other as `tensors` do."""
    extents = [span(each) for each in tensors.values()]
    begin, end = min(first for first, _ in extents), max(last for _, last in extents)
    pinned = any(each.is_cuda for each in tensors.values())
    memory = torch.empty(end - begin + 2 * ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    start = -memory.data_ptr() % ALIGNMENT + begin % ALIGNMENT - begin
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
        offset = (start + tensor.data_ptr()) // tensor.itemsize
        alias.set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())
        alias = torch._neg_view(alias) if tensor.is_neg() else alias
        found[name] = alias.conj() if tensor.is_conj() else alias
    return found


def _placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return local
    dtensor: Any = type(tensor)
    return dtensor(local, tensor._spec, requires_grad=False)  # type: ignore[attr-defined,no-any-return]


def copy_state(source: StagingState, into: FlatState) -> None:
    """Copy tensors and values into a state dict; returns once the bytes are there."""
    done: set[tuple[object, ...]] = set()
    devices: set[torch.device] = set()
    with torch.no_grad():
        for name, tensor in into.tensors.items():
            local = local_of(tensor)
            if (key := alias_key(local)) in done:
                continue
            done.add(key)
            with torch.inference_mode(local.is_inference()):
                if local.is_cuda:
                    local.copy_(source.locals[name], non_blocking=True)
                    devices.add(local.device)
                else:
                    copy_elements(local, source.locals[name])
    into.bump_versions()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    for name, slot in flatten_targets(source.state).values.items():
        there = into.values[name]
        there.container[there.key] = build_value(slot.node)
