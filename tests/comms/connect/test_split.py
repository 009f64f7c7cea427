"""Communicators made of a communicator: splits, and meshes of them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, OpTimeout, PeerFailed, Revoked
from holdfast.ft import Session, Timeouts
from holdfast.harness import LocalCluster


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", pytest.param("ucx", marks=pytest.mark.thorough)])
def test_an_abort_ends_split_communicators(backend: str) -> None:
    """Rank 0 waits in a split of two for rank 1, which never comes. Aborting the whole ends the wait."""

    def waits(comm: Communicator) -> str:
        with comm.split([0, 1]) as part, part.split([0, 1]) as part_of_part:
            if comm.rank == 1:
                comm.barrier()
                return "did not come"
            threading.Timer(0.2, comm.abort, ["enough"]).start()
            with pytest.raises(Revoked, match=r"split from, is over: .*enough"):
                part_of_part.barrier(timeout=20.0)
            with pytest.raises(Revoked, match=r"split from, is over: .*enough"):
                part.barrier()
        return "freed"

    def whole(comm: Communicator) -> str:
        try:
            return waits(comm)
        except (Revoked, PeerFailed):
            return "did not come"

    with LocalCluster(2, backend) as ranks:
        assert ranks.run(whole) == ["freed", "did not come"]


def test_a_split_that_is_late_names_the_missing_rank_by_both_numbers() -> None:
    def waits(comm: Communicator) -> str:
        if comm.rank != 1:
            return ""
        with pytest.raises(OpTimeout) as late:
            comm.split([1, 2], timeout=0.2)
        assert late.value.missing_ranks == (1,), "the part's own number, as for all its errors"
        return str(late.value).replace(comm.name, "whole")

    with LocalCluster(3, "inproc") as ranks:
        assert "(of 'whole', rank 1 is rank 2)" in ranks.run(waits)[1]


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", "ucx", "mpi"])
def test_a_split_communicator_outlives_close_of_the_whole(backend: str) -> None:
    """One rank is late, and the other waits long enough to check for failures."""

    def outlives(comm: Communicator) -> float:
        part = comm.split([1, 0])
        comm.close()
        with part:
            if part.rank == 0:
                time.sleep(0.1)
            sum_of_ranks = torch.tensor([float(part.rank)])
            part.all_reduce(sum_of_ranks)
            return sum_of_ranks.item()

    with LocalCluster(2, backend) as ranks:
        assert ranks.run(outlives) == [1.0, 1.0]


def test_a_failure_is_translated_to_ranks_of_the_whole() -> None:
    def tells(comm: Communicator) -> Any:
        if comm.rank == 0:
            return None
        with comm.split([2, 1]) as part:
            mine = PeerFailed([0], "seen there")
            mine.communicator, mine.split_from = part.name, (comm.name, (2, 1))
            other = PeerFailed([2], "seen here")
            translated: Any = comm.in_its_ranks(mine)
            unknown = PeerFailed([0], "seen elsewhere")
            unknown.communicator = "another"
            assert comm.in_its_ranks(other) is other
            assert isinstance(comm.in_its_ranks(unknown), Revoked), "no rank is blamed"
            late = OpTimeout("recv", 1, 0.5, [0])
            late.communicator, late.split_from = part.name, (comm.name, (2, 1))
            there: Any = comm.in_its_ranks(late)
            assert there.missing_ranks == (2,)
            return translated.ranks

    with LocalCluster(3, "inproc") as ranks:
        assert ranks.run(tells) == [None, (2,), (2,)]


def test_a_communicator_keeps_nothing_of_the_splits_that_were_closed() -> None:
    def splits(comm: Communicator) -> list[int]:
        sizes = []
        for _ in range(3):
            for _ in range(20):
                comm.split([0, 1]).close()
            gc.collect()
            held = [value for value in vars(comm).values() if isinstance(value, dict | list | set)]
            sizes.append(sum(map(len, held)) + sum(isinstance(each, Communicator) for each in gc.get_objects()))
        return sizes

    with LocalCluster(2, "shm") as ranks:
        for sizes in ranks.run(splits):
            assert len(set(sizes)) == 1, sizes


def in_pairs(session: Session) -> dict[str, Any]:
    """Sum within pairs of ranks, then over all ranks.

    In step 5 rank 3 ends: rank 2 waits for it, rank 1 for rank 2, and rank 0 for rank 1, each in another communicator.
    """
    first, pair, seen = 0, None, []
    for attempt in session.steps(10):
        first = first or attempt.epoch
        with attempt:
            comm = attempt.comm
            if attempt.epoch not in seen:
                if pair is not None:
                    pair.close()
                seen.append(attempt.epoch)
                partner = comm.rank ^ 1
                pair = comm.split(sorted({comm.rank, partner})) if partner < comm.size else None
            if attempt.step == 5 and attempt.epoch == first and comm.rank in (1, 3):
                if comm.rank == 3:
                    time.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)
                comm.send(torch.zeros(1 << 20), 2)
            if pair is not None:
                pair.all_reduce(torch.ones(4))
            comm.all_reduce(torch.ones(4))
    if pair is not None:
        pair.close()
    return {"id": session.rank, "seen": seen}


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("ucx", marks=pytest.mark.thorough)])
def test_a_session_ends_splits_of_its_epoch_and_blames_the_right_rank(backend: str) -> None:
    """No rank waits until the timeout of an op."""
    quick = Timeouts(heartbeat=0.2, suspect=2.0, operation=60.0, rebuild=20.0, join=20.0)
    with LocalCluster(4, backend, session={"timeouts": quick, "size": 4}) as ranks:
        job = ranks.start(in_pairs)
        results, events = job.results(timeout=40.0), job.events()
    assert len(results) == 3
    assert all(len(result["seen"]) == 2 for result in results), "one death, one more epoch"
    assert len({member for event in events if event["kind"] == "detected" for member in event["members"]}) == 1


def test_ranks_fill_the_grid_row_by_row() -> None:
    def body(comm: Communicator) -> tuple[tuple[int, ...], list[float], list[int]]:
        with comms.mesh((2, 1, 3), ("dp", "pp", "tp"), comm) as grid:
            assert grid.shape == (2, 1, 3) and grid.names == tuple(grid) == ("dp", "pp", "tp")
            sums, sizes = [], []
            for axis, name in enumerate(grid.names):
                assert grid[name].rank == grid.coordinate[axis]
                total = torch.tensor([float(comm.rank)])
                grid[name].all_reduce(total)
                sums.append(total.item())
                sizes.append(grid[name].size)
            coordinate = grid.coordinate
            with pytest.raises(KeyError, match="it has dp, pp, tp"):
                grid["ep"]
        grid.close()
        with pytest.raises(Revoked, match="closed"):
            grid["tp"].barrier()
        comm.barrier()
        return coordinate, sums, sizes

    with LocalCluster(6, "inproc") as cluster:
        results = cluster.run(body)
    assert [result[0] for result in results] == [(i, 0, j) for i in range(2) for j in range(3)]
    assert [result[1] for result in results] == [
        [float(r % 3 * 2 + 3), float(r), 3.0 if r < 3 else 12.0] for r in range(6)
    ]
    assert all(result[2] == [2, 1, 3] for result in results)


def test_a_mesh_connects_and_closes_its_own_communicator(tmp_path_factory: pytest.TempPathFactory) -> None:
    meeting = f"file://{tmp_path_factory.mktemp('mesh')}/m"
    grid = comms.mesh((1, 1), ("dp", "tp"), backend="inproc", rank=0, size=1, rendezvous=meeting, timeout=20.0)
    assert grid.coordinate == (0, 0) and grid.whole.name == "default"
    grid.close()
    grid.close()
    with pytest.raises(Revoked, match="closed"):
        grid.whole.barrier()


@pytest.mark.parametrize(
    ("shape", "names", "error"),
    [
        ((2, 2), ("a", "b"), ValueError),
        ((1, 1), ("a",), ValueError),
        ((1, 1), ("a", "a"), ValueError),
        ((), (), ValueError),
        ((0, 1), ("a", "b"), ValueError),
        ((1, 1), "ab", TypeError),
        ((1, 1), ("a", 2), TypeError),
        ((1.5, 1), ("a", "b"), TypeError),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(
    shape: tuple[int, ...], names: tuple[str, ...], error: type[Exception]
) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(error):
            comms.mesh(shape, names, comm)
        with pytest.raises(ValueError, match="backend"):
            comms.mesh((1,), ("a",), comm, backend="shm")
        comm.barrier()

    with LocalCluster(1, "inproc") as cluster:
        cluster.run(body)
