"""What child processes do with a weight store in tests: hold replicas, publish and die, be on another host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from holdfast.comms.memory_plane import Handle, MemoryPlane
from holdfast.comms.transport import liveness
from holdfast.comms.work import Work
from holdfast.store import WeightStore
from holdfast.store.catalog.records import Catalog
from support.children import Child

Holders = Callable[[int], list[Child]]
"""A function that starts so many stores of other processes, which keep replicas."""


def a_holder(pipe: Connection, url: str) -> None:
    """Keep replicas until the parent sends a message; sends the list of versions once the store is open."""
    with WeightStore(url) as held:
        pipe.send(held.versions())
        pipe.recv()


def a_publisher(
    pipe: Connection,
    url: str,
    version: int,
    state: Callable[[], Mapping[str, Tensor]],
    point: str,
    parts: int = 1,
    **options: Any,
) -> None:
    """Publish `state()` as part 0, close the store, and die by SIGKILL at `point`, after its name was sent.

    It is an event of the store, "returned" from the publish, "leaving" between the two steps of closing, "gone" after
    them, or "closed": then the process stays, without a store.
    """

    def reach(here: str) -> None:
        if here == point:
            pipe.send(here)
            if here != "closed":
                os.kill(os.getpid(), signal.SIGKILL)

    def leave(transition: Callable[[Catalog], Catalog]) -> tuple[int, Catalog]:
        found = change(transition)
        reach("leaving")
        return found

    store = WeightStore(url, observe=lambda kind, _: reach(kind), **options)
    store.publish(version, state(), part=0, parts=parts)
    reach("returned")
    change = store._catalog_client.change
    store._catalog_client.change = leave  # type: ignore[method-assign]
    store.close()
    reach("gone")
    reach("closed")
    pipe.recv()


def move_to_host(host: str) -> None:
    """Let this process be on another host, from which and to which data goes over TCP."""
    os.environ.update({liveness.HOST: host, "UCX_TLS": "tcp,self"})
    liveness.this_host.cache_clear()


def count_reads(plane: MemoryPlane) -> list[int]:
    """The sizes of all reads of a plane from now on."""
    read, sizes = plane.read, list[int]()

    def counted(handle: Handle, into: Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        sizes.append(into.nbytes)
        return read(handle, into, offset, timeout=timeout)

    plane.read = counted  # type: ignore[method-assign]
    return sizes
