"""The functions of torchstore's interface, by the name of a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout
from holdfast.comms.quantities import integer_in
from holdfast.comms.system import forks
from holdfast.store.torchstore import state_dict_utils
from holdfast.store.torchstore.access.local_client import LocalClient, in_thread
from holdfast.store.torchstore.discovery.announcement import Announcement, find, find_in_job, resolve
from holdfast.store.torchstore.discovery.group_store import tell_group, told_by_group
from holdfast.store.torchstore.errors import NotInitialized
from holdfast.store.torchstore.service.server import StoreServer
from holdfast.store.torchstore.strategies import ControllerStorageVolumes, TorchStoreStrategy, describe
from holdfast.store.torchstore.tensor_slice import TensorSlice

DEFAULT_TORCHSTORE_NAME = "torchstore"


END_SECONDS = 10.0
"""How long `shutdown` waits for a store of another process to end."""

_lock = threading.Lock()
_running: dict[str, StoreServer] = {}
_clients: dict[str, LocalClient] = {}
_sessions: dict[str, Callable[[str], None]] = {}
"""How this rank ends a store of an SPMD job."""
_references: dict[str, str] = {}
"""References of stores that another rank of an SPMD job started."""


@forks.run_in_children
def _begin_child() -> None:
    """A forked child owns no store, and makes connections of its own."""
    global _lock
    _lock = threading.Lock()
    _running.clear()
    _clients.clear()


async def initialize(
    num_storage_volumes: int = 1,
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    mesh: Any = None,
) -> None:
    """Start a store, which this process owns. Its memory is in this process; it ends with it, or with `shutdown`.

    Found by this process and those that it starts, before or after this call; by all processes of its Monarch job; and
    by the ranks of its `torch.distributed` group. `num_storage_volumes` and `strategy` say which volume
    names there are and which one a process uses. `mesh` is accepted and not used: no process is spawned.

    Raises RuntimeError for several volumes without a strategy, `Mismatch` if the store exists.
    """
    integer_in(num_storage_volumes, "num_storage_volumes", 1)
    if strategy is None:
        if num_storage_volumes > 1:
            raise HoldfastError(f"{num_storage_volumes} storage volumes need a strategy, such as LocalRankStrategy()")
        strategy = ControllerStorageVolumes()
    await in_thread(start, store_name, strategy, num_storage_volumes)


def start(store_name: str, strategy: TorchStoreStrategy, num_storage_volumes: int) -> str:
    """Start a store in this process; returns the reference by which other ranks find it."""
    if not isinstance(strategy, TorchStoreStrategy):
        raise TypeError(f"strategy must be a TorchStoreStrategy, not {type(strategy).__name__}")
    with _lock:
        if find_in_job(store_name) is not None:
            raise Mismatch(f"store {store_name!r} is already initialized: shut it down first")
        server = _running[store_name] = StoreServer(store_name, describe(strategy, num_storage_volumes, "auto"))
    tell_group(store_name, server.reference)
    return server.reference


def join(store_name: str, reference: str, leave: Callable[[str], None]) -> None:
    """Use the store that a rank of this SPMD job started; `leave(store_name)` is how `shutdown` ends that."""
    _references[store_name], _sessions[store_name] = reference, leave


def leave(store_name: str) -> None:
    """Disconnect from a store that another rank ends."""
    _references.pop(store_name, None)
    reset_client(store_name)


async def shutdown(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """End a store, for all processes: what was put is gone. Does nothing if there is none.

    In a store of `initialize_spmd` every rank calls it, and returns once the first rank has ended the store.
    """
    await in_thread(_sessions.pop(store_name, end), store_name)


def end(store_name: str) -> None:
    """End a store, and wait until it has ended. Raises `OpTimeout` if another process does not end it."""
    reset_client(store_name)
    with _lock:
        server = _running.pop(store_name, None)
    if server is not None and server.running:
        server.close()
        return
    found = _locate(store_name)
    if found is None:
        return
    other = LocalClient(found)
    try:
        other.end_store()
    finally:
        other.close()
    deadline = time.monotonic() + END_SECONDS
    while _locate(store_name) == found:
        if time.monotonic() > deadline:
            raise OpTimeout(f"the shutdown of store {store_name!r}", 0, END_SECONDS)
        time.sleep(0.005)


def reset_client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Disconnect from a store; the next call connects anew."""
    with _lock:
        old = _clients.pop(store_name, None)
    if old is not None:
        old.close()


async def client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> LocalClient:
    """This process's connection to a store, made when it is first needed. Raises `NotInitialized`."""
    found = _clients.get(store_name)
    return found if found is not None and found.connected else await in_thread(connect, store_name)


def connect(store_name: str) -> LocalClient:
    """The connection of `client`, without a coroutine."""
    with _lock:
        known = _clients.get(store_name)
        if known is not None and known.connected:
            return known
        if known is not None:
            del _clients[store_name]
            known.close()
        found = _locate(store_name)
        if found is None:
            raise NotInitialized(store_name, "there is none that this process can find")
        made = _clients[store_name] = LocalClient(found)
        return made


def _locate(store_name: str) -> Announcement | None:
    """The store of this job, of the ranks of an SPMD job, or of a process that started this one."""
    reference = _references.get(store_name)
    found = None if reference is None else resolve(store_name, reference)
    found = found or find(store_name)
    if found is None and (reference := told_by_group(store_name)) is not None:
        found = resolve(store_name, reference)
    return found


async def put(key: str, value: Any, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Store a tensor, this rank's shard of a DTensor, or an object. See `LocalClient.put_batch`."""
    await (await client(store_name)).put(key, value)


async def put_batch(entries: dict[str, Any], store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Store values under their keys; all become visible at once. See `LocalClient.put_batch`."""
    await (await client(store_name)).put_batch(entries)


async def get(
    key: str,
    inplace_tensor: torch.Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
) -> Any:
    """The value of a key, or a slice of it; `inplace_tensor` is filled and returned. See `LocalClient.get`."""
    return await (await client(store_name)).get(key, inplace_tensor, tensor_slice_spec)


async def get_batch(
    keys: list[str] | dict[str, torch.Tensor | None], store_name: str = DEFAULT_TORCHSTORE_NAME
) -> dict[str, Any]:
    """The values of several keys, all or nothing; a dict names tensors to fill. See `LocalClient.get_batch`."""
    return await (await client(store_name)).get_batch(keys)


async def delete(key: str, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Delete a key. Raises `NoSuchKey` (a KeyError) if it is not there."""
    await (await client(store_name)).delete(key)


async def delete_batch(keys: list[str], *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Delete keys; those that are not there are ignored."""
    await (await client(store_name)).delete_batch(keys)


async def keys(prefix: str | None = None, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> list[str]:
    """All keys, or those that begin with the parts of `prefix`, which dots separate. See `LocalClient.keys`."""
    return await (await client(store_name)).keys(prefix)


async def exists(key: str, store_name: str = DEFAULT_TORCHSTORE_NAME) -> bool:
    """Whether a key has a value, complete with all its shards."""
    return await (await client(store_name)).exists(key)


async def put_state_dict(
    state_dict: dict[str, Any] | None,
    key: str,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Store a state dict under a key. See `state_dict_utils.put_state_dict`."""
    await state_dict_utils.put_state_dict(await client(store_name), state_dict, key, direct_rdma, transfer_dtype)


async def get_state_dict(
    key: str,
    user_state_dict: dict[str, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
) -> dict[str, Any]:
    """The state dict under a key, read into the tensors of `user_state_dict`. See `state_dict_utils.get_state_dict`."""
    store = await client(store_name)
    return await state_dict_utils.get_state_dict(store, key, user_state_dict, strict, direct_rdma)
