"""Large ops of every kind follow each other on one communicator without mixing their bytes.

They are staged through the caches where the ranks are near each other, and past them otherwise, or read in place, with
the same results.
"""

from __future__ import annotations

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, ReduceOp
from holdfast.comms.algorithms.shared_memory.board import IN_PLACE_BITS, NEAR
from holdfast.harness import LocalCluster
from support.memory import ALL_CLASSES, board_of

LARGE = 40_000  # elements: beyond a slot
COUNTS = [0, 3, 4_097, 10_001, 16_384, LARGE, 4 * LARGE + 1]
OPS = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "gather", "scatter")


def run(comm: Communicator, program: list[tuple[str, int, int, int, int]]) -> None:
    """Run each op on inputs that identify their rank, and check the results; drops all tensors between ops.

    Before it some ranks (bit r for rank r) are set to report that they are near, whether they are or not, and some to
    prefer reading inputs in place.
    """
    size, rank = comm.size, comm.rank
    board = board_of(comm)
    for step, (op, root, count, near, wanted) in enumerate(program):
        root %= size
        board.words[board.rows[rank] + NEAR] = near >> rank & 1
        board.words[board.rows[rank] + IN_PLACE_BITS] = ALL_CLASSES * (wanted >> rank & 1)
        mine = torch.full((count,), float(100 * step + rank))
        everyones = [torch.full((count,), float(100 * step + r)) for r in range(size)]
        total = torch.stack(everyones).sum(0)
        parts = [torch.full((count,), float(1000 * rank + r)) for r in range(size)]
        from_all = [torch.full((count,), float(1000 * r + rank)) for r in range(size)]
        outputs = [torch.empty(count) for _ in range(size)]
        out = torch.empty(count)
        if op == "all_reduce":
            comm.all_reduce(mine)
            assert torch.equal(mine, total)
        elif op == "reduce":
            comm.reduce(mine, root)
            assert torch.equal(mine, total if rank == root else everyones[rank])
        elif op == "reduce_scatter":
            comm.reduce_scatter(out, parts)
            assert torch.equal(out, torch.stack(from_all).sum(0))
        elif op == "broadcast":
            comm.broadcast(mine, root)
            assert torch.equal(mine, everyones[root])
        elif op == "all_gather":
            comm.all_gather(outputs, mine)
            assert all(torch.equal(a, b) for a, b in zip(outputs, everyones, strict=True))
        elif op == "all_to_all":
            comm.all_to_all(outputs, parts)
            assert all(torch.equal(a, b) for a, b in zip(outputs, from_all, strict=True))
        elif op == "gather":
            comm.gather(mine, outputs if rank == root else None, root)
            assert rank != root or all(torch.equal(a, b) for a, b in zip(outputs, everyones, strict=True))
        else:
            comm.scatter(out, parts if rank == root else None, root)
            assert torch.equal(out, torch.full((count,), float(1000 * root + rank)))


def test_large_ops_follow_each_other_in_any_order() -> None:
    with LocalCluster(3, "shm") as cluster:
        steps = st.tuples(
            st.sampled_from(OPS),
            st.integers(0, 2),
            st.sampled_from(COUNTS),
            st.integers(0, 7),
            st.sampled_from([0, 7, 7, 5]),
        )

        @settings(max_examples=20)
        @given(st.lists(steps, min_size=1, max_size=12))
        def holds(program: list[tuple[str, int, int, int, int]]) -> None:
            cluster.run(run, program)

        holds()


def measure_nearness(comm: Communicator) -> bool:
    """Whether a rank that shares a processor with others has measured its peers as near."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    board, tensor = board_of(comm), torch.ones(LARGE)
    assert not board.words[board.rows[comm.rank] + NEAR], "nothing is near before it was measured"
    said = False
    for _ in range(100):
        comm.all_reduce(tensor, op=ReduceOp.MAX)
        said |= bool(board.words[board.rows[comm.rank] + NEAR])
    return said


def test_ranks_on_one_processor_measure_each_other_as_near() -> None:
    with LocalCluster(2, "shm") as cluster:
        assert cluster.run(measure_nearness) == [True, True]


def beyond_caches(comm: Communicator) -> None:
    """Outputs of 24 MiB, from inputs and into outputs that begin at any multiple of 4 bytes."""
    count, size, rank = 3 << 20, comm.size, comm.rank
    for first in (0, 1):
        numbers = torch.arange(first, first + count, dtype=torch.int32)
        mine, whole = numbers + rank, torch.zeros(size * count + first, dtype=torch.int32)[first:]
        expected = torch.cat([numbers + r for r in range(size)])
        comm.all_gather_single(whole, mine)
        assert torch.equal(whole, expected)
        given = torch.cat([numbers + r + rank for r in range(size)])
        comm.all_to_all_single(whole, given)
        assert torch.equal(whole, torch.cat([numbers + r + rank for r in range(size)]))
        comm.broadcast(whole if rank else given, 0)
        assert rank == 0 or torch.equal(whole, torch.cat([numbers + r for r in range(size)]))


def test_outputs_that_no_cache_holds_are_right() -> None:
    with LocalCluster(2, "shm") as cluster:
        cluster.run(beyond_caches)
