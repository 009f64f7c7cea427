"""A plane is not spoilt by a peer that dies: it is killed and replaced, again and again.

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


def live(pipe: Connection, plane: str, number: int) -> None:
    """Expose a tensor full of `number`; read each region that arrives, and say its ends, or that it is gone."""
    with comms.memory(plane) as opened:
        region = opened.expose(torch.full((COUNT,), float(number)))
        pipe.send(region.handle.encode())
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
def test_a_process_outlives_those_that_it_reads_and_those_that_read_it(
    start: Callable[..., Child], plane: str, rounds: int
) -> None:
    lasting = start(live, plane, rounds)
    held = lasting.hear()
    for number in range(rounds):
        passing = start(live, plane, number)
        handle = passing.hear()
        assert seen(lasting, handle) == (number, number)
        assert seen(passing, held) == (rounds, rounds)
        passing.tell(held)  # killed in the middle of a read, perhaps
        passing.kill()
        assert seen(lasting, handle) == "gone"
