"""Hooks around ops and at the abort, and callbacks of a work: each is called once, and in its time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, Recv, ReduceOp, Send, Work
from holdfast.comms.hooks import OpLog, check_finite, compare_checksums
from holdfast.comms.plugins.spec import AbortEvent, OpEvent
from support.comms.meeting import run_in_threads
from support.comms.ranks import on_ranks, on_ranks_of, shared_ranks

ranks = shared_ranks(2, "inproc", "shm", checks="0", timeout=30.0)  # ops without hooks take the fast paths


@on_ranks_of("ranks")
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


def complain(event: OpEvent) -> None:
    raise ArithmeticError(f"at {event.op}")


@on_ranks_of("ranks")
def test_every_begun_op_ends_once_with_its_time_and_its_error_though_a_hook_raises_too(comm: Communicator) -> None:
    begun: list[int] = []
    ended: list[OpEvent] = []
    comm.hooks.before_op(lambda event: begun.append(event.seq))
    comm.hooks.after_op(ended.append)
    comm.all_reduce(torch.ones(4))
    comm.hooks.after_op(complain)
    with pytest.raises(comms.HoldfastError) as caught:  # the other rank's abort may come first
        comm.recv(torch.ones(1), 1 - comm.rank, timeout=0.05)
    assert begun == [event.seq for event in ended]
    assert ended[0].error is None and ended[0].seconds > 0
    assert type(ended[1].error) in (type(caught.value), comms.OpTimeout)


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks_of("ranks")
def test_an_op_that_a_hook_refuses_is_issued_again_and_later_complete(comm: Communicator, asynchronous: bool) -> None:
    tensor, before, ended = torch.ones(4), comm.progress[0], list[OpEvent]()
    failed = pytest.raises(ArithmeticError, match="at all_reduce")
    if comm.rank == 0:
        with comm.hooks.after_op(ended.append), comm.hooks.before_op(complain), failed:
            comm.all_reduce(tensor, async_op=asynchronous)
        assert [type(event.error) for event in ended] == [ArithmeticError]
    comm.all_reduce(tensor, async_op=asynchronous).wait()
    assert comm.progress[0] == before + 1 and comm.over is None and torch.equal(tensor, torch.full((4,), 2.0))
    with contextlib.ExitStack() as hooks:
        if comm.rank == 0:
            for each in (comm.hooks.after_op(complain), comm.hooks.after_op(ended.append), failed):
                hooks.enter_context(each)
        comm.all_reduce(tensor, async_op=asynchronous).wait()
    assert len(ended) == (2 if comm.rank == 0 else 0), "one hook's error does not keep the op from the others"
    assert comm.over is None and torch.equal(tensor, torch.full((4,), 4.0))
    comm.barrier()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@on_ranks_of("ranks")
def test_numbers_that_are_not_finite_are_named_with_op_rank_and_tensor(comm: Communicator, bad: float) -> None:
    with check_finite(comm):
        tensor = torch.ones(8)
        comm.all_reduce(tensor)
        if comm.rank == 1:
            tensor[3] = bad
        with pytest.raises(comms.NonFinite) as caught:
            comm.all_reduce(tensor)
        error = caught.value
        assert (error.op, error.rank, error.nans + error.infinities) == ("all_reduce", comm.rank, 1)
        assert error.tensor == ("input" if comm.rank == 1 else "output")
        outputs = [torch.empty(8) for _ in range(comm.size)]
        with pytest.raises(comms.NonFinite, match=r"its input" if comm.rank == 1 else r"its outputs\[1\]"):
            comm.all_gather(outputs, torch.full((8,), bad if comm.rank == 1 else 1.0))
    comm.all_reduce(tensor)
    assert comm.over is None


@on_ranks(3, "inproc")
def test_results_that_differ_between_ranks_name_the_odd_rank(comm: Communicator) -> None:
    numbers = torch.full((2, 4), 1 + 2j)
    conjugate = numbers.conj() if comm.rank == 0 else numbers.conj().resolve_conj()
    with compare_checksums(comm):
        for view in (conjugate, numbers.conj().imag, numbers[:, ::4]):
            comm.all_reduce(view, ReduceOp.AVG)
        assert bool((conjugate == 1 - 2j).all()), "its checksum is of its numbers, whether torch has put off the sign"
        same = torch.ones(1000)
        comm.all_reduce(same)
        comm.broadcast(same, 1)
        comm.barrier()

        def corrupt(event: OpEvent) -> None:
            event.outputs[0][17] += comm.rank == 2

        comm.hooks.added.after = (corrupt, *comm.hooks.added.after)
        with pytest.raises(comms.CorruptData, match=r"all_reduce.*ranks \[2\] than on rank 0"):
            comm.all_reduce(same)
    assert comm.over is None


@on_ranks_of("ranks")
def test_the_log_names_ops_that_had_not_ended(comm: Communicator) -> None:
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
    assert isinstance(work.exception(), comms.Revoked)
    logging.getLogger("holdfast.comms").removeHandler(handler)
    assert [op.op for op in log.leaked] == ["recv"]
    (message,) = [message for message in messages if f"on rank {comm.rank} " in message]
    assert "recv (op" in message and "8 bytes" in message


class Gate:
    """An asynchronous op that runs until `open`."""

    def __init__(self, comm: Communicator) -> None:
        self._go, self._begun = threading.Event(), threading.Event()
        self.work: Work = comm.issue("gated", 0, self._wait, None, async_op=True)
        assert self._begun.wait(20.0)

    def _wait(self, deadline: float) -> None:
        self._begun.set()
        assert self._go.wait(20.0)

    def open(self) -> None:
        self._go.set()
        self.work.wait()


def test_the_thread_that_completes_a_work_calls_back_and_a_failed_one_has_its_error(comm: Communicator) -> None:
    def fail(deadline: float) -> None:
        raise comms.PeerFailed((0,), "for this test")

    def call(work: Work) -> None:
        calls.append((work, work.done(), type(work.exception()), threading.current_thread().name))

    done, calls, called = comm.all_reduce(torch.ones(2)), list[tuple[object, ...]](), threading.Event()
    gate = Gate(comm)
    failing = comm.issue("failing", 0, fail, None, async_op=True)
    for each in (gate.work, gate.work, failing):
        each.add_done_callback(call)
    failing.add_done_callback(lambda work: called.set())
    assert not calls
    gate.open()
    assert called.wait(20.0)
    ends = [(gate.work, type(None))] * 2 + [(failing, comms.PeerFailed)]
    assert calls == [(work, True, error, f"holdfast-ops-{comm.name}") for work, error in ends]
    for number, work in enumerate((gate.work, done)):
        work.add_done_callback(call)
        assert len(calls) == 4 + number and calls[-1][3] == threading.current_thread().name, "it is done: at once"


def test_what_a_callback_raises_is_logged_and_keeps_no_other_from_its_call(
    comm: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    def exits(argument: object) -> None:
        raise SystemExit("for this test")

    gate, called = Gate(comm), threading.Event()
    gate.work.add_done_callback(exits)
    gate.work.add_done_callback(lambda work: called.set())
    with caplog.at_level(logging.ERROR, "holdfast.comms"):
        gate.open()
        assert called.wait(20.0)
        comm.all_reduce(torch.ones(2), async_op=True).wait()  # the worker goes on
        comm.hooks.on_abort(exits)
        comm.abort("for this test")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [SystemExit, SystemExit]


def test_a_callback_is_called_once_when_work_and_caller_race() -> None:
    for _ in range(300):
        work, calls, start = Work("op"), list[Work](), threading.Barrier(3)

        complete, add = partial(work.run, lambda: None), partial(work.add_done_callback, calls.append)

        def race(number: int, start: threading.Barrier = start, acts: Sequence[Any] = (complete, add, add)) -> None:
            start.wait()
            acts[number]()

        run_in_threads(3, race, None)
        assert calls == [work, work]


def test_an_abort_calls_back_once_with_the_first_reason(comm: Communicator) -> None:
    reasons: list[str] = []

    def again(event: AbortEvent) -> None:
        reasons.append(str(event.error))
        comm.abort("from a hook")
        comm.hooks.on_abort(lambda late: reasons.append(f"late: {late.error}"))

    comm.hooks.on_abort(again)
    comm.abort("the first")
    comm.abort("the second")
    comm.close()
    first = f"{comm.over}"
    assert "the first" in first and reasons == [first, f"late: {first}"]


def test_an_abort_callback_may_wait_for_a_thread_that_aborts(comm: Communicator) -> None:
    def abort_in_a_thread(event: AbortEvent) -> None:
        thread = threading.Thread(target=comm.abort)
        thread.start()
        thread.join(20.0)
        ended.append(not thread.is_alive())

    ended: list[bool] = []
    part = comm.split([0])
    for each in (comm, part):
        each.hooks.on_abort(abort_in_a_thread)
    comm.abort()
    part.close()
    assert ended == [True, True]


def test_a_close_is_no_abort(comm: Communicator) -> None:
    ends: list[AbortEvent] = []
    comm.hooks.on_abort(ends.append)
    comm.close()
    comm.abort()
    comm.hooks.on_abort(ends.append)
    assert ends == []


@on_ranks_of("ranks")
def test_a_failed_op_and_the_end_of_the_whole_call_back(comm: Communicator) -> None:
    ends: list[AbortEvent] = []
    with comm.split([0, 1]) as part:
        for each in (comm, part):
            each.hooks.on_abort(ends.append)
        if comm.rank == 0:
            with pytest.raises(comms.OpTimeout):
                comm.barrier(timeout=0.2)
        else:
            with pytest.raises(comms.HoldfastError):
                comm.recv(torch.empty(1), 0)
        assert [type(end.error) for end in ends] == [comms.Revoked] * 2
