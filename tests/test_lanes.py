"""Point to point over `torch.distributed`: receives from whoever sends first, and what a closed group leaves behind."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_torchdist import ENVIRON, in_group

from holdfast.comms import OpTimeout, Revoked
from holdfast.harness import LocalCluster


@pytest.fixture(scope="module", params=["shm", "gloo", "ucx"])
def three(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Three processes whose transport is chosen by the environment."""
    backend = str(request.param)
    with LocalCluster(3, backend, timeout=90.0, environ={**ENVIRON, "HOLDFAST_BACKEND": backend}) as cluster:
        yield cluster


def take_one_of_each(rank: int, group: dist.ProcessGroup | None = None) -> None:
    """Rank 0 receives from rank 1 and then from rank 2, without naming them: it goes on looking out for rank 1."""
    for sender in (1, 2):
        if rank == 0:
            got = torch.empty(1)
            assert dist.recv(got, group=group) == sender and got.item() == sender
        if rank == sender:
            dist.send(torch.tensor([float(rank)]), 0, group=group)
        dist.barrier()


def test_a_receive_after_one_from_anybody_keeps_its_own_timeout(three: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=1))
        take_one_of_each(rank, group)
        if rank == 0:
            with pytest.raises(OpTimeout):
                dist.recv(torch.empty(1), src=1, group=group)
        dist.barrier()

    in_group(three, tmp_path, body)


def test_a_receive_after_one_from_anybody_may_have_another_shape(three: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        take_one_of_each(rank)
        if rank == 1:
            dist.send(torch.arange(300_000), 0)
            dist.send(torch.tensor([7.0]), 0)
        if rank == 0:
            got, after = torch.empty(300_000, dtype=torch.int64), torch.empty(1)
            dist.recv(got, src=1)
            assert dist.recv(after) == 1
            assert torch.equal(got, torch.arange(300_000)) and after.item() == 7
        dist.barrier()  # who may send must not leave while somebody waits for anybody

    in_group(three, tmp_path, body)


def test_receives_from_anybody_at_once_get_a_message_each(three: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        sys.setswitchinterval(1e-6)  # threads meet more often
        for _ in range(10):
            if rank == 0:
                got = [torch.full((1,), -1.0) for _ in range(4)]
                for work in [dist.irecv(each) for each in got]:
                    work.wait()
                assert sorted(each.item() for each in got) == [10, 11, 20, 21]
            else:
                for work in [dist.isend(torch.tensor([10.0 * rank + i]), 0) for i in range(2)]:
                    work.wait()
            dist.barrier()
        sys.setswitchinterval(0.005)

    in_group(three, tmp_path, body)


@pytest.mark.parametrize("met", [True, False])
def test_what_is_pending_ends_with_the_group(three: LocalCluster, tmp_path: Path, met: bool) -> None:
    def body(rank: int, size: int) -> None:
        group = dist.new_group()
        if rank == 0:
            if met:
                dist.recv(torch.empty(1), src=1, group=group)
            pending = dist.irecv(torch.empty(1), src=1, group=group)
            time.sleep(0.1)  # until its thread waits for rank 1, which nothing tells
            began = time.monotonic()
            dist.destroy_process_group(group)
            assert time.monotonic() - began < 8
            with pytest.raises(Revoked):
                pending.wait()
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-lane-")]
        elif rank == 1 and met:
            dist.send(torch.ones(1), 0, group=group)
        dist.barrier()

    in_group(three, tmp_path, body)
