"""The conformance kit's collectives over built-in backends, and ranks that disagree about an op.

They get an error about sizes, dtypes and, over shared memory, roots even without checks; with HOLDFAST_CHECK=1 about
all that ranks must agree on.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, HoldfastError, Mismatch, Recv, ReduceOp, Revoked, Send
from holdfast.comms.executor import Agreement
from holdfast.comms.tensors.packing import DTYPES
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.collectives import *  # noqa: F403
from holdfast.harness.conformance.reductions import *  # noqa: F403
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import on_ranks, second_tier, shared_ranks

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


@on_ranks(2, "inproc", "shm", "gloo", "ucx", "mpi", checks="0", timeout=120.0)
def test_a_message_of_another_size_or_dtype_is_a_mismatch(comm: Communicator) -> None:
    for batch, what, count in product((False, True), DISAGREE, COUNTS):
        if comm.backend == "mpi" and what in ("dtype", "itemsize"):
            continue  # the tag that MPI compares has no room for a dtype
        with comm.split([0, 1]) as part:
            message = Recv(torch.zeros(count), 0, 3) if comm.rank else Send(DISAGREE[what](count), 1, 3)
            with pytest.raises(Mismatch) if comm.rank else contextlib.suppress(HoldfastError):
                if batch:
                    part.batch_send_recv([message])
                else:
                    (part.recv if comm.rank else part.send)(message.tensor, 1 - comm.rank, 3)


@on_ranks(2, "inproc")
def test_only_ops_that_all_ranks_join_are_counted_as_progress(comm: Communicator) -> None:
    for op in COLLECTIVES:
        before = comm.progress[0]
        collective(op, comm.rank, comm.size, 4).run(comm)
        assert comm.progress[0] - before == (op != "batch_send_recv"), op
    before = comm.progress[0]
    (comm.recv if comm.rank else comm.send)(torch.zeros(4), 1 - comm.rank)
    assert comm.progress[0] == before


@on_ranks(3, "inproc")
def test_a_rank_may_name_the_sizes_that_it_sends_and_receive_equal_ones(comm: Communicator) -> None:
    sizes = {0: ([2, 1, 3], None), 1: (None, [1, 2, 2]), 2: (None, [3, 2, 2])}
    sends, receives = sizes[comm.rank]
    received = torch.empty(sum(receives or [6]))
    given = torch.arange(6.0) + 10 * comm.rank
    comm.all_to_all_single(received, given, receives, sends)
    expected = {0: [0, 1, 10, 11, 20, 21], 1: [2, 12, 13, 22, 23], 2: [3, 4, 5, 14, 15, 24, 25]}
    assert received.tolist() == expected[comm.rank]


@on_ranks(2, "inproc")
def test_what_a_rank_gives_itself_has_the_size_of_what_it_takes(comm: Communicator) -> None:
    ours = [torch.zeros(4), torch.zeros(4)]
    ours[comm.rank] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"outputs\[{comm.rank}\]"):
        comm.all_to_all(ours, [torch.zeros(4)] * 2)


@on_ranks(2, "inproc", "shm", "ucx", checks="0")
def test_a_collective_of_another_dtype_is_a_mismatch(comm: Communicator) -> None:
    """At least one of the ranks gets it."""
    for op, count in product(("all_reduce", "broadcast", "all_gather"), COUNTS):
        with comm.split([0, 1]) as part:
            call = collective(op, comm.rank, 2, count, dtype=torch.float32 if comm.rank else torch.int32)
            said = ""
            try:
                getattr(part, op)(*call.arguments)
            except HoldfastError as error:
                said = type(error).__name__
        assert Mismatch.__name__ in comm.all_gather_object(said), (op, count)


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


@on_ranks(2, checks="1", timeout=30.0)
def test_with_checks_ranks_learn_whatever_they_disagree_about(comm: Communicator) -> None:
    for what, act in DIFFER.items():
        with comm.split([0, 1]) as part:
            with pytest.raises(Mismatch) as caught:
                act(part)
            assert "rank 0 called" in str(caught.value) and "rank 1 called" in str(caught.value), what


threads = shared_ranks(3, "inproc", checks="0")


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


@on_ranks(2, "inproc", "shm", checks="0")
def test_over_shared_memory_other_roots_are_found_when_the_ranks_meet_next(comm: Communicator) -> None:
    """Each rank takes itself for the root, and `later` ops with one root follow; then all ranks meet."""
    ops: list[tuple[str, dict[str, float]]] = [(op, {}) for op in ("broadcast", "scatter", "reduce", "gather")]
    for later, (op, options) in product((0, 1, 3), [*ops, ("broadcast", {"timeout": 20.0})]):
        with comm.split([0, 1]) as part:
            part.broadcast(torch.ones(1), 1)
            with pytest.raises(HoldfastError) as caught:
                getattr(part, op)(*collective(op, comm.rank, 2, 2, root=comm.rank).arguments, **options)
                for _ in range(later):
                    part.broadcast(torch.ones(2), 0)
                part.barrier()
            assert isinstance(caught.value, Mismatch) or re.search("Mismatch|root", str(caught.value)), (op, later)


def test_every_dtype_has_room_in_the_tag_of_a_message() -> None:
    assert len(DTYPES) <= 64


# -- the conformance kit over built-in backends


SIZES = ["inproc-1", "inproc-3", "shm-1", "shm-2", "shm-3", "gloo-3", "ucx-3", "mpi-3"]
ranks = shared_ranks(3, *SIZES, *second_tier("gloo-1", "ucx-1", "mpi-1"))  # alone all that send messages are the same


@on_ranks(2, "shm", checks="0")
def test_a_disagreement_without_checks_neither_hangs_nor_gives_wrong_results(comm: Communicator) -> None:
    """Direct transports compare ops in any case: else they would read each other's memory wrongly.

    Inputs of up to 40 bytes, ten floats, are on one line with the description of the op; larger ones are not.
    """
    for counts in ((50_000, 4), (11, 10), (10, 11), (4, 5), (1, 0)):
        with comm.split([0, 1]) as part, pytest.raises((Mismatch, Revoked)):
            part.all_reduce(torch.ones(counts[comm.rank]), timeout=5.0)
