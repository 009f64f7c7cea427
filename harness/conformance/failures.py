"""Ranks that are killed, stopped, closed or aborted end the waits of their peers, which learn the failed rank.

Fixtures: `backend`, the name of the backend that is checked; `process_backend`, the same if its ranks are processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator, HoldfastError, OpTimeout, PeerFailed, Revoked, StillRunning
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import leaks, wait_for_files

SIZES = (2, 300_000)
"""Elements: one that fits into a slot, one that does not."""

OPS: dict[str, Callable[[Communicator, torch.Tensor], object]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
    "all_gather_single": lambda comm, x: comm.all_gather_single(x.new_empty(comm.size * x.numel()), x),
    "reduce_scatter_single": lambda comm, x: comm.reduce_scatter_single(x, x.repeat(comm.size)),
    "all_to_all_single": lambda comm, x: comm.all_to_all_single(x.repeat(comm.size), x.repeat(comm.size)),
    "recv": lambda comm, x: comm.recv(x, 1),
    "barrier": lambda comm, x: comm.barrier(),
}


KILLED_IN = {"0": [(op, count) for op in OPS for count in SIZES], "1": [("all_reduce", 2)]}
"""Ops and elements, by whether ranks compare ops first: they then wait for each other in that comparison."""


@pytest.mark.parametrize("checks", KILLED_IN)
def test_a_killed_rank_is_named_by_all_others(process_backend: str, checks: str, tmp_path: Path) -> None:
    """In each op another process is killed, which stands in the place of the one before."""

    def body(comm: Communicator, op: str, count: int, folder: Path) -> None:
        comm.barrier()
        (folder / f"{comm.rank} left the barrier").touch()
        if comm.rank == 1:
            wait_for_files(folder / "0 left the barrier", folder / "2 left the barrier")
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            OPS[op](comm, torch.ones(count))
            comm.barrier()
        except (PeerFailed, Revoked) as error:
            outcome = f"{time.monotonic() - began:.3f} {error}"
        (folder / str(comm.rank)).write_text(outcome)

    environ = {"HOLDFAST_CHECK": checks}
    with LocalCluster(3, process_backend, timeout=20.0, grace=15.0, environ=environ) as cluster:
        for op, count in KILLED_IN[checks]:
            folder = tmp_path / f"{op} of {count}"
            folder.mkdir()
            cluster.outcomes(body, op, count, folder)  # `run` would end the survivors soon after the death
            for rank in (0, 2):
                seconds, said = (folder / str(rank)).read_text().split(" ", 1)
                assert float(seconds) < 10.0, f"{folder.name}: far below the timeout"
                assert "rank 1" in said or "ranks 1" in said, folder.name


@pytest.mark.parametrize("checks", ["0", "1"])
def test_a_stopped_rank_ends_in_a_timeout_that_names_it(process_backend: str, checks: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        pids = comm.all_gather_object(os.getpid())
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        try:
            comm.all_reduce(torch.ones(4), timeout=0.5)
        except (OpTimeout, Revoked) as error:
            (tmp_path / str(comm.rank)).write_text(str(error))
        if comm.rank == 0:
            wait_for_files(tmp_path / "2")  # the death of rank 1 would be another way out
            os.kill(pids[1], signal.SIGKILL)

    environ = {"HOLDFAST_CHECK": checks}
    with LocalCluster(3, process_backend, timeout=20.0, environ=environ) as cluster, pytest.raises(HoldfastError):
        cluster.run(body)
    said = [(tmp_path / str(rank)).read_text() for rank in (0, 2)]
    assert any("timed out" in each for each in said)
    assert all("rank 1" in each for each in said)


def test_abort_frees_a_blocked_op_from_another_thread(backend: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> float:
        comm.barrier()
        if comm.rank == 0:
            wait_for_files(tmp_path / "freed")
            comm.abort("enough")
            return 0.0
        threading.Timer(0.1, comm.abort, ["called off"]).start()
        began = time.monotonic()
        with pytest.raises(Revoked, match="called off"):
            comm.all_reduce(torch.ones(2))
        took = time.monotonic() - began
        (tmp_path / "freed").touch()
        return took

    with LocalCluster(2, backend) as cluster:
        assert cluster.run(body)[1] < 5.0


def test_an_abort_reaches_ranks_that_wait_for_the_aborting_rank(backend: str) -> None:
    def body(comm: Communicator) -> str:
        if comm.rank == 0:
            comm.barrier()
            comm.abort("disk on fire")
            return "disk on fire"
        with pytest.raises((Revoked, PeerFailed)) as caught:
            comm.barrier()  # the abort may reach a rank that is still in here
            comm.all_reduce(torch.ones(2), timeout=10.0)
        return str(caught.value)

    with LocalCluster(3, backend) as cluster:
        said = cluster.run(body)
    if backend != "gloo":
        assert all("disk on fire" in each for each in said)


def test_an_announcement_reaches_waiting_ranks_or_changes_nothing(backend: str) -> None:
    def body(comm: Communicator, op: str) -> tuple[bool, bytes | None]:
        if comm.rank == 1:
            why = Revoked(comm.epoch, "another epoch follows")
            assert not comm.announce(bytes(1 << 20), why), "more than any backend carries"
            time.sleep(0.05)
            if comm.announce(b"what follows", why):
                comm.abort("announced")
                assert not comm.announce(b"again", why), "no op can run here any more"
                return True, comm.announced
        with contextlib.suppress(Revoked):
            OPS[op](comm, torch.ones(SIZES[-1])) if op != "recv" or comm.rank != 1 else _send_to_all(comm)
            comm.barrier()
            return False, comm.announced
        return True, comm.announced

    with LocalCluster(3, backend) as cluster:
        for op in OPS:
            ends = cluster.run(body, op)
            if ends[1][0]:
                assert ends == [(True, b"what follows"), (True, None), (True, b"what follows")], op
            else:
                assert ends == [(False, None)] * 3, op


def _send_to_all(comm: Communicator) -> None:
    for rank in (0, 2):
        comm.send(torch.ones(SIZES[-1]), rank)


def test_an_async_op_carries_its_error(backend: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(2), async_op=True, timeout=0.3)
            with pytest.raises(OpTimeout) as caught:
                work.wait()
            assert work.done() and str(work.exception()) == str(caught.value)
            with pytest.raises(OpTimeout) as again:  # an equal error each time, so its traceback does not grow
                work.wait()
            assert again.value is not caught.value and str(again.value) == str(caught.value)
            assert caught.value.op == "all_reduce"
            (tmp_path / "late").touch()
        else:
            wait_for_files(tmp_path / "late")

    with LocalCluster(2, backend) as cluster:
        cluster.run(body)


def test_a_wait_may_time_out_while_the_op_goes_on(backend: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.barrier(async_op=True)
            with pytest.raises(StillRunning):
                work.wait(timeout=0.05)
            (tmp_path / "waited").touch()
            work.wait(timeout=10.0)
        else:
            wait_for_files(tmp_path / "waited")
            comm.barrier()

    with LocalCluster(2, backend) as cluster:
        cluster.run(body)


def test_an_op_behind_one_that_may_wait_longer_ends_by_its_own_timeout(backend: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            earlier = comm.barrier(async_op=True, timeout=9.0)
            began = time.monotonic()
            with pytest.raises(OpTimeout, match="all_reduce"):
                comm.all_reduce(torch.ones(2), timeout=0.3)
            assert time.monotonic() - began < 5.0
            with pytest.raises(Revoked, match="all_reduce"):
                earlier.wait()
            (tmp_path / "late").touch()
        else:
            wait_for_files(tmp_path / "late")

    with LocalCluster(2, backend) as cluster:
        cluster.run(body)


def test_a_rank_that_closes_ends_the_wait_of_the_others(backend: str) -> None:
    def body(comm: Communicator) -> str:
        comm.barrier()
        if comm.rank == 1:
            comm.close()
            return "closed"
        began = time.monotonic()
        with pytest.raises((PeerFailed, Revoked)) as caught:
            comm.barrier(timeout=10.0)
        assert time.monotonic() - began < 5.0
        return type(caught.value).__name__

    with LocalCluster(2, backend) as cluster:
        cluster.run(body)


def test_a_hundred_communicators_leave_nothing_behind(process_backend: str) -> None:
    """Abort communicators in the middle of an op and build them again: descriptors, threads and maps do not grow."""

    def body(comm: Communicator, rounds: int) -> list[str]:
        def turn(number: int) -> None:
            part = comm.split([0, 1])
            part.all_reduce(torch.ones(100_000))
            comm.barrier()  # an abort may end the op of a rank that has not got out of it yet
            if number % 2 and part.rank == 0:
                threading.Timer(0.001, part.abort).start()
                with pytest.raises((Revoked, PeerFailed)):
                    part.barrier(timeout=10.0)
            part.close()
            comm.barrier()

        return leaks(turn, rounds, "holdfast-")

    with LocalCluster(2, process_backend, timeout=100.0) as cluster:
        assert cluster.run(body, 100 if process_backend == "shm" else 30) == [[], []]
