"""A plane is not spoilt by a peer that dies: holders and readers are killed and replaced, again and again.

Users of NIXL report connections that stay broken for good after a disconnect.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from holdfast import comms
from holdfast.comms import Handle, RegionGone
from support.children import Child, children

COUNT = 1 << 16
"""Elements of a region."""

planes = pytest.mark.parametrize(
    ("plane", "rounds"),
    [
        ("shm", 10),
        ("ucx", 5),
        ("nixl", 3),
        pytest.param("nixl", 100, marks=[pytest.mark.thorough, pytest.mark.timeout(600)]),
    ],
)


@pytest.fixture
def start(plane: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Child]]:
    """Starts children that find the plane's modules loaded: two thirds of the processor time of a child went there."""
    comms.memory(plane).close()
    if plane == "nixl":
        monkeypatch.setenv("UCX_TLS", "tcp,self")  # on one host the kernel copies
        importlib.import_module("nixl._api")
    with children() as starter:
        yield starter


def hold(pipe: Connection, plane: str, number: int) -> None:
    """Expose a tensor full of `number`, until killed."""
    with comms.memory(plane) as opened:
        region = opened.expose(torch.full((COUNT,), float(number)))
        pipe.send(region.handle.encode())
        pipe.recv()


def read(pipe: Connection, plane: str) -> None:
    """Read each region that arrives, and say its first and last value, or that it is gone; until killed."""
    with comms.memory(plane) as opened:
        while True:
            handle, into = Handle.decode(pipe.recv()), torch.zeros(COUNT)
            try:
                opened.read(handle, into, timeout=10.0).wait()
                pipe.send((into[0].item(), into[-1].item()))
            except RegionGone:
                pipe.send("gone")


def seen(reader: Child, handle: bytes) -> object:
    reader.tell(handle)
    return reader.hear()


@planes
def test_a_reader_outlives_its_holders(start: Callable[..., Child], plane: str, rounds: int) -> None:
    reader = start(read, plane)
    for number in range(rounds):
        holder = start(hold, plane, number)
        handle = holder.hear()
        assert seen(reader, handle) == (number, number)
        holder.kill()
        assert seen(reader, handle) == "gone"


@planes
def test_a_holder_outlives_its_readers(start: Callable[..., Child], plane: str, rounds: int) -> None:
    handle = start(hold, plane, 7).hear()
    for _ in range(rounds):
        reader = start(read, plane)
        assert seen(reader, handle) == (7, 7)
        reader.tell(handle)  # killed in the middle of a read, perhaps
        reader.kill()
    assert seen(start(read, plane), handle) == (7, 7)
