"""Ranks that disagree about the size or dtype of a message get an error even without checks.

The header of a message has both.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.comms import Communicator, HoldfastError, Mismatch, Recv, Send
from holdfast.comms.tensors.packing import DTYPES
from holdfast.harness import LocalCluster

pytestmark = pytest.mark.usefixtures("fast_paths")


SIZES = {"small": 4, "large": 100_000}
DISAGREE: dict[str, Callable[[int], torch.Tensor]] = {
    "dtype": lambda count: torch.full((count,), 7, dtype=torch.int32),
    "itemsize": lambda count: torch.full((count // 2,), 7, dtype=torch.float64),
    "shorter": lambda count: torch.full((count - 1,), 7.0),
    "longer": lambda count: torch.full((count + 1,), 7.0),
}
"""Messages that rank 0 sends to a rank that receives a number of float32."""


def _message(comm: Communicator, what: str, count: int, batch: bool) -> str:
    mine, peer = torch.zeros(count), 1 - comm.rank
    try:
        if comm.rank == 0:
            given = DISAGREE[what](count)
            comm.batch_send_recv([Send(given, peer, 3)]) if batch else comm.send(given, peer, 3)
        else:
            comm.batch_send_recv([Recv(mine, peer, 3)]) if batch else comm.recv(mine, peer, 3)
    except HoldfastError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["inproc", "shm", "ucx", "mpi"])
def test_a_message_of_another_size_or_dtype_is_a_mismatch(backend: str, size: str) -> None:
    for batch in (False, True):
        for what in DISAGREE:
            if backend == "mpi" and what in ("dtype", "itemsize"):
                continue  # the tag that MPI compares has no room for it
            with LocalCluster(2, backend, timeout=20.0) as cluster:
                _, receiver = cluster.run(_message, what, SIZES[size], batch)
                assert receiver == "Mismatch", (what, batch)


def _collective(comm: Communicator, op: str, what: str, count: int) -> str:
    tensor = torch.zeros(count) if comm.rank else DISAGREE[what](count)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "broadcast": lambda: comm.broadcast(tensor, 0),
        "all_gather": lambda: comm.all_gather([torch.zeros_like(tensor) for _ in range(2)], tensor),
    }
    try:
        calls[op]()
    except HoldfastError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["inproc", "shm", "ucx"])
def test_a_collective_of_another_dtype_is_a_mismatch(backend: str, size: str) -> None:
    for op in ("all_reduce", "broadcast", "all_gather"):
        with LocalCluster(2, backend, timeout=20.0) as cluster:
            said = cluster.run(_collective, op, "dtype", SIZES[size])
            assert Mismatch.__name__ in said, (op, said)


def test_every_dtype_has_room_in_the_tag_of_a_message() -> None:
    assert len(DTYPES) <= 64
