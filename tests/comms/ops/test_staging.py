"""Large ops over a board: blocks that go through the stage, and inputs that are read in place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, PeerFailed, ReduceOp, Revoked
from holdfast.comms.algorithms.shared_memory.board import IN_PLACE_BITS, NEAR, UNSTAGED
from holdfast.harness import LocalCluster
from support.memory import ALL_CLASSES, board_of
from support.waiting import PATIENCE

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


MANY = 60_000  # elements: beyond a slot


@pytest.fixture(scope="module", params=["shm", "inproc", "shm, checked"])
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Three ranks without agreement checks, with which every op would go through Python."""
    backend, _, checked = str(request.param).partition(", ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CHECK", "1" if checked else "0")
        with LocalCluster(3, backend, environ={"HOLDFAST_CHECK": "1" if checked else "0"}) as cluster:
            yield cluster


def want(comm: Communicator, in_place: bool) -> None:
    """Set whether every rank prefers to read inputs in place; collective."""
    board = board_of(comm)
    comm.barrier()
    board.words[board.rows[comm.rank] + IN_PLACE_BITS] = ALL_CLASSES * in_place
    comm.barrier()


def lets_read(comm: Communicator) -> bool:
    """Whether the other ranks read this rank's inputs in place in the last large op."""
    board = board_of(comm)
    return bool(board.words[board.rows[comm.rank] + UNSTAGED])


def gathers(comm: Communicator) -> list[bool]:
    ways = []
    for turn in range(12):
        output = torch.empty(comm.size * MANY)
        comm.all_gather_single(output, torch.full((MANY,), float(comm.rank + turn)))
        ways.append(lets_read(comm))
        assert torch.equal(output.view(comm.size, MANY)[:, 7], torch.arange(comm.size) + float(turn))
        assert all(output.view(comm.size, MANY)[r].eq(r + turn).all() for r in range(comm.size))
    return ways


def test_large_ops_try_both_copy_modes(ranks: LocalCluster) -> None:
    for ways in ranks.run(gathers):
        assert not any(ways[:2]), "staged, until the time of that was measured"
        assert any(ways[2:])


def in_place(comm: Communicator, wanted: bool) -> list[bool]:
    """Run ops with results in the memory of their inputs; return whether those could be read in place."""
    size, rank = comm.size, comm.rank
    said = []

    want(comm, wanted)
    rows = torch.arange(size * MANY, dtype=torch.float32).view(size, MANY) + 1000 * rank
    expected = torch.stack([torch.arange(size * MANY).view(size, MANY)[rank] + 1000.0 * r for r in range(size)])
    comm.all_to_all_single(rows, rows)
    assert torch.equal(rows, expected)
    said.append(lets_read(comm))

    want(comm, wanted)
    rows = torch.zeros(size, MANY)
    rows[rank] = rank + 1.0
    comm.all_gather_single(rows.view(-1), rows[rank])
    assert torch.equal(rows, (torch.arange(size) + 1.0)[:, None].expand(size, MANY))
    said.append(lets_read(comm))

    want(comm, wanted)
    rows = torch.ones(size, MANY) * (rank + 1)
    output = rows.view(-1)[MANY // 2 : MANY // 2 + MANY]
    comm.reduce_scatter_single(output, rows)
    assert output.eq(size * (size + 1) / 2).all()

    want(comm, wanted)
    tensor = torch.arange(size * MANY, dtype=torch.float32) * (rank + 1)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(size * MANY, dtype=torch.float32) * (size * (size + 1) // 2))
    said.append(lets_read(comm))
    return said


@pytest.mark.parametrize("wanted", [False, True])
def test_ops_in_place_are_right_in_both_copy_modes(ranks: LocalCluster, wanted: bool) -> None:
    """The input of an all_to_all in place is copied first, so others may read it while the output is written."""
    for said in ranks.run(in_place, wanted):
        assert said == [wanted, wanted, wanted]


def gathers_until_one_dies(comm: Communicator) -> tuple[str, float]:
    output, mine = torch.empty(comm.size * MANY), torch.ones(MANY)
    board = board_of(comm)
    if comm.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < 2 * PATIENCE:
            board.words[board.rows[comm.rank] + IN_PLACE_BITS] = ALL_CLASSES
            comm.all_gather_single(output, mine)
            assert output.eq(1).all()
    except PeerFailed as failure:
        assert failure.ranks == (1,)
        return "PeerFailed", time.monotonic() - began
    except Revoked:
        return "Revoked", time.monotonic() - began
    return "nothing", 2 * PATIENCE


@pytest.mark.parametrize("checked", ["0", "1"])
def test_ranks_survive_the_death_of_a_rank_that_they_read(checked: str) -> None:
    with LocalCluster(3, "shm", environ={"HOLDFAST_CHECK": checked}) as cluster:
        for _ in range(5):
            outcomes = cluster.outcomes(gathers_until_one_dies)
            ends = [outcomes[rank].value for rank in (0, 2)]
            assert all(end is not None and end[0] in ("PeerFailed", "Revoked") and end[1] < PATIENCE for end in ends), (
                ends
            )
            assert any(end[0] == "PeerFailed" for end in ends)
