"""`handle` and `reconfigure`: a communicator gets other members, without a session, on every transport."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.comms import (
    BackendUnavailable,
    Communicator,
    HoldfastError,
    Mismatch,
    NotConnected,
    PeerFailed,
    Revoked,
)
from holdfast.comms.plugins.spec import AbortEvent
from holdfast.harness import LocalCluster
from support.meeting import in_threads
from support.waiting import PATIENCE


def total(comm: Communicator) -> float:
    tensor = torch.full((3,), comm.rank + 1.0)
    comm.all_reduce(tensor)
    assert len(set(tensor.tolist())) == 1
    return tensor[0].item()


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", "ucx", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_three_ranks_become_two_by_a_death_and_three_by_a_new_process(backend: str, tmp_path: Path) -> None:
    """Rank 0 dies, where the others met. Rank 3 has had no communicator before."""

    def body(outer: Communicator) -> list[Any]:
        number, seen = outer.rank, list[Any]()
        comm = comms.unconnected(backend, timeout=PATIENCE)
        store = dist.FileStore(str(tmp_path / "store"), -1)
        store.set(f"handle-{number}", comm.handle())

        def handle(rank: int) -> str:
            return store.get(f"handle-{rank}").decode()

        with comm:
            if number < 3:
                comm.reconfigure(1, [handle(rank) for rank in range(3)])
                seen.append((comm.rank, comm.size, total(comm)))
                if number == 0:
                    if backend == "inproc":
                        comm.abort("leaves")
                        return seen
                    os.kill(os.getpid(), signal.SIGKILL)
                with pytest.raises((PeerFailed, Revoked)):
                    while True:
                        total(comm)
                comm.reconfigure("two", {handle(rank) for rank in (1, 2)})
                in_order = sorted(handle(rank) for rank in (1, 2))
                assert comm.rank == in_order.index(comm.handle())
                seen.append((comm.size, total(comm)))
            comm.reconfigure(3, [handle(rank) for rank in (3, 1, 2)])
            seen.append((comm.rank, comm.size, comm.epoch, total(comm)))
            comm.barrier()
        return seen

    with LocalCluster(4, backend, timeout=60.0) as cluster:
        outcomes = cluster.outcomes(body)
    values = [outcome.value for outcome in outcomes]
    assert values[1:] == [
        [(1, 3, 6.0), (2, 3.0), (1, 3, 3, 6.0)],
        [(2, 3, 6.0), (2, 3.0), (2, 3, 3, 6.0)],
        [(0, 3, 3, 6.0)],
    ], [outcome.error for outcome in outcomes]


def mapped_by_peers() -> int:
    """How many mappings of shared memory this process has."""
    return sum("holdfast" in line and "memfd" not in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", "ucx", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_a_suspended_communicator_holds_no_shared_memory_and_resumes_with_its_hooks(
    backend: str, tmp_path: Path
) -> None:
    def body(outer: Communicator) -> list[Any]:
        before, seen, ops = mapped_by_peers(), list[Any](), list[str]()
        comm = comms.connect(
            backend, rank=outer.rank, size=outer.size, rendezvous=f"file://{tmp_path}/meeting", name="held"
        )
        comm.hooks.before_op(lambda op: ops.append(op.op))
        with comm:
            seen.append(total(comm))
            pending = comm.all_reduce(torch.ones(1), async_op=True)
            comm.suspend()
            pending.wait()
            assert outer.backend == "inproc" or mapped_by_peers() == before
            with pytest.raises(NotConnected, match=r"'held' is suspended; call resume\(\)"):
                total(comm)
            comm.resume()
            comm.resume()
            seen += [comm.rank == outer.rank, comm.size, total(comm)]
            comm.suspend()
        assert ops.count("all_reduce") == 3
        return seen

    with LocalCluster(3, backend, timeout=60.0) as cluster:
        assert cluster.run(body) == [[6.0, True, 3, 6.0]] * 3


def alone(path: Path, **named: Any) -> Communicator:
    return comms.connect("shm", rank=0, size=1, rendezvous=f"file://{path}/meeting", **named)


def test_an_unconnected_communicator_says_so_until_it_has_members() -> None:
    with comms.unconnected("shm", hints={"spins": 5}) as comm:
        assert (comm.rank, comm.size, comm.info.transport) == (-1, 0, "not connected")
        for call in (lambda: comm.all_reduce(torch.ones(1)), comm.barrier, lambda: comm.all_gather_object(1)):
            with pytest.raises(NotConnected, match="reconfigure"):
                call()
        assert isinstance(comm.over, NotConnected)
        comm.reconfigure(1, [comm.handle()]).wait()
        assert (comm.rank, comm.size, total(comm), comm.over) == (0, 1, 1.0, None)
        assert comm.info.hints["spins"] == 5
    with pytest.raises(BackendUnavailable):
        comms.unconnected("no_such")
    with pytest.raises(ValueError, match="unknown hint"):
        comms.unconnected("shm", hints={"no_such": 1})


def test_handles_are_short_texts_that_stay(tmp_path: Path) -> None:
    with alone(tmp_path) as comm, comm.split([0]) as other:
        handle = comm.handle()
        assert len(handle) < 600 and json.loads(handle)["peer"]["pid"] == os.getpid()
        assert handle == comm.handle() != other.handle()
        comm.reconfigure(1, [handle])
        assert comm.handle() == handle


def changed(handle: str, **fields: Any) -> str:
    return json.dumps({**json.loads(handle), **fields})


def bad_handles(own: str) -> list[tuple[Any, type[BaseException], str]]:
    other = changed(own, number=999_999)
    return [
        ([], ValueError, "0 handles"),
        ([other], ValueError, "own handle is not among the 1"),
        ([own, own], ValueError, "rank 0 and rank 1 are the same"),
        ([own, "{}"], ValueError, "not the handle of a process"),
        ([own, "x" * 10_000], ValueError, "10000 characters"),
        ([own, changed(own, at="nowhere")], ValueError, "not the handle of a process"),
        ([own, changed(own, more=1)], ValueError, "not the handle of a process"),
        ([own, 7], TypeError, "a handle must be a text"),
        (own, TypeError, "a list or a set"),
        ([own, changed(other, version=2)], Mismatch, "version 2, this process reads 1"),
        ([own, changed(other, job="another")], Mismatch, r"rank 1 is of another job .*HOLDFAST_KEY_FILE"),
        ([own, changed(other, device="cuda")], Mismatch, "another device"),
        ([own, changed(other, backends=["mpi"])], BackendUnavailable, "no backend in common"),
        ([own, changed(other, peer={**json.loads(own)["peer"], "started": 1})], PeerFailed, "has ended"),
    ]


def test_bad_handles_change_nothing(tmp_path: Path) -> None:
    with alone(tmp_path) as comm:
        ends: list[AbortEvent] = []
        comm.hooks.on_abort(ends.append)
        for handles, error, said in bad_handles(comm.handle()):
            with pytest.raises(error, match=said):
                comm.reconfigure(1, handles)
            assert total(comm) == 1.0
        with pytest.raises(ValueError, match="unknown hint"):
            comm.reconfigure(1, [comm.handle()], hints={"no_such": 1})
        comm.reconfigure(1, [comm.handle()])
        with pytest.raises(HoldfastError, match="uuid 1 was already used"):
            comm.reconfigure(1, [comm.handle()])
        for uuid, wrong in ((1.5, TypeError), (True, TypeError), ("", ValueError), ("u" * 201, ValueError)):
            with pytest.raises(wrong, match="uuid"):
                comm.reconfigure(uuid, [comm.handle()])  # type: ignore[arg-type]
        assert (total(comm), ends) == (1.0, [])


def side_by_side(*bodies: Callable[[], Any]) -> list[Any]:
    return in_threads(len(bodies), lambda number: bodies[number]())


def test_members_that_pass_other_handles_or_hints_are_told() -> None:
    with comms.unconnected("inproc", timeout=3.0) as first, comms.unconnected("inproc", timeout=3.0) as second:
        one, two = first.handle(), second.handle()
        three = changed(two, number=999_999)
        errors = side_by_side(
            lambda: first.reconfigure(1, [one, two]), lambda: second.reconfigure(1, [one, three, two])
        )
        assert any(isinstance(error, Mismatch) for error in errors), errors
        errors = side_by_side(
            lambda: first.reconfigure(2, [one, two], hints={"spins": 1}),
            lambda: second.reconfigure(2, [one, two], hints={"spins": 2}),
        )
        assert any(isinstance(error, Mismatch) and "hint 'spins'" in str(error) for error in errors), errors
        side_by_side(lambda: first.reconfigure(3, [one, two]), lambda: second.reconfigure(3, [one, two]))
        assert side_by_side(lambda: total(first), lambda: total(second)) == [3.0, 3.0]


def test_pending_ops_end_and_hooks_go_on() -> None:
    """A member that is left out learns it from its op."""
    with (
        comms.unconnected("inproc", timeout=PATIENCE) as first,
        comms.unconnected("inproc", timeout=PATIENCE) as second,
    ):
        handles = [first.handle(), second.handle()]
        side_by_side(lambda: first.reconfigure(1, handles), lambda: second.reconfigure(1, handles))
        ops, ends = list[str](), list[str]()
        first.hooks.after_op(lambda event: ops.append(f"{event.communicator} {event.op}"))
        first.hooks.on_abort(lambda end: ends.append(str(end.error)))
        pending = first.recv(torch.empty(1), 1, async_op=True)
        late = second.barrier(async_op=True)
        first.reconfigure(2, handles[:1])
        with pytest.raises(Revoked):
            pending.wait(PATIENCE)
        with pytest.raises((PeerFailed, Revoked)):
            late.wait(PATIENCE)
        first.barrier()
        assert ops[-1] == "default/2 barrier" and len(ends) == 1 and "closed" in ends[0]
        first.abort("enough")
        assert len(ends) == 2 and "enough" in ends[1]
        first.reconfigure(4, handles[:1])
        assert total(first) == 1.0


def test_a_first_member_that_does_not_come_is_named(tmp_path: Path) -> None:
    with comms.unconnected("shm") as absent, alone(tmp_path) as comm:
        with pytest.raises(comms.OpTimeout) as late:
            comm.reconfigure(1, [absent.handle(), comm.handle()], timeout=0.3)
        assert late.value.missing_ranks == (0,)
        with pytest.raises(Revoked):
            total(comm)
        comm.reconfigure(2, [comm.handle()])
        assert total(comm) == 1.0


def test_a_job_with_a_key_meets_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.comms.system.keys import create_key

    key = tmp_path / "key"
    create_key(key)
    with comms.unconnected("inproc", timeout=PATIENCE) as stranger:
        without = stranger.handle()
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    with (
        comms.unconnected("inproc", timeout=PATIENCE) as first,
        comms.unconnected("inproc", timeout=PATIENCE) as second,
    ):
        handles = [first.handle(), second.handle()]
        with pytest.raises(Mismatch, match="another job"):
            first.reconfigure(1, [*handles, without])
        side_by_side(lambda: first.reconfigure(1, handles), lambda: second.reconfigure(1, handles))
        assert side_by_side(lambda: total(first), lambda: total(second)) == [3.0, 3.0]


def test_the_store_of_a_handle_ends_with_its_communicator() -> None:
    comm = comms.unconnected("shm")
    host, _, port = json.loads(comm.handle())["at"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE):
        pass
    comm.close()
    del comm
    gc.collect()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=PATIENCE)
