"""Large ops try both copy modes, staging and reading inputs in place, and keep the faster one.

Neither results nor errors differ.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from holdfast.comms import Communicator, PeerFailed, Revoked
from holdfast.comms.algorithms.shared_memory.board import IN_PLACE_BITS, UNSTAGED
from holdfast.harness import LocalCluster
from support.memory import ALL_CLASSES, board_of

LARGE = 60_000  # elements: beyond a slot


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
        output = torch.empty(comm.size * LARGE)
        comm.all_gather_single(output, torch.full((LARGE,), float(comm.rank + turn)))
        ways.append(lets_read(comm))
        assert torch.equal(output.view(comm.size, LARGE)[:, 7], torch.arange(comm.size) + float(turn))
        assert all(output.view(comm.size, LARGE)[r].eq(r + turn).all() for r in range(comm.size))
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
    rows = torch.arange(size * LARGE, dtype=torch.float32).view(size, LARGE) + 1000 * rank
    expected = torch.stack([torch.arange(size * LARGE).view(size, LARGE)[rank] + 1000.0 * r for r in range(size)])
    comm.all_to_all_single(rows, rows)
    assert torch.equal(rows, expected)
    said.append(lets_read(comm))

    want(comm, wanted)
    rows = torch.zeros(size, LARGE)
    rows[rank] = rank + 1.0
    comm.all_gather_single(rows.view(-1), rows[rank])
    assert torch.equal(rows, (torch.arange(size) + 1.0)[:, None].expand(size, LARGE))
    said.append(lets_read(comm))

    want(comm, wanted)
    rows = torch.ones(size, LARGE) * (rank + 1)
    output = rows.view(-1)[LARGE // 2 : LARGE // 2 + LARGE]
    comm.reduce_scatter_single(output, rows)
    assert output.eq(size * (size + 1) / 2).all()

    want(comm, wanted)
    tensor = torch.arange(size * LARGE, dtype=torch.float32) * (rank + 1)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(size * LARGE, dtype=torch.float32) * (size * (size + 1) // 2))
    said.append(lets_read(comm))
    return said


@pytest.mark.parametrize("wanted", [False, True])
def test_ops_in_place_are_right_in_both_copy_modes(ranks: LocalCluster, wanted: bool) -> None:
    """The input of an all_to_all in place is copied first, so others may read it while the output is written."""
    for said in ranks.run(in_place, wanted):
        assert said == [wanted, wanted, wanted]


def gathers_until_one_dies(comm: Communicator) -> tuple[str, float]:
    output, mine = torch.empty(comm.size * LARGE), torch.ones(LARGE)
    board = board_of(comm)
    if comm.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < 20.0:
            board.words[board.rows[comm.rank] + IN_PLACE_BITS] = ALL_CLASSES
            comm.all_gather_single(output, mine)
            assert output.eq(1).all()
    except PeerFailed as failure:
        assert failure.ranks == (1,)
        return "PeerFailed", time.monotonic() - began
    except Revoked:
        return "Revoked", time.monotonic() - began
    return "nothing", 20.0


@pytest.mark.parametrize("checked", ["0", "1"])
def test_ranks_survive_the_death_of_a_rank_that_they_read(checked: str) -> None:
    with LocalCluster(3, "shm", environ={"HOLDFAST_CHECK": checked}) as cluster:
        for _ in range(5):
            outcomes = cluster.outcomes(gathers_until_one_dies)
            ends = [outcomes[rank].value for rank in (0, 2)]
            assert all(end is not None and end[0] in ("PeerFailed", "Revoked") and end[1] < 5.0 for end in ends), ends
            assert any(end[0] == "PeerFailed" for end in ends)
