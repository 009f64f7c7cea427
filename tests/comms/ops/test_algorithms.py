"""The message algorithms, for 1 to 8 ranks and any size, in threads that pass tensors through queues."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import HoldfastError, Mismatch, ReduceOp
from holdfast.comms.algorithms.message_passing import algorithms, cost
from holdfast.comms.algorithms.message_passing.exchange import Exchange
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.transport.base import Context, Link
from holdfast.comms.transport.liveness import this_process
from support.comms.meeting import run_in_threads, soon

Tensor = torch.Tensor
Mail = dict[tuple[int, int, int], queue.Queue[Tensor]]
"""A queue for each (sender, receiver, tag), made on first use."""

QUICK_TO_SEND = Link(latency=1e-9, bandwidth=1e9)
SLOW_TO_SEND = Link(latency=1.0, bandwidth=1e9)


class QueueTransport(MessageTransport):
    def __init__(self, context: Context, link: Link, mail: Mail) -> None:
        super().__init__(context, link)
        self._mail = mail
        self.sent = 0

    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> None:
        self.sent += 1
        message = tensor.detach().view(-1).view(torch.uint8).clone()
        self._mail.setdefault((self.rank, dst, tag), queue.Queue()).put(message)

    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return tensor, self._mail.setdefault((src, self.rank, tag), queue.Queue())

    def _complete(self, posted: Sequence[Any], deadline: float, op: str, seq: int) -> None:
        for each in posted:
            if each is not None:
                into, source = each
                message = source.get(timeout=max(deadline - time.monotonic(), 0.01))
                if message.nbytes != into.nbytes:
                    raise Mismatch(f"{message.nbytes} bytes came, {into.nbytes} were expected")
                into.view(-1).view(torch.uint8).copy_(message.view(-1).view(torch.uint8))

    def abort(self, error: HoldfastError) -> None: ...

    def close(self) -> None: ...


def in_ranks(size: int, body: Callable[[QueueTransport], Any]) -> list[Any]:
    """Call `body(transport)` on every rank, in threads; results by rank."""
    mail, store = Mail(), dist.HashStore()

    def run(rank: int) -> Any:
        context = Context(rank, size, "test", 0, torch.device("cpu"), store, (this_process(),) * size, soon())
        return body(QueueTransport(context, QUICK_TO_SEND if rank == 0 else SLOW_TO_SEND, mail))

    return run_in_threads(size, run, 60.0)


ALL_REDUCES = {name: getattr(algorithms, f"{name}_all_reduce") for name in ("ring", "doubling", "halving")}
REDUCTIONS = {ReduceOp.SUM: torch.sum, ReduceOp.MIN: torch.amin, ReduceOp.MAX: torch.amax}


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("size", range(2, 9))
def test_every_all_reduce_gives_equal_and_right_bits(name: str, size: int) -> None:
    """Compares bytes, also of zeros and NaNs of both signs, since 0.0 equals -0.0 and no NaN equals another."""

    def inputs(rank: int) -> list[Tensor]:
        sign, draw = 1.0 if rank in (0, 3) else -1.0, torch.Generator().manual_seed(rank)
        numbers = [torch.randn(count, generator=draw) for count in (1, 3, 8, 1001)]
        return [*numbers, torch.tensor([sign * 0.0, sign * math.nan] * 4)]

    def body(transport: QueueTransport) -> list[Tensor]:
        reduced = [(op, tensor) for op in REDUCTIONS for tensor in inputs(transport.rank)]
        for op, tensor in reduced:
            ALL_REDUCES[name](partial(transport._exchange, "all_reduce"), op, tensor, soon())
        return [tensor for _, tensor in reduced]

    everyones = list(zip(*(inputs(rank) for rank in range(size)), strict=True))
    expected = [reduce(torch.stack(each), 0) for reduce in REDUCTIONS.values() for each in everyones]
    results = in_ranks(size, body)
    for found, right in zip(results[0], expected, strict=True):
        torch.testing.assert_close(found, right, equal_nan=True)
    assert len({tuple(tensor.numpy().tobytes() for tensor in found) for found in results}) == 1


@pytest.mark.parametrize("size", range(1, 9))
def test_trees_and_gathers_are_right_from_every_root(size: int) -> None:
    def body(transport: QueueTransport) -> None:
        rank = transport.rank
        for root in range(size):
            for run in (algorithms.binomial_broadcast, algorithms.pipelined_broadcast):
                tensor = torch.full((70_000,), float(rank))
                run(transport._exchange("broadcast", soon()), tensor, root)
                assert torch.equal(tensor, torch.full((70_000,), float(root)))
            total = torch.tensor([float(rank + 1)])
            transport.reduce(total, root, ReduceOp.SUM, soon())
            assert total.item() == (size * (size + 1) / 2 if rank == root else rank + 1)
            lists = [torch.full((r + 1,), r) for r in range(size)]
            outputs = [torch.zeros_like(t) for t in lists]
            transport.gather(lists[rank], outputs if rank == root else None, root, soon())
            assert rank != root or all(map(torch.equal, outputs, lists))
            taken = torch.full((rank + 1,), -1)
            transport.scatter(taken, lists if rank == root else None, root, soon())
            assert torch.equal(taken, lists[rank])
        for gather in (algorithms.bruck_all_gather, algorithms.ring_all_gather):
            flats = [torch.full((3 * r,), float(r if r == rank else -1)) for r in range(size)]
            gather(transport._exchange("all_gather", soon()), flats)
            assert all(torch.equal(flat, torch.full((3 * r,), float(r))) for r, flat in enumerate(flats))
        transport.barrier(soon())

    in_ranks(size, body)


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint3, torch.float4_e2m1fn_x2, torch.bits8], ids=str)
def test_dtypes_that_torch_cannot_copy_are_moved_as_bytes(dtype: torch.dtype) -> None:
    def body(transport: QueueTransport) -> None:
        rank, size = transport.rank, transport.size

        def given(of: int, to: int = 0) -> Tensor:
            return torch.arange(10 * of + to, 10 * of + to + 8, dtype=torch.uint8).view(dtype)

        def taken() -> list[Tensor]:
            return [torch.zeros(8, dtype=torch.uint8).view(dtype) for _ in range(size)]

        def numbers(tensors: list[Tensor]) -> list[list[int]]:
            return [each.view(torch.uint8).tolist() for each in tensors]

        everyones = [given(of) for of in range(size)]
        for gather in (algorithms.bruck_all_gather, algorithms.ring_all_gather):
            outputs = taken()
            outputs[rank] = given(rank)
            gather(transport._exchange("all_gather", soon()), outputs)
            assert numbers(outputs) == numbers(everyones)
        outputs = taken()
        transport.all_gather(outputs, given(rank), soon())
        assert numbers(outputs) == numbers(everyones)
        outputs = taken()
        transport.all_to_all(outputs, [given(rank, to) for to in range(size)], soon())
        assert numbers(outputs) == numbers([given(of, rank) for of in range(size)])
        outputs = taken()
        transport.gather(given(rank), outputs if rank == 1 else None, 1, soon())
        assert rank != 1 or numbers(outputs) == numbers(everyones)
        for run in (algorithms.binomial_broadcast, algorithms.pipelined_broadcast):
            tensor = given(rank)
            run(transport._exchange("broadcast", soon()), tensor, 1)
            assert numbers([tensor]) == numbers([given(1)])

    in_ranks(4, body)


@given(
    size=st.integers(1, 8), count=st.integers(0, 300), op=st.sampled_from([ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG])
)
def test_reductions_of_any_size_are_right(size: int, count: int, op: ReduceOp) -> None:
    def body(transport: QueueTransport) -> tuple[Tensor, Tensor]:
        whole = (torch.arange(count) % 17 + transport.rank).double()
        part = torch.empty(count, dtype=torch.float64)
        transport.reduce_scatter(part, [whole + r for r in range(size)], op, soon())
        transport.all_reduce(whole, op, soon())
        return whole, part

    inputs = torch.stack([(torch.arange(count) % 17 + rank).double() for rank in range(size)])
    expected = {"sum": inputs.sum(0), "max": inputs.amax(0), "avg": inputs.sum(0) / size}[op.name]
    for rank, (whole, part) in enumerate(in_ranks(size, body)):
        assert torch.equal(whole, expected)
        torch.testing.assert_close(part, expected + rank * (size if op.name == "sum" else 1))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_small_tensors_take_few_messages_and_large_ones_few_bytes(size: int) -> None:
    link = Link(latency=5e-6, bandwidth=5e9)
    assert cost.choose(cost.all_reduce(link, size, 8)) == "doubling"
    assert cost.choose(cost.all_gather(link, size, 8)) in ("bruck", "ring")
    assert cost.choose(cost.broadcast(link, size, 8)) == "binomial"
    if size > 2:
        assert cost.choose(cost.all_reduce(link, size, 64 << 20)) in ("ring", "halving")
        assert cost.choose(cost.all_gather(link, size, 64 << 20)) == "ring"
        assert cost.choose(cost.broadcast(link, size, 64 << 20)) == "pipeline"


def test_the_model_counts_the_messages_that_are_sent_and_has_the_constants_of_rank_0() -> None:
    assert in_ranks(3, lambda transport: transport._link) == [QUICK_TO_SEND] * 3

    def count(run: Callable[[Exchange, Tensor], None]) -> Callable[[QueueTransport], int]:
        def body(transport: QueueTransport) -> int:
            run(transport._exchange("op", soon()), torch.ones(64))
            return transport.sent

        return body

    def all_reduced(run: Callable[..., None]) -> Callable[[Exchange, Tensor], None]:
        return lambda exchange, tensor: run(lambda deadline: exchange, ReduceOp.SUM, tensor, soon())

    assert in_ranks(8, count(all_reduced(algorithms.doubling_all_reduce))) == [3] * 8
    assert in_ranks(8, count(all_reduced(algorithms.halving_all_reduce))) == [6] * 8
    assert in_ranks(8, count(all_reduced(algorithms.ring_all_reduce))) == [14] * 8
    assert in_ranks(8, count(lambda e, t: algorithms.barrier(e))) == [3] * 8
