"""Where ranks meet before they are connected: four ways to name a place, one `torch.distributed.Store` behind all."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed
from holdfast.comms.liveness import Liveness


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, the number of ranks, and the store they share. `key` is equal for equal places in this process."""

    rank: int
    size: int
    store: dist.Store
    key: str


_LOOK_SECONDS = 0.5
_lock = threading.Lock()
_numbers: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()
_servers: weakref.WeakValueDictionary[tuple[str, int], dist.TCPStore] = weakref.WeakValueDictionary()


def meet(rendezvous: str | dist.Store, rank: int | None, size: int | None, timeout: float) -> Place:
    """Resolve a rendezvous: `env://`, `tcp://host:port`, `file:///path`, or a store.

    `rank` and `size` default to the environment's RANK and WORLD_SIZE. Raises ValueError for what cannot be
    understood, `OpTimeout` when the store's server does not answer in `timeout` seconds.
    """
    rank = _number("rank", "RANK", rank)
    size = _number("size", "WORLD_SIZE", size)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} is out of range for size {size}: ranks are 0 to size - 1")
    if isinstance(rendezvous, dist.Store):
        return Place(rank, size, rendezvous, f"store:{_number_of(rendezvous)}")
    parts = urlsplit(rendezvous)
    if parts.scheme == "env":
        host = os.environ.get("MASTER_ADDR")
        port = os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ValueError(
                "rendezvous env:// needs MASTER_ADDR and MASTER_PORT in the environment (torchrun sets them); "
                "or pass rendezvous='tcp://host:port' or 'file:///path'"
            )
        return Place(rank, size, _tcp(host, int(port), rank, timeout), f"tcp:{host}:{port}")
    if parts.scheme == "tcp":
        if not parts.hostname or not parts.port:
            raise ValueError(f"rendezvous {rendezvous!r} needs a host and a port: tcp://host:port")
        store = _tcp(parts.hostname, parts.port, rank, timeout)
        return Place(rank, size, store, f"tcp:{parts.hostname}:{parts.port}")
    if parts.scheme == "file":
        if not parts.path or parts.netloc:
            raise ValueError(f"rendezvous {rendezvous!r} needs an absolute path: file:///path")
        return Place(rank, size, dist.FileStore(parts.path, -1), f"file:{parts.path}")
    raise ValueError(f"rendezvous {rendezvous!r} is none of env://, tcp://host:port, file:///path or a Store")


def _number_of(store: dist.Store) -> int:
    """A number that no other store of this process ever has; its `id` may come again once it is gone."""
    with _lock:
        return _numbers.setdefault(store, next(_next_number))


def _number(what: str, variable: str, given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(f"{what} is not given and {variable} is not in the environment")
    if not text.isdigit():
        raise ValueError(f"{variable}={text!r} is not a number")
    return int(text)


def _tcp(host: str, port: int, rank: int, timeout: float) -> dist.TCPStore:
    """A client of the store at host:port; rank 0 serves it, once per process and address."""
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serve:
        return _open(host, port, False, timeout)
    with _lock:
        store = _servers.get((host, port))
        if store is None:
            store = _servers[host, port] = _open(host, port, True, timeout)
        return store


def _open(host: str, port: int, serve: bool, timeout: float) -> dist.TCPStore:
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=limit)
    except dist.DistError as error:
        if serve:
            raise HoldfastError(f"rank 0 cannot serve the rendezvous at {host}:{port}: {error}") from error
        raise OpTimeout("connect", 0, timeout, (0,)) from error


def fetch(store: dist.Store, key: str, deadline: float, liveness: Liveness | None = None) -> bytes:
    """The value of `key`, waited for until `deadline`; TimeoutError then.

    With `liveness` the wait ends early, with `PeerFailed`, when a peer is gone.
    """
    while True:
        left = deadline - time.monotonic()
        step = left if liveness is None else min(left, _LOOK_SECONDS)
        try:
            store.wait([key], timedelta(seconds=max(step, 0.001)))
        except RuntimeError as error:  # each store has a type of its own for a timeout
            if isinstance(error, HoldfastError) and not isinstance(error, TimeoutError):
                raise
            if liveness is not None and (dead := liveness.dead()):
                raise PeerFailed(dead, f"its process ended before it gave {key!r}") from error
            if time.monotonic() >= deadline:
                raise TimeoutError(str(error)) from error
        else:
            return bytes(store.get(key))
