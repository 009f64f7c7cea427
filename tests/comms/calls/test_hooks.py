"""Hooks on one communicator: what they see, what their errors do, and the ones that are shipped."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, CorruptData, NonFinite, Recv, ReduceOp, Revoked, Send
from holdfast.comms.hooks import OpLog, check_finite, compare_checksums
from holdfast.comms.plugins.spec import OpEvent
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import on_each_rank


@pytest.fixture(scope="module", params=["inproc", "shm"])
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CHECK", "0")  # ops without hooks then take the fast paths
        with LocalCluster(2, request.param, timeout=30.0) as cluster:
            yield cluster


@on_each_rank
def test_hooks_see_the_tensors_root_and_reduction_of_each_op(comm: Communicator) -> None:
    seen: list[OpEvent] = []
    mine, both = torch.full((4,), comm.rank + 1.0), torch.zeros(8)
    comm.all_reduce(torch.ones(4))
    with comm.hooks.before_op(seen.append):
        comm.all_reduce(mine, ReduceOp.MAX)
        comm.all_gather_single(both, mine)
        comm.broadcast(mine, 1)
        comm.batch_send_recv([Send(mine, 1 - comm.rank), Recv(both[:4], 1 - comm.rank)])
        comm.barrier(async_op=True).wait()
    comm.barrier()
    reduce, gather, broadcast, batch, barrier = seen
    assert (reduce.op, reduce.reduction, reduce.nbytes, reduce.root) == ("all_reduce", ReduceOp.MAX, 16, -1)
    assert reduce.inputs[0].data_ptr() == reduce.outputs[0].data_ptr() == mine.data_ptr()
    assert gather.inputs[0].data_ptr() == mine.data_ptr() and gather.outputs[0].data_ptr() == both.data_ptr()
    assert broadcast.root == 1 and len(broadcast.inputs) == comm.rank and len(broadcast.outputs) == 1
    assert len(batch.inputs) == len(batch.outputs) == 1
    assert barrier.async_op and [event.seq - reduce.seq for event in seen] == [0, 1, 2, 3, 4]


@on_each_rank
def test_every_begun_op_ends_once_with_its_time_and_its_error(comm: Communicator) -> None:
    begun: list[int] = []
    ended: list[OpEvent] = []
    comm.hooks.before_op(lambda event: begun.append(event.seq))
    comm.hooks.after_op(ended.append)
    comm.all_reduce(torch.ones(4))
    with pytest.raises(comms.HoldfastError) as caught:  # the other rank's abort may come first
        comm.recv(torch.ones(1), 1 - comm.rank, timeout=0.05)
    assert begun == [event.seq for event in ended]
    assert ended[0].error is None and ended[0].seconds > 0
    assert type(ended[1].error) in (type(caught.value), comms.OpTimeout)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_op_that_a_hook_refuses_is_issued_again(ranks: LocalCluster, asynchronous: bool) -> None:
    def body(comm: Communicator) -> None:
        def refuse(event: OpEvent) -> None:
            raise ArithmeticError(f"not {event.op}")

        tensor = torch.ones(4)
        if comm.rank == 0:
            ended: list[OpEvent] = []
            refused = pytest.raises(ArithmeticError, match="not all_reduce")
            with comm.hooks.after_op(ended.append), comm.hooks.before_op(refuse), refused:
                comm.all_reduce(tensor, async_op=asynchronous)
            assert [type(event.error) for event in ended] == [ArithmeticError]
        before = comm.progress
        comm.all_reduce(tensor, async_op=asynchronous).wait()
        assert comm.progress[0] == before[0] + 1 and comm.over is None
        assert torch.equal(tensor, torch.full((4,), 2.0))
        comm.barrier()

    ranks.run(body)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_op_whose_later_hook_raises_fails_with_it_and_is_complete(ranks: LocalCluster, asynchronous: bool) -> None:
    def body(comm: Communicator) -> None:
        def complain(event: OpEvent) -> None:
            raise ArithmeticError(f"after {event.op}")

        tensor, called = torch.ones(4), list[int]()
        if comm.rank == 0:
            failed = pytest.raises(ArithmeticError, match="after all_reduce")
            with comm.hooks.after_op(complain), comm.hooks.after_op(lambda event: called.append(event.seq)), failed:
                comm.all_reduce(tensor, async_op=asynchronous).wait()
            assert len(called) == 1, "one hook's error does not keep the op from the others"
        else:
            comm.all_reduce(tensor)
        assert comm.over is None and torch.equal(tensor, torch.full((4,), 2.0))
        comm.barrier()

    ranks.run(body)


@on_each_rank
def test_a_failed_op_keeps_its_error_when_a_hook_raises_too(comm: Communicator) -> None:
    def complain(event: OpEvent) -> None:
        raise ArithmeticError("a hook's")

    comm.hooks.after_op(complain)
    with pytest.raises(comms.HoldfastError):
        comm.recv(torch.ones(1), 1 - comm.rank, timeout=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named_with_op_rank_and_tensor(ranks: LocalCluster, bad: float) -> None:
    def body(comm: Communicator) -> None:
        with check_finite(comm):
            tensor = torch.ones(8)
            comm.all_reduce(tensor)
            if comm.rank == 1:
                tensor[3] = bad
            with pytest.raises(NonFinite) as caught:
                comm.all_reduce(tensor)
            error = caught.value
            assert (error.op, error.rank, error.nans + error.infinities) == ("all_reduce", comm.rank, 1)
            assert error.tensor == ("input" if comm.rank == 1 else "output")
            outputs = [torch.empty(8) for _ in range(comm.size)]
            with pytest.raises(NonFinite, match=r"its input" if comm.rank == 1 else r"its outputs\[1\]"):
                comm.all_gather(outputs, torch.full((8,), bad if comm.rank == 1 else 1.0))
        comm.all_reduce(tensor)
        assert comm.over is None

    ranks.run(body)


def test_results_that_differ_between_ranks_name_the_odd_rank() -> None:
    def body(comm: Communicator) -> None:
        with compare_checksums(comm):
            same = torch.ones(1000)
            comm.all_reduce(same)
            comm.broadcast(same, 1)
            comm.barrier()

            def corrupt(event: OpEvent) -> None:
                event.outputs[0][17] += comm.rank == 2

            comm.hooks._after = (corrupt, *comm.hooks._after)
            with pytest.raises(CorruptData, match=r"all_reduce.*ranks \[2\] than on rank 0"):
                comm.all_reduce(same)
        assert comm.over is None

    with LocalCluster(3, "inproc") as cluster:
        cluster.run(body)


def test_the_log_names_ops_that_had_not_ended(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> tuple[list[str], list[str]]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("holdfast.comms").addHandler(handler)
        log = OpLog(comm)
        comm.all_reduce(torch.ones(4))
        comm.barrier()
        assert [op.op for op in log.entries] == ["all_reduce", "barrier"] and not log.running
        work = comm.recv(torch.ones(2), 1 - comm.rank, async_op=True)
        assert [op.op for op in log.running] == ["recv"]
        comm.close()
        assert isinstance(work.exception(), Revoked)
        logging.getLogger("holdfast.comms").removeHandler(handler)
        return [op.op for op in log.leaked], [m for m in messages if f"on rank {comm.rank} " in m]

    for leaked, messages in ranks.run(body):
        assert leaked == ["recv"]
        assert len(messages) == 1 and "recv (op" in messages[0] and "8 bytes" in messages[0]
