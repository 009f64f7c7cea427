"""A mesh has a communicator along each dimension of a grid of ranks, and ends with them."""

from __future__ import annotations

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, Revoked
from holdfast.harness import LocalCluster


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


def test_a_mesh_ends_with_the_whole() -> None:
    def body(comm: Communicator) -> None:
        grid = comms.mesh((1, 2), ("dp", "tp"), comm)
        comm.abort("enough")
        with pytest.raises(Revoked):
            grid["tp"].barrier()
        grid.close()

    with LocalCluster(2, "inproc") as cluster:
        cluster.run(body)


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
