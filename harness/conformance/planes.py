"""Checks of memory planes: any process reads what another exposed, and learns when that is gone.

Fixtures: `planed`, the name of the backend with the checked plane; `planed_processes`, the same if it reaches other
processes. Those are ranks of gloo, which every torch has: only the plane is under test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, CorruptData, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.liveness import is_stopped
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import capabilities, leaks, outlived, wait_for_files

CARRIER = "gloo"
LARGE = 3_000_001
"""Elements of an int64 tensor that is moved in several blocks."""


def test_a_region_is_read_with_nothing_but_its_handle(planed: str) -> None:
    with comms.memory(planed) as plane, comms.memory(planed) as other:
        for tensor in (torch.arange(1000.0), torch.arange(LARGE), torch.zeros(33, dtype=torch.bfloat16)):
            with other.expose(tensor) as region:
                into = torch.full_like(tensor, 7)
                work = plane.read(Handle.decode(region.handle.encode()), into)
                work.wait()
                assert work.done() and work.exception() is None
                assert torch.equal(into, tensor)


def test_part_of_a_region_is_read_and_written(planed: str) -> None:
    tensor = torch.arange(100)
    with comms.memory(planed) as plane, plane.expose(tensor, writable=True) as region:
        into = torch.zeros(10, dtype=torch.int64)
        plane.read(region.handle, into, offset=40 * 8).wait()
        assert into.tolist() == list(range(40, 50))
        plane.write(region.handle, torch.zeros(2, dtype=torch.int64), offset=8).wait()
        assert tensor.tolist() == [0, 0, 0, *range(3, 100)]


def test_what_a_plane_refuses_moves_nothing(planed: str) -> None:
    tensor, ones = torch.zeros(4), torch.ones(4)
    with comms.memory(planed) as plane, plane.expose(tensor) as region:
        with pytest.raises(Unsupported, match="read-only"):
            plane.write(region.handle, ones).wait()
        for offset in (-1, 1, 1 << 70):
            with pytest.raises(ValueError, match="outside"):
                plane.read(region.handle, ones, offset=offset)
        with pytest.raises(ValueError, match="contiguous"):
            plane.read(region.handle, torch.ones(4, 4)[:, 0])
        with pytest.raises(CorruptData):
            plane.read(Handle(planed, b"nonsense", 16), ones).wait()
        with pytest.raises(Unsupported):
            plane.read(Handle("elsewhere", region.handle.address, 16), ones).wait()
    assert tensor.tolist() == [0.0] * 4 and ones.tolist() == [1.0] * 4


def test_a_closed_region_is_gone_even_if_its_memory_is_exposed_again(planed: str) -> None:
    tensor, into = torch.ones(8), torch.zeros(8)
    with comms.memory(planed) as plane, comms.memory(planed) as other:
        first = other.expose(tensor, writable=True)
        plane.read(first.handle, into).wait()
        first.close()
        first.close()
        tensor.fill_(5)
        with other.expose(tensor) as second:
            for attempt in (plane.read, plane.write):
                with pytest.raises(RegionGone):
                    attempt(first.handle, into).wait()
            plane.read(second.handle, into).wait()
            assert into.tolist() == [5.0] * 8
        with pytest.raises(RegionGone):
            plane.read(second.handle, into[:0]).wait()


def test_closing_a_plane_closes_its_regions_and_ends_its_use(planed: str) -> None:
    into = torch.zeros(8)
    with comms.memory(planed) as plane:
        with comms.memory(planed) as other:
            region = other.expose(torch.ones(8), writable=True)
            plane.read(region.handle, into).wait()
        other.close()
        for attempt in (plane.read, plane.write):
            with pytest.raises(RegionGone):
                attempt(region.handle, into).wait()
        with pytest.raises(RegionGone, match="plane was closed"):
            other.expose(torch.ones(8))


def test_a_region_closed_in_the_middle_of_reads_gives_no_later_bytes(planed: str) -> None:
    with comms.memory(planed) as plane, comms.memory(planed) as other:
        for _ in range(3):
            tensor = torch.zeros(LARGE, dtype=torch.int64)
            region = other.expose(tensor)

            def close(region: comms.memory_plane.Region = region, tensor: torch.Tensor = tensor) -> None:
                region.close()
                tensor.fill_(9)

            closer = threading.Timer(0.02, close)
            closer.start()
            into = torch.empty_like(tensor)
            with pytest.raises(RegionGone):
                while True:
                    plane.read(region.handle, into).wait()
                    assert not into.any()
            closer.join()


# -- the memory of other processes


def test_the_memory_of_a_process_that_sleeps(planed_processes: str, tmp_path: Path) -> None:
    name = planed_processes

    def body(comm: Communicator) -> float:
        with comms.memory(name) as plane:
            mine = torch.arange(LARGE) + comm.rank
            region = plane.expose(mine, writable=True)
            handles = [Handle.decode(text) for text in comm.all_gather_object(region.handle.encode())]
            began = time.monotonic()
            if comm.rank == 1:
                wait_for_files(tmp_path / "written")
            else:
                into = torch.zeros_like(mine)
                plane.read(handles[1], into).wait()
                assert torch.equal(into, torch.arange(LARGE) + 1)
                plane.write(handles[1], torch.zeros(9, dtype=torch.int64)).wait()
                (tmp_path / "written").touch()
            took = time.monotonic() - began
            comm.barrier()
            assert comm.rank == 0 or not mine[:9].any()
        return took

    with LocalCluster(2, CARRIER, timeout=30.0) as cluster:
        assert cluster.run(body)[0] < 5.0, "the owner makes no call for 10 s, unless the copies are done"


def test_the_memory_of_a_stopped_process_is_read_or_times_out(planed_processes: str, tmp_path: Path) -> None:
    name, passive = planed_processes, capabilities(planed_processes).passive_target == "none"

    def body(comm: Communicator) -> None:
        with comms.memory(name) as plane:
            region = plane.expose(torch.full((LARGE,), comm.rank))
            handle = Handle.decode(comm.all_gather_object(region.handle.encode())[1])
            pids = comm.all_gather_object(os.getpid())
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            while not is_stopped(pids[1]):
                time.sleep(0.01)
            into, late = torch.full((LARGE,), 7), False
            try:
                plane.read(handle, into, timeout=1.0).wait()
            except OpTimeout:
                late = True
            assert not (late and passive)
            assert late or torch.equal(into, torch.ones_like(into))
            (tmp_path / "done").write_text("done")
            os.kill(pids[1], signal.SIGKILL)

    outlived(CARRIER, body, tmp_path / "done")


def test_the_memory_of_a_process_that_is_killed_meanwhile(planed_processes: str, tmp_path: Path) -> None:
    name = planed_processes

    def body(comm: Communicator) -> None:
        with comms.memory(name) as plane:
            region = plane.expose(torch.ones(LARGE), writable=True)
            handle = Handle.decode(comm.all_gather_object(region.handle.encode())[1])
            pids = comm.all_gather_object(os.getpid())
            if comm.rank == 1:
                time.sleep(20.0)
                return
            into = torch.zeros(LARGE)
            plane.read(handle, into).wait()
            threading.Timer(0.1, os.kill, (pids[1], signal.SIGKILL)).start()
            began = time.monotonic()
            with pytest.raises(RegionGone):
                while True:
                    plane.read(handle, into, timeout=10.0).wait()
            for attempt in (plane.read, plane.write):
                with pytest.raises(RegionGone):
                    attempt(handle, into, timeout=10.0).wait()
            assert time.monotonic() - began < 5.0, "far below the timeout"
        with comms.memory(name) as fresh, pytest.raises(RegionGone):
            fresh.read(handle, into, timeout=10.0).wait()
        (tmp_path / "done").write_text("done")

    outlived(CARRIER, body, tmp_path / "done", timeout=30.0)


def test_planes_leave_nothing_behind(planed_processes: str) -> None:
    name = planed_processes

    def body(comm: Communicator) -> list[str]:
        def turn(number: int) -> None:
            with comms.memory(name) as plane:
                region = plane.expose(torch.ones(1000), writable=True)
                handle = Handle.decode(comm.all_gather_object(region.handle.encode())[1 - comm.rank])
                plane.read(handle, torch.empty(1000)).wait()
                plane.write(handle, torch.ones(10)).wait()
                comm.barrier()

        return leaks(turn, 8, "shm")

    with LocalCluster(2, CARRIER, timeout=30.0) as cluster:
        assert cluster.run(body) == [[], []]
