"""Code that moves bytes continues after a system call that moved fewer bytes than requested."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.common.process_memory import MOST_BYTES, read_process, write_process
from holdfast.comms import Communicator
from holdfast.comms.system.files import read_all, read_at, write_all
from holdfast.harness import LocalCluster


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_a_partial_copy_is_continued(pieces: list[bytes], most: int) -> None:
    sources = [ctypes.create_string_buffer(piece, len(piece) or 1) for piece in pieces]
    targets = [ctypes.create_string_buffer(len(piece) or 1) for piece in pieces]
    reads: list[int] = []
    for source, target, piece in zip(sources, targets, pieces, strict=True):
        reads += ctypes.addressof(target), ctypes.addressof(source), len(piece)
    assert read_process(os.getpid(), *reads, most=most) == sum(map(len, pieces))
    assert [target.raw[: len(piece)] for target, piece in zip(targets, pieces, strict=True)] == pieces


def test_a_short_write_is_continued() -> None:
    source, target = ctypes.create_string_buffer(b"twelve bytes"), ctypes.create_string_buffer(13)
    addresses = ctypes.addressof(source), ctypes.addressof(target)
    assert write_process(os.getpid(), *addresses, 13, most=5) == 13
    assert target.value == b"twelve bytes"


def test_a_copy_stops_at_inaccessible_memory_and_returns_its_length() -> None:
    page = 4096
    memory = torch.empty(4 * page, dtype=torch.uint8)
    hole = memory.data_ptr() // page * page + 2 * page
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(hole), ctypes.c_size_t(page), 0) == 0
    try:
        into = torch.empty(2 * page, dtype=torch.uint8)
        for most in (MOST_BYTES, 1000, page):
            assert read_process(os.getpid(), into.data_ptr(), hole - page, 2 * page, most=most) == page
        with pytest.raises(OSError, match="Bad address"):
            read_process(os.getpid(), into.data_ptr(), hole, page)
    finally:
        libc.mprotect(ctypes.c_void_p(hole), ctypes.c_size_t(page), 3)


@given(st.binary(max_size=100), st.integers(1, 30), st.integers(0, 110), st.integers(0, 110))
def test_files_are_read_and_written_whole(data: bytes, at_once: int, offset: int, nbytes: int) -> None:
    fd = os.memfd_create("short-results")
    try:
        write_all(fd, data, at_once)
        assert read_at(fd, nbytes, offset, at_once) == data[offset : offset + nbytes]
        os.lseek(fd, 0, os.SEEK_SET)
        assert read_all(fd, at_once) == data
    finally:
        os.close(fd)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_messages_and_sums_of_more_than_2_gib_arrive(backend: str) -> None:
    """Each rank has one tensor, for machines with little memory."""
    nbytes = (1 << 31) + (1 << 20)

    def body(comm: Communicator) -> None:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        ends = tensor[:3], tensor[-3:], tensor[MOST_BYTES - 1 : MOST_BYTES + 2]
        for end in ends:
            end.fill_(1 + comm.rank)
        comm.all_reduce(tensor)
        assert all(bool((end == 3).all()) for end in ends)
        if comm.rank == 0:
            tensor[-1] = 7
            comm.send(tensor, 1)
        else:
            comm.recv(tensor, 0)
            assert int(tensor[-1]) == 7
            assert int(tensor[:-1].count_nonzero()) == 8
        comm.barrier()

    with LocalCluster(2, backend, timeout=120.0) as cluster:
        cluster.run(body)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_windows_of_more_than_2_gib_are_read_and_written(backend: str) -> None:
    nbytes = (1 << 31) + (1 << 20)

    def body(comm: Communicator) -> None:
        mine = torch.zeros(nbytes if comm.rank == 0 else 1, dtype=torch.uint8)
        with comm.window(mine) as window:
            if comm.rank == 1:
                other = torch.full((nbytes,), 3, dtype=torch.uint8)
                window.put(other, 0, timeout=60.0)
                other.zero_()
                window.get(other, 0, timeout=60.0)
                assert int(other.count_nonzero()) == nbytes
            comm.barrier()

    with LocalCluster(2, backend, timeout=120.0) as cluster:
        cluster.run(body)
