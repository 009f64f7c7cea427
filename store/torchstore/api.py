"""The functions of torchstore's interface, by the name of a store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout
from holdfast.comms.quantities import integer_in
from holdfast.comms.system import forks
from holdfast.ft.registers import RegisterAway
from holdfast.store.errors import NotInitialized
from holdfast.store.torchstore.client import LocalClient, in_thread
from holdfast.store.torchstore.home import StoreAddress, StoreHome, find, resolve
from holdfast.store.torchstore.record import end as ended
from holdfast.store.torchstore.strategy import ControllerStorageVolumes, TorchStoreStrategy, describe
from holdfast.store.torchstore.transport import TensorSlice

DEFAULT_TORCHSTORE_NAME = "torchstore"
END_SECONDS = 10.0
"""How long `shutdown` waits for a store to end."""

_lock = threading.Lock()
_running: dict[str, StoreHome] = {}
_clients: dict[str, LocalClient] = {}
_references: dict[str, str] = {}
"""References of stores that another rank of an SPMD job started."""
_leaving: dict[str, Callable[[], object]] = {}
"""How this rank ends a store of an SPMD job."""


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
    if integer_in(num_storage_volumes, "num_storage_volumes", 1) > 1 and strategy is None:
        raise HoldfastError(f"{num_storage_volumes} storage volumes need a strategy, such as LocalRankStrategy()")
    await in_thread(start, store_name, strategy or ControllerStorageVolumes(), num_storage_volumes)


def start(store_name: str, strategy: TorchStoreStrategy, num_storage_volumes: int) -> str:
    """Start a store in this process; returns the reference by which other ranks find it."""
    if not isinstance(strategy, TorchStoreStrategy):
        raise TypeError(f"strategy must be a TorchStoreStrategy, not {type(strategy).__name__}")
    with _lock:
        if find(store_name, in_job=True) is not None:
            raise Mismatch(f"store {store_name!r} is already initialized: shut it down first")
        home = _running[store_name] = StoreHome(store_name, describe(strategy, num_storage_volumes))
    reference = str(home.address.folder)
    if (store := group_store()) is not None:
        store.set(key_of(store_name), reference)
    return reference


def join(store_name: str, reference: str, leave: Callable[[], object]) -> None:
    """Use the store that a rank of this SPMD job started; `leave` is how `shutdown` ends that for this rank."""
    _references[store_name], _leaving[store_name] = reference, leave
    connect(store_name)


async def shutdown(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """End a store, for all processes: what was put is gone. Does nothing if there is none.

    In a store of `initialize_spmd` every rank calls it, and returns once the first rank has ended the store.
    """
    await in_thread(_leaving.pop(store_name, partial(end, store_name)))
    _references.pop(store_name, None)
    reset_client(store_name)


def end(store_name: str) -> None:
    """End a store, and wait until it has ended. Raises `OpTimeout` if another process does not end it."""
    deadline, found = time.monotonic() + END_SECONDS, _locate(store_name)
    if found is not None:
        with contextlib.suppress(RegisterAway), contextlib.closing(found.open_record()) as record:
            record.cell.change(ended)
    while found is not None and found.running:
        if time.monotonic() > deadline:
            raise OpTimeout(f"the shutdown of store {store_name!r}", 0, END_SECONDS)
        time.sleep(0.002)
    with _lock:
        home = _running.pop(store_name, None)
    if home is not None:
        home.join()


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
            known.close()
        if (found := _locate(store_name)) is None:
            raise NotInitialized(store_name, "there is none that this process can find")
        made = _clients[store_name] = LocalClient(found)
        return made


def _locate(store_name: str) -> StoreAddress | None:
    """The store that another rank started, of this job, of a process that started it, or of the default group."""
    found = resolve(store_name, _references.get(store_name, "")) or find(store_name)
    store = group_store() if found is None else None
    if store is not None and store.check([key_of(store_name)]):
        found = resolve(store_name, bytes(store.get(key_of(store_name))).decode())
    return found


def group_store() -> Any:
    """The store of torch's default group, through which its ranks tell each other where a store is; None without."""
    there = dist.is_available() and dist.is_initialized()
    return dist.distributed_c10d._get_default_store() if there else None


def key_of(store_name: str, what: str = "reference") -> str:
    """The key of something that ranks tell each other about a store."""
    return f"holdfast/torchstore/{store_name}/{what}"


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
