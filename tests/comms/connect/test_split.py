"""Communicators made of a communicator: splits, and meshes of them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.comms import Communicator, Mismatch, NotConnected, OpTimeout, PeerFailed, Revoked
from holdfast.comms.plugins.spec import AbortEvent
from holdfast.comms.system.keys import create_key
from holdfast.ft import Session, Timeouts
from holdfast.harness import LocalCluster
from support.comms.meeting import in_threads
from support.comms.ranks import MPI, on_ranks, on_ranks_of, second_tier, shared_ranks
from support.waiting import PATIENCE, PROGRAM_SECONDS


@on_ranks(2, "inproc", "shm", "gloo", *second_tier("ucx"))
def test_an_abort_ends_split_communicators(comm: Communicator) -> None:
    """Rank 0 waits in a split of two for rank 1, which never comes. Aborting the whole ends the wait."""
    with comm.split([0, 1]) as part, part.split([0, 1]) as part_of_part:
        if comm.rank == 1:
            with contextlib.suppress(Revoked, PeerFailed):
                comm.barrier()
            return
        threading.Timer(0.2, comm.abort, ["enough"]).start()
        for each in (part_of_part, part):
            with pytest.raises(Revoked, match=r"split from, is over: .*enough"):
                each.barrier(timeout=20.0)


@on_ranks(2, "inproc", "shm", "gloo", "ucx", "mpi")
def test_a_split_communicator_outlives_close_of_the_whole(comm: Communicator) -> None:
    """One rank is late, and the other waits long enough to check for failures."""
    part = comm.split([1, 0])
    comm.close()
    with part:
        if part.rank == 0:
            time.sleep(0.1)
        sum_of_ranks = torch.tensor([float(part.rank)])
        part.all_reduce(sum_of_ranks)
        assert sum_of_ranks.item() == 1.0


threads = shared_ranks(3, "inproc")


@on_ranks_of("threads")
def test_a_failure_is_translated_to_ranks_of_the_whole(comm: Communicator) -> None:
    if comm.rank == 0:
        return
    if comm.rank == 1:
        with pytest.raises(OpTimeout, match=rf"\(of '{comm.name}', rank 1 is rank 2\)") as late:
            comm.split([1, 2], timeout=0.2)
        assert late.value.missing_ranks == (1,), "the part's own number, as for all its errors"
    with comm.split([2, 1]) as part:
        mine, slow, other = PeerFailed([0], "seen there"), OpTimeout("recv", 1, 0.5, [0]), PeerFailed([2], "seen here")
        for error in (mine, slow):
            error.communicator, error.split_from = part.name, (comm.name, (2, 1))
        failed, missing = comm.in_its_ranks(mine), comm.in_its_ranks(slow)
        assert isinstance(failed, PeerFailed) and isinstance(missing, OpTimeout)
        assert failed.ranks == missing.missing_ranks == (2,)
        unknown = PeerFailed([0], "seen elsewhere")
        unknown.communicator = "another"
        assert comm.in_its_ranks(other) is other
        assert isinstance(comm.in_its_ranks(unknown), Revoked), "no rank is blamed"


@on_ranks(2, "shm")
def test_a_communicator_keeps_nothing_of_the_splits_that_were_closed(comm: Communicator) -> None:
    sizes = []
    for _ in range(3):
        for _ in range(20):
            comm.split([0, 1]).close()
        gc.collect()
        held = [value for value in vars(comm).values() if isinstance(value, dict | list | set)]
        sizes.append(sum(map(len, held)) + sum(isinstance(each, Communicator) for each in gc.get_objects()))
    assert len(set(sizes)) == 1, sizes


@on_ranks_of("threads")
def test_a_split_has_the_name_and_members_that_were_given_and_others_get_none_and_need_not_call(
    comm: Communicator,
) -> None:
    part = comm.split([2, 0], name="ends")
    assert (part is None) == (comm.rank == 1)
    if part is not None:
        with part:
            assert (part.name, part.info.name, part.info.ranks, part.rank) == ("ends", "ends", (2, 0), comm.rank == 0)
            assert total(part) == 3.0
    assert comm.split([(comm.rank + 1) % 3]) is None and comm.split(None) is None
    comm.barrier()


@on_ranks(2, "inproc")
def test_a_split_refuses_bad_names_and_ranks_and_those_that_pass_different_ones_are_told(comm: Communicator) -> None:
    for name in ("", "n" * 201, 7, comm.name):
        with pytest.raises(ValueError, match="name must be a new one, of 1 to 200 characters"):
            comm.split([0, 1], name=name)  # type: ignore[call-overload]
    for ranks in ([], [0, 0], [2], [-1]):
        with pytest.raises(ValueError, match="ranks"):
            comm.split(ranks)
    with pytest.raises(Mismatch, match=r"passes name as '[ab]', rank [01] as '[ab]'"):
        comm.split([0, 1], name="ab"[comm.rank], timeout=20.0)
    me, other = comm.rank, 1 - comm.rank
    with pytest.raises(Mismatch, match=f"rank {other} passes hint 'spins' as {other}, rank {me} as {me}"):
        comm.split([0, 1], hints={"spins": me}, timeout=20.0)
    comm.barrier()


def in_pairs(session: Session) -> list[int]:
    """Sum within pairs of ranks, then over all ranks.

    In step 5 rank 3 ends: rank 2 waits for it, rank 1 for rank 2, and rank 0 for rank 1, each in another communicator.
    """
    pair, seen = None, list[int]()
    for attempt in session.steps(10):
        with attempt:
            comm = attempt.comm
            if attempt.epoch not in seen:
                if pair is not None:
                    pair.close()
                seen.append(attempt.epoch)
                partner = comm.rank ^ 1
                pair = comm.split(sorted({comm.rank, partner})) if partner < comm.size else None
            if attempt.step == 5 and attempt.epoch == seen[0] and comm.rank in (1, 3):
                if comm.rank == 3:
                    time.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)
                comm.send(torch.zeros(1 << 20), 2)
            if pair is not None:
                pair.all_reduce(torch.ones(4))
            comm.all_reduce(torch.ones(4))
    if pair is not None:
        pair.close()
    return seen


@pytest.mark.parametrize("backend", ["shm", "gloo", *second_tier("ucx")])
def test_a_session_ends_splits_of_its_epoch_and_blames_the_right_rank(backend: str) -> None:
    """No rank waits until the timeout of an op."""
    quick = Timeouts(heartbeat=0.2, suspect=2.0, operation=60.0, rebuild=20.0, join=20.0)
    with LocalCluster(4, backend, session={"timeouts": quick, "size": 4}) as ranks:
        job = ranks.start(in_pairs)
        results, events = job.results(timeout=PROGRAM_SECONDS), job.events()
    assert [len(seen) for seen in results] == [2] * 3, "one death, one more epoch"
    assert len({member for event in events if event["kind"] == "detected" for member in event["members"]}) == 1


@on_ranks(6, "inproc")
def test_ranks_fill_the_grid_row_by_row(comm: Communicator) -> None:
    row, column = divmod(comm.rank, 3)
    with comms.mesh((2, 1, 3), ("dp", "pp", "tp"), comm) as grid:
        assert grid.shape == (2, 1, 3) and grid.names == tuple(grid) == ("dp", "pp", "tp")
        assert grid.coordinate == (row, 0, column)
        expected = (2, 2 * column + 3), (1, comm.rank), (3, 12 if row else 3)
        for axis, (name, (size, sum_of_ranks)) in enumerate(zip(grid.names, expected, strict=True)):
            assert (grid[name].rank, grid[name].size) == (grid.coordinate[axis], size)
            total = torch.tensor([float(comm.rank)])
            grid[name].all_reduce(total)
            assert total.item() == sum_of_ranks
        with pytest.raises(KeyError, match="it has dp, pp, tp"):
            grid["ep"]
    grid.close()
    with pytest.raises(Revoked, match="closed"):
        grid["tp"].barrier()
    comm.barrier()


def test_a_mesh_connects_and_closes_its_own_communicator(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    grid = comms.mesh((1, 1), ("dp", "tp"), backend="inproc", rank=0, size=1, rendezvous=meeting, timeout=20.0)
    assert grid.coordinate == (0, 0) and grid.whole.name == "default"
    grid.close()
    grid.close()
    with pytest.raises(Revoked, match="closed"):
        grid.whole.barrier()


def test_a_grid_that_does_not_fit_is_refused(comm: Communicator) -> None:
    refused: list[tuple[Any, Any, type[Exception]]] = [
        ((2, 2), ("a", "b"), ValueError),
        ((1, 1), ("a",), ValueError),
        ((1, 1), ("a", "a"), ValueError),
        ((), (), ValueError),
        ((0, 1), ("a", "b"), ValueError),
        ((1, 1), "ab", TypeError),
        ((1, 1), ("a", 2), TypeError),
        ((1.5, 1), ("a", "b"), TypeError),
    ]
    for shape, names, error in refused:
        with pytest.raises(error):
            comms.mesh(shape, names, comm)
    with pytest.raises(ValueError, match="backend"):
        comms.mesh((1,), ("a",), comm, backend="shm")
    comm.barrier()


def total(comm: Communicator) -> float:
    tensor = torch.tensor(comm.rank + 1.0)
    comm.all_reduce(tensor)
    return tensor.item()


def both(first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    """The results of two calls side by side, in threads."""
    return in_threads(2, lambda number: (first, second)[number]())


Pair = tuple[Communicator, Communicator]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two communicators of this process without members."""
    first, second = (comms.unconnected("inproc", timeout=PATIENCE) for _ in range(2))
    with first, second:
        yield first, second


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", "ucx", MPI])
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


@on_ranks(3, "inproc", "shm", "gloo", "ucx", MPI)
def test_a_suspended_communicator_holds_no_shared_memory_and_resumes_with_its_hooks(
    outer: Communicator, tmp_path: Path
) -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("holdfast" in line and "memfd" not in line for line in lines)

    for thread in threading.enumerate():
        if thread.name == "holdfast-ucx-start":
            thread.join()  # it maps memory of its own
    before, ops, place = mapped(), list[str](), f"file://{tmp_path}/meeting"
    with comms.connect(outer.backend, rank=outer.rank, size=3, rendezvous=place, name="held") as comm:
        comm.hooks.before_op(lambda op: ops.append(op.op))
        assert total(comm) == 6.0
        pending = comm.all_reduce(torch.ones(1), async_op=True)
        comm.suspend()
        pending.wait()
        assert outer.backend == "inproc" or mapped() == before
        with pytest.raises(NotConnected, match=r"'held' is suspended; call resume\(\)"):
            total(comm)
        comm.resume()
        comm.resume()
        assert (comm.rank, comm.size, total(comm)) == (outer.rank, 3, 6.0)
        comm.suspend()
    assert ops.count("all_reduce") == 3


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
    with pytest.raises(comms.BackendUnavailable):
        comms.unconnected("no_such")
    with pytest.raises(ValueError, match="unknown hint"):
        comms.unconnected("shm", hints={"no_such": 1})


def changed(handle: str, **fields: Any) -> str:
    return json.dumps({**json.loads(handle), **fields})


def test_bad_handles_change_nothing(comm: Communicator) -> None:
    ends: list[AbortEvent] = []
    comm.hooks.on_abort(ends.append)
    own = comm.handle()
    other = changed(own, number=999_999)
    bad: list[tuple[Any, type[BaseException], str]] = [
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
        ([own, changed(other, backends=["mpi"])], comms.BackendUnavailable, "no backend in common"),
        ([own, changed(other, peer={**json.loads(own)["peer"], "started": 1})], PeerFailed, "has ended"),
    ]
    for handles, error, said in bad:
        with pytest.raises(error, match=said):
            comm.reconfigure(1, handles)
        assert total(comm) == 1.0
    with pytest.raises(ValueError, match="unknown hint"):
        comm.reconfigure(1, [comm.handle()], hints={"no_such": 1})
    comm.reconfigure(1, [comm.handle()])
    with pytest.raises(comms.HoldfastError, match="uuid 1 was already used"):
        comm.reconfigure(1, [comm.handle()])
    for uuid, wrong in ((1.5, TypeError), (True, TypeError), ("", ValueError), ("u" * 201, ValueError)):
        with pytest.raises(wrong, match="uuid"):
            comm.reconfigure(uuid, [comm.handle()])  # type: ignore[arg-type]
    assert (total(comm), ends) == (1.0, [])


def test_members_that_pass_other_handles_or_hints_are_told() -> None:
    with comms.unconnected("inproc", timeout=3.0) as first, comms.unconnected("inproc", timeout=3.0) as second:
        one, two = first.handle(), second.handle()
        three = changed(two, number=999_999)
        errors = both(lambda: first.reconfigure(1, [one, two]), lambda: second.reconfigure(1, [one, three, two]))
        assert any(isinstance(error, Mismatch) for error in errors), errors
        errors = both(
            lambda: first.reconfigure(2, [one, two], hints={"spins": 1}),
            lambda: second.reconfigure(2, [one, two], hints={"spins": 2}),
        )
        assert any(isinstance(error, Mismatch) and "hint 'spins'" in str(error) for error in errors), errors
        both(lambda: first.reconfigure(3, [one, two]), lambda: second.reconfigure(3, [one, two]))
        assert both(lambda: total(first), lambda: total(second)) == [3.0, 3.0]


def test_pending_ops_end_and_hooks_go_on(pair: Pair) -> None:
    """A member that is left out learns it from its op."""
    first, second = pair
    handles = [first.handle(), second.handle()]
    both(lambda: first.reconfigure(1, handles), lambda: second.reconfigure(1, handles))
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


def test_a_first_member_that_does_not_come_is_named(comm: Communicator) -> None:
    with comms.unconnected("shm") as absent:
        with pytest.raises(comms.OpTimeout) as late:
            comm.reconfigure(1, [absent.handle(), comm.handle()], timeout=0.3)
        assert late.value.missing_ranks == (0,)
        with pytest.raises(Revoked):
            total(comm)
        comm.reconfigure(2, [comm.handle()])
        assert total(comm) == 1.0


def test_a_job_with_a_key_meets_under_it(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with comms.unconnected("inproc", timeout=PATIENCE) as stranger:
        without = stranger.handle()
    create_key(tmp_path / "key")
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(tmp_path / "key"))
    first, second = pair
    handles = [first.handle(), second.handle()]
    with pytest.raises(Mismatch, match="another job"):
        first.reconfigure(1, [*handles, without])
    both(lambda: first.reconfigure(1, handles), lambda: second.reconfigure(1, handles))
    assert both(lambda: total(first), lambda: total(second)) == [3.0, 3.0]


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
