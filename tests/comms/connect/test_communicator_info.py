"""`comm.info`: what a communicator is and runs with, on every backend; the names and members of splits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from holdfast.comms import Communicator, Mismatch
from holdfast.harness import LocalCluster

TRANSPORTS = {
    "inproc": "memory of one process",
    "shm": "shared memory",
    "gloo": "tcp",
    "ucx": "posix,cma,self",
    "mpi": "Open MPI",
}


def test_info_says_what_a_communicator_is(two_ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> Any:
        info = comm.info
        assert (info.name, info.backend, info.rank, info.size, info.epoch) == (
            comm.name,
            comm.backend,
            comm.rank,
            comm.size,
            comm.epoch,
        )
        assert info.devices == (torch.device("cpu"),) and info.ranks == (0, 1)
        assert len(info.hosts) == 2 and len(set(info.hosts)) == 1
        assert info.library_version and set(info.options) == {"timeout", "check"} and info.options["check"] is True
        with pytest.raises(dataclasses.FrozenInstanceError):
            info.epoch = 7  # type: ignore[misc]
        with pytest.raises(TypeError):
            info.options["timeout"] = 1.0  # type: ignore[index]
        return info.backend, info.transport

    (backend, transport), again = two_ranks.run(body)
    assert transport == TRANSPORTS[backend] and again == (backend, transport)


def test_a_split_has_the_name_and_members_that_were_given(three_ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> Any:
        part = comm.split([2, 0], name="ends")
        if part is None:
            return None
        with part:
            total = torch.tensor([float(comm.rank)])
            part.all_reduce(total)
            return part.name, part.info.name, part.info.ranks, part.rank, total.item()

    assert three_ranks.run(body) == [("ends", "ends", (2, 0), 1, 2.0), None, ("ends", "ends", (2, 0), 0, 2.0)]


def test_ranks_that_are_left_out_get_none_and_need_not_call() -> None:
    def body(comm: Communicator) -> list[bool]:
        none = [comm.split([1 - comm.rank]) is None, comm.split(None) is None]
        with comm.split([comm.rank]) as alone:
            none.append(alone.size == 1)
        comm.barrier()
        return none

    with LocalCluster(2, "inproc") as cluster:
        assert cluster.run(body) == [[True] * 3] * 2


def test_a_split_refuses_bad_names_and_ranks_before_the_ranks_meet() -> None:
    def body(comm: Communicator) -> str:
        for name in ("", "n" * 201, 7, comm.name):
            with pytest.raises(ValueError, match="name must be a new one, of 1 to 200 characters"):
                comm.split([0, 1], name=name)  # type: ignore[call-overload]
        for ranks in ([], [0, 0], [2], [-1]):
            with pytest.raises(ValueError, match="ranks"):
                comm.split(ranks)
        with pytest.raises(Mismatch, match=r"passes name as '[ab]', rank [01] as '[ab]'"):
            comm.split([0, 1], name="ab"[comm.rank], timeout=20.0)
        comm.barrier()
        return "usable"

    with LocalCluster(2, "inproc") as cluster:
        assert cluster.run(body) == ["usable"] * 2
