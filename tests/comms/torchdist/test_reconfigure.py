"""`reconfigure` changes the members of a process group: after a death, by merging, splitting and joining.

The tests follow torch's own `test_c10d_fault_tolerance.py`, with the group's methods instead of functions of torch
2.14.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from holdfast.comms import Communicator, PeerFailed, Revoked
from holdfast.comms.torchdist import Options, process_group
from holdfast.comms.torchdist.process_group import HoldfastProcessGroup
from support.comms.ranks import on_ranks, on_ranks_of, second_tier
from support.comms.torch_groups import default_group, shared_groups


class Group:
    """The default process group of one rank; `outer` is its communicator without the group."""

    def __init__(self, outer: Communicator) -> None:
        self.rank, self.outer, self.pg = outer.rank, outer, cast(Any, dist.group.WORLD)

    def handles(self) -> list[str]:
        return [str(handle) for handle in self.outer.all_gather_object(self.pg.get_reconfigure_handle())]

    def sum(self) -> float:
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        assert len(set(tensor.tolist())) == 1
        return float(tensor[0])


@contextmanager
def group_of(outer: Communicator, path: Path, **options: Any) -> Iterator[Group]:
    if process_group.AVAILABLE:
        options["enable_reconfigure"] = True
    with default_group(outer, path, timeout=timedelta(seconds=30), **options):
        yield Group(outer)
        if outer.over is None:
            outer.barrier()


three = shared_groups(3, "shm", "gloo", "ucx", *second_tier("mpi"))


@on_ranks_of("three")
def test_reconfigure_to_the_same_members_then_fewer_then_all_in_another_order(
    outer: Communicator, tmp_path: Path
) -> None:
    with group_of(outer, tmp_path) as group:
        handles = group.handles()
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
        group.pg.reconfigure(SimpleNamespace(**{**vars(options), "uuid": 400, "handles": set(handles)}))
        assert (dist.get_rank(), group.sum()) == (sorted(handles).index(handles[group.rank]), 6)


@on_ranks_of("three")
def test_reconfigure_works_after_an_abort_and_refuses_bad_arguments(outer: Communicator, tmp_path: Path) -> None:
    with group_of(outer, tmp_path) as group:
        handles = group.handles()
        group.pg.reconfigure(1, handles)
        outer.barrier()  # gloo does not detect within its timeout that a rank leaves while another connects
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


@pytest.mark.skipif(not HoldfastProcessGroup.supports_shrinking, reason="torch shrinks groups of others from 2.14 on")
@pytest.mark.parametrize("flags", [0, 1], ids=["at rest", "with an abort"])
@on_ranks_of("three")
def test_shrink_group_goes_on_without_the_excluded(outer: Communicator, tmp_path: Path, flags: int) -> None:
    """torch's own function: the new default group has the others, in their order; the excluded one is not asked."""
    with group_of(outer, tmp_path) as group:
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


@on_ranks(3, of="process_backend", killed=(1,))
def test_survivors_of_a_kill_reconfigure_and_continue(outer: Communicator, tmp_path: Path) -> None:
    with group_of(outer, tmp_path, pg_options=Options(outer.backend)) as group:
        handles = group.handles()
        assert group.sum() == 6
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises((PeerFailed, Revoked)):
            for _ in range(1000):
                group.sum()
        assert group.pg.get_error().name == "COMM_ERROR"
        group.pg.reconfigure(7, [handles[0], handles[2]])
        assert (dist.get_rank(), dist.get_world_size(), group.sum()) == (group.rank // 2, 2, 3)
        if outer.backend == "shm":
            from torch.nn.parallel import DistributedDataParallel  # takes seconds

            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(4, 1))
            model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
            weight = model.module.weight.grad
            assert weight is not None
            assert weight.view(-1).tolist() == [1.0] * 4  # the mean over two, not three
        outer.abort("its rank 1 is dead")
