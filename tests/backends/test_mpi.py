"""The `mpi` backend: mpirun starts its ranks, MPI numbers them in its own way, and its world only shrinks."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from holdfast import comms
from holdfast.comms import Communicator, HoldfastError, Mismatch, OpTimeout, PeerFailed, ReduceOp, Revoked, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import hookimpl
from holdfast.ft.launch.launcher import launch, mpirun_path
from holdfast.harness import LocalCluster
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import on_ranks, on_ranks_of, shared_ranks
from support.leaks import Snapshot
from support.programs.forked_programs import run_program
from support.waiting import PATIENCE, PROGRAM_SECONDS

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun: pip install 'holdfast[mpi]'")

# For tests that kill no rank and measure no memory.
two = shared_ranks(2, "mpi")
three = shared_ranks(3, "mpi")


@on_ranks_of("two")
def test_a_request_that_has_begun_is_neither_lost_to_ctrl_c_nor_tested_by_another_than_its_owner(
    comm: Communicator,
) -> None:
    """MPI would go on to write to memory that is free."""
    import _thread

    from mpi4py import MPI

    from holdfast.backends.mpi.under_way import UnderWay

    under_way: Any = UnderWay()
    with pytest.raises(KeyboardInterrupt):
        under_way.begin(_thread.interrupt_main, (), b"memory")  # the handler runs at the next bytecode
    assert len(under_way.requests) == 1
    under_way.requests.clear()
    failing = SimpleNamespace(Test=lambda: pytest.fail("its owner would take the failed receive for a complete one"))
    under_way.keep(failing, b"memory")
    under_way.forget_completed()
    assert len(under_way.requests) == 1
    under_way.requests[:] = [(MPI.Request(), b"memory")]  # as its owner's test leaves it
    under_way.forget_completed()
    assert under_way.requests == []


def next_communicator(comm: Communicator, members: list[int], meeting: Path, name: str) -> Communicator:
    """Connect `members` of `comm` anew, in their order."""
    rank = members.index(comm.rank)
    return comms.connect("mpi", rank=rank, size=len(members), rendezvous=f"file://{meeting}", name=name, timeout=20.0)


def test_connecting_outside_of_mpirun_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(comms.BackendUnavailable) as caught:
        comms.connect("mpi", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting")
    assert "mpirun --with-ft ulfm -n N python script.py" in str(caught.value)
    assert "holdfast run --backend mpi" in str(caught.value) and "LocalCluster(N, 'mpi')" in str(caught.value)
    assert not comms.backends()["mpi"].available


def test_a_script_runs_under_plain_mpirun(tmp_path: Path) -> None:
    """Ranks are those that the script asked for, not MPI's; ending without MPI_Finalize is no failure."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "from holdfast import comms\n"
        "size = int(os.environ['OMPI_COMM_WORLD_SIZE'])\n"
        "rank = size - 1 - int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"meet = {{'rendezvous': 'file://{tmp_path}/meeting', 'timeout': {PROGRAM_SECONDS}}}\n"
        "with comms.connect('mpi', rank=rank, size=size, **meet) as comm:\n"
        "    output = torch.empty(size)\n"
        "    comm.all_gather_single(output, torch.tensor([float(rank)]))\n"
        f"    open(f'{tmp_path}/{{rank}}', 'w').write(str(output.tolist()))\n"
    )
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = ["--oversubscribe", "--with-ft", "ulfm", "-n", "2"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    run_program(mpirun_path(), *as_root, *options, sys.executable, script, environ=environ)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[0.0, 1.0]"] * 2


def test_survivors_of_a_kill_build_the_next_communicator_again_and_again_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the end no session directory and no shared memory is left either, nor a process."""
    before, temporary = Snapshot.take(), tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)

    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises((PeerFailed, Revoked), match="rank 0"):
            comm.all_reduce(torch.ones(100))
        members = [2, 1]
        for turn in range(25):
            with next_communicator(comm, members, tmp_path / "next", f"turn {turn}") as after:
                x = torch.full((3,), float(comm.rank + turn))
                after.all_reduce(x)
                assert (after.rank, x[0].item()) == (members.index(comm.rank), 3 + 2 * turn)
                assert turn or time.monotonic() - killed < PATIENCE
        assert len(list(Path("/proc/self/fd").iterdir())) < 60
        assert threading.active_count() <= 3

    with LocalCluster(3, "mpi", timeout=60.0) as cluster:
        assert [outcome.error for outcome in cluster.outcomes(body) if outcome.rank] == [None, None]
        assert cluster.run(lambda comm: comm.size) == [3, 3, 3], "the next run has all ranks again"
    assert not list(temporary.iterdir())
    assert not [line for line in before.files_left_behind() if "sm_segment" in line]


@on_ranks(3, "mpi", killed=(1,), timeout=2 * PATIENCE)
def test_a_large_send_to_a_stopped_rank_ends_in_time(comm: Communicator, tmp_path: Path) -> None:
    """MPI cannot cancel such a send; the op ends all the same, and later ops do not wait for it."""
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    began = time.monotonic()
    with pytest.raises((OpTimeout, Revoked), match="rank 1"):
        comm.broadcast(torch.ones(1 << 20), 0, timeout=0.5)
        comm.barrier(timeout=0.5)
    assert time.monotonic() - began < PATIENCE
    with next_communicator(comm, [0, 2], tmp_path / "next", "next") as after:
        x = torch.ones(1 << 19)
        after.all_reduce(x)
        assert x.unique().tolist() == [2.0]
    if comm.rank == 0:
        os.kill(pids[1], signal.SIGKILL)


@on_ranks_of("two")
def test_later_ops_name_the_reason_of_another_ranks_abort(comm: Communicator) -> None:
    """MPI's own error may come after the message that explains it was read."""
    comm.barrier()
    if comm.rank == 0:
        comm.abort("called off")
    for _ in range(3):
        with pytest.raises(Revoked) as caught:
            comm.transport.barrier(time.monotonic() + 5.0)
        assert comm.rank == 0 or "called off" in caught.value.reason


@on_ranks_of("two")
def test_a_signal_handler_may_abort_in_the_middle_of_an_abort(comm: Communicator) -> None:
    comm.barrier()
    with comm.transport._ending:  # type: ignore[attr-defined]  # held by the abort that the handler interrupts
        comm.transport.abort(Revoked(comm.epoch, "from a handler"))
    with pytest.raises(Revoked) as caught:
        comm.barrier()
    assert "from a handler" in caught.value.reason


@on_ranks_of("three")
def test_an_abort_at_once_does_not_harm_ranks_that_still_connect(comm: Communicator, tmp_path: Path) -> None:
    """Open MPI crashes when a communicator is revoked that a process has not finished building."""
    for turn in range(60):
        part = next_communicator(comm, [0, 1, 2], tmp_path / "meet", f"turn {turn}")
        if comm.rank == turn % 3:
            part.abort("at once")
        else:
            with pytest.raises(Revoked, match="at once"):
                part.barrier()
        part.close()


@on_ranks(2, "mpi", checks="0", timeout=60.0)
def test_small_sums_are_right_for_more_kinds_than_are_prepared(comm: Communicator) -> None:
    """Sums are prepared on first use; too many kinds, or an observer, change no result."""
    from holdfast.backends.mpi.transport import MOST_PREPARED

    seen: list[str] = []
    for watched in (False, True):  # all the same way, then one rank the long way
        if watched and comm.rank == 1:
            registry().register(SimpleNamespace(before_op=hookimpl(lambda event: seen.append(event.op))))
        with comm.split([0, 1]) as part:
            for turn in range(3):
                for count in range(1, 31):
                    for dtype in (torch.int32, torch.float64, torch.complex64):
                        x = torch.full((count,), comm.rank + turn).to(dtype)
                        part.all_reduce(x)
                        assert x.tolist() == [1 + 2 * turn] * count
            for op, expected in [(ReduceOp.AVG, 2.5), (ReduceOp.PRODUCT, 6.0), (ReduceOp.premul_sum(3.0), 15.0)]:
                y = torch.full((5,), 2.0 + comm.rank)
                part.all_reduce(y, op)
                assert y.tolist() == [expected] * 5
            transport: Any = part.transport
            assert len(transport._prepared) == MOST_PREPARED
    assert seen.count("all_reduce") == (273 if comm.rank == 1 else 0)


@on_ranks(2, "mpi", checks="0", timeout=90.0)
def test_prepared_sums_end_with_their_communicator(comm: Communicator) -> None:
    """A hundred times: closed in order, aborted in the middle of an op, or never finished. Nothing is left."""
    from holdfast.backends.mpi.transport import MpiTransport

    def rounds(number: int) -> int:
        for turn in range(number):
            part = comm.split([1, 0])
            for count in (1, 100, 1000):
                x = torch.ones(count)
                part.all_reduce(x)
                assert x.tolist() == [2.0] * count
            if turn % 2 and part.rank == 0:
                with pytest.raises((OpTimeout, Revoked)):
                    part.all_reduce(torch.ones(100), timeout=0.01)
                part.abort("enough")
            comm.barrier()
            part.close()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    grown = -rounds(20) + rounds(100)
    gc.collect()
    assert not [left for left in gc.get_objects() if isinstance(left, MpiTransport) and left is not comm.transport]
    assert grown < 8192, "KiB"


@on_ranks_of("three")
def test_tensors_beyond_the_counts_of_mpi_are_moved_as_others_are(comm: Communicator) -> None:
    """MPI counts 2^31 - 1 bytes at most; here, far fewer."""
    most = 1 << 14
    with pytest.MonkeyPatch.context() as lowered:
        lowered.setattr("holdfast.backends.mpi.transport.MOST_COUNT", most)
        for op in COLLECTIVES:
            for count in (1, most // 4, most // 4 + 1, most + 8):
                collective(op, comm.rank, comm.size, count, root=1).run(comm)
        sizes = [[0, most, 8], [most // 2, 8, 0], [4, 4, 4]]
        given = [torch.full((size,), 10 * comm.rank + to) for to, size in enumerate(sizes[comm.rank])]
        taken = [torch.zeros(row[comm.rank], dtype=torch.int64) for row in sizes]
        comm.all_to_all(taken, given)
        assert all(each.eq(10 * of + comm.rank).all() for of, each in enumerate(taken))
        odd = [torch.ones(most - 1, dtype=torch.uint8) for _ in range(3)]
        with pytest.raises(Unsupported, match="parts that are multiples of 1 bytes only"):
            comm.all_to_all([torch.empty_like(part) for part in odd], odd)
        comm.barrier()


@on_ranks_of("two")
def test_a_large_message_of_another_size_is_a_mismatch(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as lowered:
        lowered.setattr("holdfast.backends.mpi.transport.MOST_COUNT", 1000)
        with comm.split([0, 1]) as part:
            if comm.rank == 0:
                with pytest.raises((Mismatch, Revoked)):
                    part.send(torch.ones(4000, dtype=torch.uint8), 1)
                    part.barrier()
            else:
                with pytest.raises(Mismatch, match="rank 0 sent 4000 bytes, rank 1 takes 3000"):
                    part.recv(torch.ones(3000, dtype=torch.uint8), 0)
    comm.barrier()


@on_ranks_of("two")
def test_arguments_that_mpi_refuses_blame_no_peer(comm: Communicator) -> None:
    from mpi4py import MPI

    from holdfast.backends.mpi.transport import MpiTransport

    assert isinstance(comm.transport, MpiTransport)
    for refused in (MPI.ERR_ARG, MPI.ERR_COUNT):
        error = comm.transport._explain("broadcast", 1, MPI.Exception(refused))
        assert type(error) is HoldfastError and "by no peer's fault" in str(error)


@on_ranks_of("two")
def test_windows_between_hosts_are_reached_by_messages(comm: Communicator) -> None:
    peers = tuple(replace(peer, host=f"host {rank}") for rank, peer in enumerate(comm.peers))
    comm.transport._peers = peers  # type: ignore[attr-defined]
    mine, peer = torch.zeros(3_000_000, dtype=torch.int64), 1 - comm.rank
    with comm.window(mine) as window:
        assert window.info.access == "messages"
        with pytest.raises(Unsupported, match="map"):
            window.map(peer)
        arrived = window.wait_signal(peer, async_op=True)
        window.put(torch.full((3_000_000,), comm.rank + 5), peer, async_op=True)
        window.signal(peer, async_op=True)
        arrived.wait(30.0)
        got = torch.empty(3_000_000, dtype=torch.int64)
        window.get(got, peer)
        assert got.eq(comm.rank + 5).all() and mine.eq(peer + 5).all()
        comm.barrier()
        assert window.fetch_add(peer, 0, 1) == comm.rank + 5
        comm.barrier()


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(Unsupported, match="srun"):
        launch("srun", 2)
