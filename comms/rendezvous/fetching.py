"""`fetch`: waits for a value that another rank writes to the store, and decodes it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist

from holdfast.comms.errors import CorruptData, HoldfastError, PeerFailed
from holdfast.comms.transport.liveness import Liveness

T = TypeVar("T")

LOOK_SECONDS = 0.25
"""The length of one wait at a store. A signal cannot interrupt it."""

MAX_BYTES = 1 << 16
"""The longest value that a rank may publish to the others."""


def fetch(store: dist.Store, key: str, deadline: float, liveness: Liveness | None = None) -> bytes:
    """Wait for the value of `key`; raise TimeoutError at `deadline`.

    Raises `PeerFailed` as soon as a peer that `liveness` watches is gone; only a short look may do without, and plugins
    that were built for API 1.0. Raises `CorruptData` for a value of more than `MAX_BYTES`.
    """
    while True:
        step = min(deadline - time.monotonic(), LOOK_SECONDS)
        try:
            store.wait([key], timedelta(seconds=max(step, 0.001)))
        except (RuntimeError, TimeoutError) as error:  # stores raise different types on a timeout
            if isinstance(error, HoldfastError) and not isinstance(error, TimeoutError):
                raise
            if isinstance(error, dist.DistNetworkError):
                raise PeerFailed((), f"the store of {key!r} is gone: {first_line(error)}") from error
            if liveness is not None and (dead := liveness.dead()):
                raise PeerFailed(dead, f"its process ended before it published {key!r}") from error
            if time.monotonic() >= deadline:
                raise TimeoutError(str(error)) from error
        else:
            value = bytes(store.get(key))
            if len(value) > MAX_BYTES:
                raise CorruptData(f"{key!r} at the rendezvous has {len(value)} bytes, more than {MAX_BYTES}")
            return value


def fetch_as(store: dist.Store, key: str, kind: type[T], deadline: float, liveness: Liveness | None = None) -> T:
    """`fetch` a value and decode it from JSON as type `kind`. Raises `CorruptData` if it does not decode."""
    return decode(key, fetch(store, key, deadline, liveness), kind)


def decode(key: str, value: bytes, kind: type[T]) -> T:
    """Decode `value`, found under `key`, from JSON as type `kind`. Raises `CorruptData`."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptData(
            f"{key!r} at the rendezvous cannot be read: {error}; another program, or another version of holdfast, "
            "writes there"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of a torch error, without its C++ traceback."""
    return (str(error).splitlines() or [type(error).__name__])[0]
