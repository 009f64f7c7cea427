"""Checks of every collective that moves data, and of the guarantees of all; reductions are in `reductions`.

Fixtures: `ranks`, a cluster over the backend that is checked; `backend`, its name.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.comms import Communicator, Mismatch, OpTimeout, Recv, ReduceOp, Revoked, Send, Unsupported
from holdfast.comms.errors import ConcurrentCall
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import moves, on_each_rank
from holdfast.harness.conformance.reductions import COUNTS, values


@on_each_rank
def test_tensors_of_any_shape_and_strides(comm: Communicator) -> None:
    scale = comm.size * (comm.size + 1) // 2
    scalar = torch.tensor(float(comm.rank + 1))
    comm.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == scale
    for shape in ((3, 4), (2, 3, 4), (1, 2, 3, 4, 5), (50, 60, 20)):
        base = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        transposed = (base * (comm.rank + 1)).transpose(0, -1)
        comm.all_reduce(transposed)
        assert torch.equal(transposed, (base * scale).transpose(0, -1))
    sparse_columns = torch.ones(6, 6)
    comm.all_reduce(sparse_columns[:, ::2])
    assert sparse_columns.sum().item() == 18 + 18 * comm.size
    parameter = torch.nn.Parameter(torch.ones(5))
    comm.all_reduce(parameter)
    assert torch.equal(parameter.detach(), torch.full((5,), float(comm.size)))


@on_each_rank
def test_broadcast(comm: Communicator) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64):
        if not moves(comm.backend, dtype):
            continue
        for count in COUNTS:
            for src in range(comm.size):
                tensor = values(comm.rank, count, torch.float32).to(dtype)
                comm.broadcast(tensor, src)
                expected = values(src, count, torch.float32).to(dtype)
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@on_each_rank
def test_all_gather_single_and_in_lists(comm: Communicator) -> None:
    for count in COUNTS:
        mine = values(comm.rank, count, torch.int32)
        rows = [values(r, count, torch.int32) for r in range(comm.size)]
        output = torch.empty(count * comm.size, dtype=torch.int32)
        comm.all_gather_single(output, mine)
        assert torch.equal(output, torch.cat(rows))
        outputs = [torch.empty(count, dtype=torch.int32) for _ in rows]
        comm.all_gather(outputs, mine)
        assert all(torch.equal(a, b) for a, b in zip(outputs, rows, strict=True))


@on_each_rank
def test_all_gather_of_uneven_shapes(comm: Communicator) -> None:
    for unit in (0, 1, 7, 30_000):
        outputs = [torch.empty(r * unit, 2) for r in range(comm.size)]
        comm.all_gather(outputs, torch.full((comm.rank * unit, 2), float(comm.rank)))
        for r, output in enumerate(outputs):
            assert torch.equal(output, torch.full((r * unit, 2), float(r)))


@on_each_rank
def test_all_gather_in_place(comm: Communicator) -> None:
    for count in (4, 40_000):
        output = torch.zeros(comm.size, count)
        output[comm.rank] = comm.rank + 1
        comm.all_gather_single(output, output[comm.rank])
        assert torch.equal(output, torch.arange(1.0, comm.size + 1)[:, None].expand(-1, count))


@on_each_rank
def test_all_to_all_in_lists_and_splits(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    for unit in (0, 1, 9, 20_000):
        inputs = [torch.full(((me + j) * unit,), float(10 * me + j)) for j in range(n)]
        outputs = [torch.empty((me + j) * unit) for j in range(n)]
        comm.all_to_all(outputs, inputs)
        for j, output in enumerate(outputs):
            assert torch.equal(output, torch.full_like(output, 10.0 * j + me))
        single = torch.empty(sum(o.numel() for o in outputs), 3)
        splits = [o.numel() for o in outputs]
        given = torch.cat(inputs)[:, None].expand(-1, 3)
        comm.all_to_all_single(single, given, splits, [i.numel() for i in inputs])
        assert torch.equal(single, torch.cat(outputs)[:, None].expand(-1, 3))
    even = torch.empty(2 * n, dtype=torch.int64)
    comm.all_to_all_single(even, torch.arange(2 * n) + 100 * me)
    assert even.tolist() == [100 * j + 2 * me + k for j in range(n) for k in range(2)]


@on_each_rank
def test_gather_and_scatter(comm: Communicator) -> None:
    for unit in (0, 1, 30_000):
        for root in range(comm.size):
            mine = torch.full(((comm.rank + 1) * unit,), comm.rank, dtype=torch.int16)
            lists = [torch.full(((r + 1) * unit,), r, dtype=torch.int16) for r in range(comm.size)]
            outputs = [torch.full_like(t, -1) for t in lists] if comm.rank == root else None
            comm.gather(mine, outputs, root)
            assert outputs is None or all(map(torch.equal, outputs, lists))
            taken = torch.full_like(mine, -1)
            comm.scatter(taken, lists if comm.rank == root else None, root)
            assert torch.equal(taken, mine)


@on_each_rank
def test_send_and_recv_around_a_ring(comm: Communicator) -> None:
    if comm.size == 1:
        return
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in COUNTS:
        mine, theirs = torch.full((count,), float(comm.rank)), torch.empty(count)
        comm.batch_send_recv([Send(mine, right), Recv(theirs, left)])
        assert torch.equal(theirs, torch.full((count,), float(left)))
        if comm.rank == 0:
            comm.send(mine, 1, tag=3)
        if comm.rank == 1:
            comm.recv(theirs, 0, tag=3)
            assert torch.equal(theirs, torch.zeros(count))


@on_each_rank
def test_messages_are_taken_by_tag_whatever_their_order(comm: Communicator) -> None:
    if comm.size == 1:
        return
    if comm.rank == 0:
        comm.batch_send_recv([Send(torch.tensor([10 * tag]), 1, tag) for tag in (1, 2, 3)])
    if comm.rank == 1:
        for tag in (3, 1, 2):
            got = torch.zeros(1, dtype=torch.int64)
            comm.recv(got, 0, tag)
            assert got.item() == 10 * tag
    if comm.rank == 0:
        comm.batch_send_recv([Send(torch.full((5000,), float(i)), 1) for i in range(20)])
    if comm.rank == 1:
        many = [torch.empty(5000) for _ in range(20)]
        comm.batch_send_recv([Recv(each, 0) for each in many])
        assert [each[0].item() for each in many] == list(range(20))


@on_each_rank
def test_asynchronous_ops_run_in_the_order_issued(comm: Communicator) -> None:
    tensor = torch.ones(10)
    works = [comm.all_reduce(tensor, async_op=True) for _ in range(5)]
    comm.all_reduce(tensor)
    assert all(work.done() for work in works) and works[0].exception() is None
    for work in works:
        work.wait(timeout=1.0)
    assert torch.equal(tensor, torch.full((10,), float(comm.size**6)))
    comm.all_reduce(torch.ones(3), async_op=True)
    comm.barrier()


@on_each_rank
def test_objects_travel_without_pickle(comm: Communicator) -> None:
    sent = {"rank": comm.rank, "list": [1, 2.5, None, "x" * comm.rank * 1000], "bytes": b"\0\1"}
    assert comm.broadcast_object(sent if comm.rank == 0 else None, 0)["rank"] == 0
    everyone = comm.all_gather_object(sent)
    assert [each["rank"] for each in everyone] == list(range(comm.size))
    with pytest.raises(TypeError, match="never as pickle"):
        comm.all_gather_object(object())
    comm.barrier()


@on_each_rank
def test_objects_from_and_to_one_rank(comm: Communicator) -> None:
    for root in range(comm.size):
        sent = {"rank": comm.rank, "text": "x" * 1000 * comm.rank}
        gathered = comm.gather_object(sent, root)
        ranks_of = None if gathered is None else [each["rank"] for each in gathered]
        assert ranks_of == (list(range(comm.size)) if comm.rank == root else None)
        parts = [[root, r, "y" * r] for r in range(comm.size)] if comm.rank == root else None
        assert comm.scatter_object(parts, root) == [root, comm.rank, "y" * comm.rank]
        assert comm.scatter_object(parts, root, async_op=True).wait() == [root, comm.rank, "y" * comm.rank]
    if comm.rank == 0 and comm.size > 1:
        comm.send_object({"a": 1}, 1, tag=4)
        comm.send_object({"b": None}, 1, tag=3, async_op=True).wait()
    if comm.rank == 1:
        later = comm.recv_object(0, tag=4, async_op=True)
        assert comm.recv_object(0, tag=3) == {"b": None} and later.wait() == {"a": 1}
    comm.barrier()


@on_each_rank
def test_an_object_that_cannot_travel_is_refused_where_it_is_awaited(comm: Communicator) -> None:
    last = comm.size - 1
    if comm.rank in (0, last):
        with pytest.raises(TypeError, match="never as pickle"):
            comm.gather_object(object() if comm.rank == last else 1, 0)
    else:
        comm.gather_object(1, 0)
    bad: list[object] = [1] * last + [object()]
    if comm.rank in (0, last):
        with pytest.raises(TypeError, match="never as pickle"):
            comm.scatter_object(bad if comm.rank == 0 else None, 0)
    else:
        assert comm.scatter_object(None, 0) == 1
    if comm.size > 1 and comm.rank < 2:
        with pytest.raises(TypeError, match="never as pickle"):
            comm.send_object(object(), 1) if comm.rank == 0 else comm.recv_object(0)
    comm.barrier()
    assert comm.over is None


@on_each_rank
def test_split_makes_a_communicator_of_some_ranks(comm: Communicator) -> None:
    mine = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    with comm.split(mine) as part:
        assert part.size == len(mine) and mine[part.rank] == comm.rank
        total = torch.tensor([float(comm.rank)])
        part.all_reduce(total)
        assert total.item() == sum(mine)
    comm.barrier()


@on_each_rank
def test_bad_arguments_are_refused_before_anything_moves(comm: Communicator) -> None:
    one = torch.ones(4)
    for_itself = [int(rank == comm.rank) for rank in range(comm.size)]
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: comm.broadcast(one, comm.size)),
        (ValueError, lambda: comm.broadcast(one, -1)),
        (ValueError, lambda: comm.reduce(one, comm.size)),
        (ValueError, lambda: comm.send(one, comm.rank)),
        (ValueError, lambda: comm.recv(one, comm.size)),
        (ValueError, lambda: comm.barrier(timeout=math.nan)),
        (ValueError, lambda: comm.barrier(timeout=math.inf)),
        (ValueError, lambda: comm.all_gather_single(torch.empty(4 * comm.size + 1), one)),
        (ValueError, lambda: comm.all_gather_single(torch.empty(4 * comm.size, dtype=torch.int64), one)),
        (ValueError, lambda: comm.reduce_scatter_single(one, torch.ones(4 * comm.size + 1))),
        (ValueError, lambda: comm.all_gather([one] * (comm.size + 1), one)),
        (ValueError, lambda: comm.split([comm.size])),
        (ValueError, lambda: comm.all_to_all_single(one, one, [5] * comm.size, [5] * comm.size)),
        (ValueError, lambda: comm.all_to_all_single(one, one[:1], [4 * n for n in for_itself], for_itself)),
        (TypeError, lambda: comm.barrier(timeout="5")),  # type: ignore[arg-type]
        (TypeError, lambda: comm.all_reduce([1.0])),  # type: ignore[arg-type]
        (TypeError, lambda: comm.all_reduce(one, "sum")),  # type: ignore[arg-type]
        (Unsupported, lambda: comm.all_reduce(one, ReduceOp.BXOR)),
        (Unsupported, lambda: comm.all_reduce(torch.empty(4, dtype=torch.float8_e8m0fnu))),
        (Unsupported, lambda: comm.all_reduce(one.to(torch.complex64), ReduceOp.MAX)),
        (Unsupported, lambda: comm.all_reduce(one.to_sparse(), ReduceOp.MAX)),
        (ValueError, lambda: comm.scatter_object([1] * (comm.size + 1), comm.rank)),
        (ValueError, lambda: comm.send_object(1, comm.rank)),
        (Unsupported, lambda: comm.all_reduce(torch.ones(2), ReduceOp.PRODUCT, reproducible=True)),
    ]
    other = (comm.rank + 1) % comm.size
    tags: list[tuple[type[Exception], Any]] = [
        *((ValueError, tag) for tag in (-1, 1 << 30, 1 << 32)),
        (TypeError, 0.5),
    ]
    for error, tag in tags:
        refused += [
            (error, partial(comm.send, one, other, tag)),
            (error, partial(comm.recv, one, other, tag)),
            (error, partial(comm.batch_send_recv, [Send(one, other, tag)])),
            (error, partial(comm.batch_send_recv, [Recv(one, other, tag)])),
        ]
    before = comm.progress
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert comm.progress == before and comm.over is None
    assert torch.equal(one, torch.ones(4))
    comm.all_reduce(one)
    assert torch.equal(one, torch.full((4,), float(comm.size)))


@on_each_rank
def test_a_closed_communicator_says_so(comm: Communicator) -> None:
    comm.barrier()
    comm.close()
    comm.close()
    with pytest.raises(Revoked, match="closed"):
        comm.all_reduce(torch.ones(1))
    with pytest.raises(Revoked):
        comm.barrier(async_op=True).wait()


def test_disagreement_is_named_on_every_rank(backend: str) -> None:
    """Every rank gets the same message: what differs, which rank is odd, and what the others call."""

    def body(comm: Communicator, case: str) -> str:
        odd = comm.rank == 1
        with pytest.raises(Mismatch) as caught:
            if case == "op" and odd:
                comm.broadcast(torch.ones(4), 0)
            else:
                tensor = torch.ones(
                    5 if case == "shape" and odd else 4,
                    dtype=torch.float64 if case == "dtype" and odd else torch.float32,
                )
                if case == "root":
                    comm.broadcast(tensor, comm.rank)
                else:
                    comm.all_reduce(tensor, ReduceOp.MAX if case == "reduction" and odd else ReduceOp.SUM)
        with pytest.raises(Revoked):
            comm.barrier()
        return str(caught.value)

    for size, cases in ((3, ("op", "shape", "dtype", "reduction")), (2, ("root",))):
        with LocalCluster(size, backend) as cluster:
            for case in cases:
                messages = cluster.run(body, case)
                assert len(set(messages)) == 1, case
                assert "rank 1" in messages[0] and "rank 0" in messages[0], case


def test_two_threads_that_race_for_order_are_told(backend: str, tmp_path: Path) -> None:
    def body(comm: Communicator, meeting: str) -> bool:
        store = dist.FileStore(meeting, -1)
        if comm.rank == 1:
            store.wait(["told"])
            comm.barrier()
            return True
        thread = threading.Thread(target=comm.barrier)
        thread.start()
        told = False
        while thread.is_alive() and not told:
            time.sleep(0.01)
            try:
                comm.all_reduce(torch.ones(1))
            except ConcurrentCall:
                told = True
            except Mismatch:
                pass
        store.set("told", "1")
        thread.join()
        return told

    with LocalCluster(2, backend) as cluster:
        assert cluster.run(body, str(tmp_path / "meeting")) == [True, True]


def test_a_message_that_does_not_come_is_missed_from_its_sender(backend: str, tmp_path: Path) -> None:
    def body(comm: Communicator, meeting: str) -> tuple[int, ...]:
        store = dist.FileStore(meeting, -1)
        if comm.rank != 1:
            store.wait(["told"])
            return ()
        with pytest.raises(OpTimeout) as caught:
            comm.recv(torch.ones(1), 2, timeout=0.3)
        store.set("told", "1")
        return caught.value.missing_ranks

    with LocalCluster(3, backend) as cluster:
        assert cluster.run(body, str(tmp_path / "meeting")) == [(), (2,), ()]
