"""Finds tied tensors: several names for the same elements at the same addresses."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.comms.tensors.plain_tensors import PlainTensors
from holdfast.comms.tensors.shared import alias_key
from holdfast.store.sharding.placed_tensor import local_of

Tensor = torch.Tensor


def find_ties(
    tensors: Mapping[str, Tensor], locals_: Mapping[str, Tensor], plain: PlainTensors | None
) -> dict[str, str]:
    """Map each name of a tied tensor, but the first in the order of text, to that first one.

    The order does not depend on the state dict's, so that a state has the same names however it was put together.
    `locals_` is what lies here of each tensor, and `plain` its description.
    """
    addresses = [each.data_ptr() for each in locals_.values()] if plain is None else plain.addresses.tolist()
    if len(set(addresses)) == len(addresses):
        return {}
    at: defaultdict[int, list[str]] = defaultdict(list)
    for name, address in zip(tensors, addresses, strict=True):
        at[address].append(name)
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for names in at.values():
        if len(names) > 1:
            for name in names:
                groups[_key(tensors[name])].append(name)
    return {name: min(names) for names in groups.values() for name in names if name != min(names)}


def locals_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What lies here of each tensor, outside of autograd; `tensors` itself if none is a DTensor."""
    if "torch.distributed.tensor" not in sys.modules:
        return tensors
    found = {name: local_of(tensor) for name, tensor in tensors.items()}
    return found if any(found[name] is not tensor for name, tensor in tensors.items()) else tensors


def _key(tensor: Any) -> object:
    """A key that is equal for tied tensors. An empty tensor has no address; its storage identifies it.

    So a rank with empty shards finds the same ties as the other ranks.
    """
    local = local_of(tensor)
    whole = (tensor.shape, tensor._spec) if local is not tensor else ()
    if local.numel():
        return whole, alias_key(local)
    storage = local.untyped_storage()._cdata
    return whole, local.device, storage, local.storage_offset(), local.dtype, local.shape, local.stride()
