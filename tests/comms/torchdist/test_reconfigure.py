"""`reconfigure` changes the members of a process group: after a death, by merging, splitting and joining.

The tests follow torch's own `test_c10d_fault_tolerance.py`, with the group's methods instead of functions of torch
2.14.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.comms import Communicator, PeerFailed, Revoked
from holdfast.comms.torchdist.process_group import HoldfastProcessGroup
from holdfast.harness import LocalCluster


class Group:
    """The default process group of one rank, and a store to exchange handles."""

    def __init__(self, outer: Communicator, path: Path) -> None:
        from holdfast.comms.torchdist import process_group

        asked: Any = {"enable_reconfigure": True} if process_group.AVAILABLE else {}
        torch.set_num_threads(1)
        self._outer, self.rank, self.size = outer, outer.rank, outer.size
        self.store = dist.FileStore(str(path / "store"), -1)
        dist.init_process_group(
            "holdfast", store=self.store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=30), **asked
        )
        self.pg: Any = dist.group.WORLD

    def handles(self, name: str) -> list[str]:
        self.store.set(f"{name}-{self.rank}", self.pg.get_reconfigure_handle())
        return [self.store.get(f"{name}-{rank}").decode() for rank in range(self.size)]

    def meet(self) -> None:
        """Wait for all ranks, without the group under test."""
        self._outer.barrier()

    def sum(self) -> float:
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        assert len(set(tensor.tolist())) == 1
        return float(tensor[0])


@pytest.fixture(scope="module", params=["shm", "gloo", "ucx", pytest.param("mpi", marks=pytest.mark.thorough)])
def three(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(3, str(request.param), timeout=60.0, environ={"HOLDFAST_BACKEND": str(request.param)}) as cluster:
        cluster.warm_up()
        yield cluster


def on_ranks(cluster: LocalCluster, path: Path, body: Callable[[Group], Any]) -> list[Any]:
    def run(outer: Communicator) -> Any:
        group = Group(outer, path)
        try:
            return body(group)
        finally:
            outer.barrier()
            dist.destroy_process_group()

    return cluster.run(run)


def test_reconfigure_to_the_same_members_then_fewer_then_all_in_another_order(
    three: LocalCluster, tmp_path: Path
) -> None:
    def body(group: Group) -> None:
        handles = group.handles("all")
        assert group.pg.supports_reconfigure and handles[group.rank] == group.pg.get_reconfigure_handle()
        options = SimpleNamespace(uuid=100, handles=handles, timeout=timedelta(seconds=30), hints=None)
        assert group.pg.reconfigure(options).wait()
        assert (dist.get_rank(), dist.get_world_size(), group.sum()) == (group.rank, 3, 6)
        group.pg.reconfigure(200 + group.rank, [group.pg.get_reconfigure_handle()])
        assert (dist.get_rank(), dist.get_world_size(), group.sum()) == (0, 1, 1)
        group.pg.reconfigure(300, list(reversed(handles)))
        assert (dist.get_rank(), dist.get_world_size(), group.sum()) == (2 - group.rank, 3, 6)
        right, left = (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
        got = torch.empty(2)
        for work in [dist.isend(torch.full((2,), float(dist.get_rank())), right), dist.irecv(got, left)]:
            work.wait()
        assert got.tolist() == [left, left]
        dist.barrier()
        unordered = SimpleNamespace(uuid=400, handles=set(handles), timeout=timedelta(seconds=30), hints=None)
        group.pg.reconfigure(unordered)
        assert (dist.get_rank(), group.sum()) == (sorted(handles).index(handles[group.rank]), 6)

    on_ranks(three, tmp_path, body)


def test_reconfigure_works_after_an_abort_and_refuses_bad_arguments(three: LocalCluster, tmp_path: Path) -> None:
    def body(group: Group) -> None:
        handles = group.handles("all")
        group.pg.reconfigure(1, handles)
        group.meet()  # gloo does not detect within its timeout that a rank leaves while another connects
        group.pg.abort()
        assert group.pg.get_error().name == "SUCCESS"
        with pytest.raises(Revoked):
            group.sum()
        for wrong in ([handles[(group.rank + 1) % 3]], handles + handles, ["{}"], ["x" * 10_000], []):
            with pytest.raises(ValueError, match=r"handle"):
                group.pg.reconfigure(2, wrong)
        group.pg.reconfigure(3, handles)
        with pytest.raises(RuntimeError, match="already used"):
            group.pg.reconfigure(3, handles)
        assert group.sum() == 6

    on_ranks(three, tmp_path, body)


@pytest.mark.skipif(not HoldfastProcessGroup.supports_shrinking, reason="torch shrinks groups of others from 2.14 on")
@pytest.mark.parametrize("flags", [0, 1], ids=["at rest", "with an abort"])
def test_shrink_group_goes_on_without_the_excluded(three: LocalCluster, tmp_path: Path, flags: int) -> None:
    """torch's own function: the new default group has the others, in their order; the excluded one is not asked."""

    def body(group: Group) -> None:
        assert group.sum() == 6
        if group.rank == 1:
            return
        pending = dist.all_reduce(torch.ones(2), async_op=True) if flags else None
        with pytest.raises(TypeError, match="pg_options"):
            dist.shrink_group([1], shrink_flags=flags, pg_options=SimpleNamespace())
        dist.shrink_group([1], shrink_flags=flags)
        if pending is not None:
            with pytest.raises((Revoked, PeerFailed)):
                pending.wait()
        assert (dist.get_rank(), dist.get_world_size(), group.sum()) == (group.rank // 2, 2, 3)

    on_ranks(three, tmp_path, body)


def test_survivors_of_a_kill_reconfigure_and_continue(process_backend: str, tmp_path: Path) -> None:
    def body(outer: Communicator) -> list[float]:
        group = Group(outer, tmp_path)
        handles = group.handles("all")
        assert group.sum() == 6
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises((PeerFailed, Revoked)):
            for _ in range(1000):
                group.sum()
        assert group.pg.get_error().name == "COMM_ERROR"
        group.pg.reconfigure(7, [handles[0], handles[2]])
        assert (dist.get_rank(), dist.get_world_size(), group.sum()) == (group.rank // 2, 2, 3)
        if process_backend != "shm":
            dist.destroy_process_group()
            return [1.0] * 4
        from torch.nn.parallel import DistributedDataParallel  # takes seconds

        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        weight = model.module.weight.grad
        dist.destroy_process_group()
        return [] if weight is None else weight.view(-1).tolist()

    with LocalCluster(3, process_backend, timeout=60.0, environ={"HOLDFAST_BACKEND": process_backend}) as cluster:
        outcomes = cluster.outcomes(body)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
    assert outcomes[0].value == outcomes[2].value == [1.0] * 4  # the mean over two, not three
