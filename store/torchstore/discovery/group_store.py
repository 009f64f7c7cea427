"""The store of torch's default process group, through which ranks tell each other where a store is."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def key_of(store_name: str, what: str = "reference") -> str:
    """The key of something that ranks tell each other about a store."""
    return f"holdfast/torchstore/{store_name}/{what}"


def group_store() -> Any:
    """The store of the default group; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()


def tell_group(store_name: str, reference: str) -> None:
    """Tell the ranks of the default group, if there is one, where a store is."""
    store = group_store()
    if store is not None:
        store.set(key_of(store_name), reference)


def told_by_group(store_name: str) -> str | None:
    """Where a store is, as far as a rank of the default group has said so."""
    store = group_store()
    if store is None or not store.check([key_of(store_name)]):
        return None
    return bytes(store.get(key_of(store_name))).decode()
