"""Ranks that disagree get an error: about sizes, dtypes and, over shared memory, roots even without checks.

With HOLDFAST_CHECK=1 they get it for all that ranks must agree on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, HoldfastError, Mismatch, Recv, ReduceOp, Send
from holdfast.comms.executor import Agreement
from holdfast.comms.tensors.packing import DTYPES
from holdfast.harness import LocalCluster

pytestmark = pytest.mark.usefixtures("fast_paths")


COUNTS = (4, 100_000)
DISAGREE: dict[str, Callable[[int], torch.Tensor]] = {
    "dtype": lambda count: torch.full((count,), 7, dtype=torch.int32),
    "itemsize": lambda count: torch.full((count // 2,), 7, dtype=torch.float64),
    "shorter": lambda count: torch.full((count - 1,), 7.0),
    "longer": lambda count: torch.full((count + 1,), 7.0),
    "much longer": lambda count: torch.full((count + 400_000,), 7.0),
    "nothing": lambda count: torch.zeros(0),
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


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", "ucx", "mpi"])
def test_a_message_of_another_size_or_dtype_is_a_mismatch(backend: str) -> None:
    with LocalCluster(2, backend, timeout=20.0) as cluster:
        for batch, what, count in product((False, True), DISAGREE, COUNTS):
            if backend == "mpi" and what in ("dtype", "itemsize"):
                continue  # the tag that MPI compares has no room for a dtype
            _, receiver = cluster.run(_message, what, count, batch)
            assert receiver == "Mismatch", (what, count, batch)


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


@pytest.mark.parametrize("backend", ["inproc", "shm", "ucx"])
def test_a_collective_of_another_dtype_is_a_mismatch(backend: str) -> None:
    with LocalCluster(2, backend, timeout=20.0) as cluster:
        for op, count in product(("all_reduce", "broadcast", "all_gather"), COUNTS):
            said = cluster.run(_collective, op, "dtype", count)
            assert Mismatch.__name__ in said, (op, count, said)


LONG = (1,) * 64
"""A shape whose description is longer than the first message of the checks."""

DIFFER: dict[str, Callable[[Communicator], object]] = {
    "reduction": lambda comm: comm.all_reduce(torch.ones(LONG), (ReduceOp.SUM, ReduceOp.MAX)[comm.rank]),
    "root": lambda comm: comm.broadcast(torch.ones(LONG), comm.rank),
    "destination": lambda comm: comm.reduce(torch.ones(LONG), comm.rank),
    "shape": lambda comm: comm.all_reduce(torch.ones(LONG[: 62 + comm.rank])),
    "reproducible": lambda comm: comm.all_reduce(torch.ones(LONG), reproducible=bool(comm.rank)),
    "source of objects": lambda comm: comm.broadcast_object("x", comm.rank),
    "op": lambda comm: comm.barrier() if comm.rank else comm.all_reduce(torch.ones(LONG)),
}


def _differing(comm: Communicator) -> list[str]:
    found = []
    for what, act in DIFFER.items():
        with comm.split([0, 1]) as part:
            try:
                act(part)
                found.append(f"{what}: nothing")
            except Mismatch as error:
                said = str(error)
                if "rank 0 called" not in said or "rank 1 called" not in said:
                    found.append(f"{what}: {said}")
    return found


def test_with_checks_ranks_learn_whatever_they_disagree_about(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECK", "1")
    with LocalCluster(2, backend, timeout=30.0, environ={"HOLDFAST_CHECK": "1"}) as cluster:
        assert cluster.run(_differing) == [[], []]


@pytest.fixture(scope="module")
def threads() -> Iterator[LocalCluster]:
    with LocalCluster(3, "inproc", timeout=30.0) as cluster:
        yield cluster


def _agree(comm: Communicator, words: list[str]) -> str:
    try:
        Agreement(comm.transport).check(words[comm.rank], time.monotonic() + 30.0)
    except Mismatch as error:
        return str(error)
    return ""


descriptions = st.builds(
    lambda start, repeats, end: start * repeats + end,
    st.sampled_from(["", "all_reduce", "ü", "(1, "]),
    st.sampled_from([0, 1, 50, 500]),
    st.sampled_from(["", "a", "b", "\0"]),
)


@given(words=st.lists(descriptions, min_size=3, max_size=3))
def test_descriptions_agree_only_if_they_are_equal(threads: LocalCluster, words: list[str]) -> None:
    said = threads.run(_agree, words)
    assert len(set(said)) == 1, "all ranks raise the same"
    assert bool(said[0]) == (len(set(words)) > 1)
    if said[0]:
        assert all(f"called {word}" in said[0] for word in words)


ROOTED: dict[str, Callable[[Communicator, int], object]] = {
    "broadcast": lambda comm, root: comm.broadcast(torch.ones(2), root),
    "broadcast, checked arguments": lambda comm, root: comm.broadcast(torch.ones(2), root, timeout=20.0),
    "scatter": lambda comm, root: comm.scatter(
        torch.ones(2), [torch.ones(2)] * comm.size if root == comm.rank else None, root
    ),
    "reduce": lambda comm, root: comm.reduce(torch.ones(2), root),
    "gather": lambda comm, root: comm.gather(
        torch.ones(2), [torch.ones(2) for _ in range(comm.size)] if root == comm.rank else None, root
    ),
}


def _other_root(comm: Communicator, later: int) -> list[str]:
    """Each rank takes itself for the root, and `later` ops with one root follow; then all ranks meet."""
    found = []
    for op, act in ROOTED.items():
        with comm.split([0, 1]) as part:
            part.broadcast(torch.ones(1), 1)
            try:
                act(part, part.rank)
                for _ in range(later):
                    part.broadcast(torch.ones(2), 0)
                part.barrier()
                found.append(op)
            except HoldfastError as error:
                if not isinstance(error, Mismatch) and "Mismatch" not in str(error) and "root" not in str(error):
                    found.append(f"{op}: {error!r}")
    return found


@pytest.mark.parametrize("backend", ["inproc", "shm"])
def test_over_shared_memory_other_roots_are_found_when_the_ranks_meet_next(backend: str) -> None:
    with LocalCluster(2, backend, timeout=20.0) as cluster:
        for later in (0, 1, 3):
            assert cluster.run(_other_root, later) == [[], []], later


def test_every_dtype_has_room_in_the_tag_of_a_message() -> None:
    assert len(DTYPES) <= 64
