"""State dicts under one key: each value under a key of its own, and their structure beside them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.store.errors import NoSuchKey
from holdfast.store.torchstore.api import DEFAULT_TORCHSTORE_NAME, client
from holdfast.store.torchstore.client import LocalClient

DELIM = "/"
MAPPING = "MAPPING"

_registered: weakref.WeakKeyDictionary[LocalClient, dict[str, Mapping[str, Any]]] = weakref.WeakKeyDictionary()
"""The state dicts that were put with `direct_rdma`, which later calls need not pass."""


async def put_state_dict(
    state_dict: Mapping[str, Any] | None,
    key: str,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Store the values of a state dict under `key/name`, and its structure under `key/MAPPING`, all at once.

    Floating-point tensors are cast to `transfer_dtype`. With `direct_rdma`, torchstore lets readers read the caller's
    memory; here the values are copied as well, so that readers get those of the last call. `state_dict` may then be
    None for the one that was put before.
    """
    store = await client(store_name)
    if direct_rdma:
        known = _registered.setdefault(store, {})
        if state_dict is None:
            state_dict = known.get(key)
        else:
            known[key] = state_dict
    if state_dict is None:
        raise HoldfastError(f"putting {key!r}: no state dict; the first call needs one, also with direct_rdma")
    flat, mapping = _flatten(state_dict)
    entries = {f"{key}{DELIM}{name}": _cast(value, transfer_dtype) for name, value in flat.items()}
    await store.put_batch({**entries, f"{key}{DELIM}{MAPPING}": mapping})


async def get_state_dict(
    key: str,
    user_state_dict: Mapping[str, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
) -> dict[str, Any]:
    """The state dict under a key. The tensors of `user_state_dict` are filled, and are those of the result.

    Raises `NoSuchKey` if none was put whole, `Mismatch` if `strict` and the two have other names.
    """
    if direct_rdma and user_state_dict is None:
        raise HoldfastError(f"getting {key!r} with direct_rdma: pass user_state_dict, whose tensors are filled")
    store = await client(store_name)
    try:
        mapping = await store.get(f"{key}{DELIM}{MAPPING}")
    except NoSuchKey as error:
        raise NoSuchKey(f"no state dict was put under {key!r}, or not by all ranks: {error}") from error
    targets, names = ({}, None) if user_state_dict is None else _flatten(user_state_dict)
    if direct_rdma:
        mapping = {name: path for name, path in mapping.items() if name in targets}
    elif strict and names is not None and names != mapping:
        raise Mismatch(f"the state dict under {key!r} has other names: {_difference(names, mapping)}; or strict=False")
    wanted = {f"{key}{DELIM}{name}": _tensor_or_none(targets.get(name)) for name in mapping}
    values = await store.get_batch(wanted) if wanted else {}
    if direct_rdma:
        return dict(user_state_dict or {})
    return _unflatten({name: values[f"{key}{DELIM}{name}"] for name in mapping}, mapping)


def _state_dict_size(state_dict: Mapping[str, Any]) -> int:
    """The size of the tensors of a state dict, in whole MiB."""
    flat, _ = _flatten(state_dict)
    return sum(each.nbytes for each in flat.values() if isinstance(each, torch.Tensor)) >> 20


def _flatten(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state_dict)  # type: ignore[arg-type]


def _unflatten(flat: dict[str, Any], mapping: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    return unflatten_state_dict(flat, mapping)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating and dtype is not None else value


def _tensor_or_none(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    said = [
        f"it lacks {', '.join(missing[:10])}" if missing else "",
        f"it adds {', '.join(extra[:10])}" if extra else "",
    ]
    return "; ".join(each for each in said if each) or "the same names are nested otherwise"
