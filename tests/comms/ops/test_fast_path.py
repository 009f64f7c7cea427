"""Frequent ops take the fast path into compiled code, all others the slow path, with equal results.

`comm.prepare(op, ...)` gives a handle of one op that is started many times, for less than a plain call costs.
"""

from __future__ import annotations

import random
import sys
import time
import tomllib
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import comms, ft
from holdfast.comms import Communicator, OpTimeout, PreparedOp, ReduceOp, Revoked, Unsupported, Work, hooks, quantised
from holdfast.comms._native import FastPath, OpCall, Order
from holdfast.comms.collectives import PREPARABLE
from holdfast.comms.plugins import spec
from holdfast.comms.plugins.registry import registry
from holdfast.comms.tensors.packing import DTYPES
from holdfast.comms.work import DONE
from holdfast.harness import LocalCluster
from holdfast.harness.cli.app import app
from support.comms.collectives import COLLECTIVES, collective
from support.comms.python_calls import functions_entered
from support.comms.ranks import on_ranks_of, second_tier, shared_ranks
from support.source_tree import ROOT
from support.waiting import becomes_true

OPS = ("all_reduce", "reduce_scatter_single", "broadcast", "all_gather_single", "all_to_all_single", "barrier")
RANKS = 3
ranks = shared_ranks(RANKS, "inproc", "shm", "gloo", "ucx", "mpi", checks="0")


def perform(comm: Communicator, op: str, count: int, usual: bool, turn: int = 0) -> None:
    """`usual`: by the fast path."""
    call = collective(op, comm.rank, comm.size, count, turn % comm.size, turn, torch.int64)
    call.run(comm, timeout=None if usual else 30.0)


def run_program(comm: Communicator, program: list[tuple[str, int, int, int]]) -> None:
    """Run each op; bits of `usual` select ranks that use the fast path, `late` is the late rank (-1: none)."""
    comm.barrier(timeout=10.0)
    begun = comm.progress[0]
    for turn, (op, count, usual, late) in enumerate(program):
        if late == comm.rank:
            time.sleep(0.02)
        perform(comm, op, count, bool(usual >> comm.rank & 1), turn)
    assert comm.progress == (begun + len(program), False)


programs = st.lists(
    st.tuples(
        st.sampled_from(OPS),
        st.sampled_from([0, 1, 10, 11, 700, 6_000, 30_000]),  # ten floats fit on the cache line of their op
        st.integers(0, 2**RANKS - 1),
        st.integers(-1, RANKS),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15)
@given(program=programs)
def test_ranks_may_mix_the_fast_and_the_slow_path_and_be_late(
    ranks: LocalCluster, program: list[tuple[str, int, int, int]]
) -> None:
    ranks.run(run_program, program)


@on_ranks_of("ranks")
def test_unusual_calls_take_the_slow_path(comm: Communicator) -> None:
    """All ranks make the same calls, so none is left waiting."""
    fast = comm._fast
    assert isinstance(fast, FastPath)
    assert (comm.transport.board is not None) == (comm.backend in ("inproc", "shm"))
    plain = torch.ones(6)
    taken = [
        fast.all_reduce(torch.ones(2, 6)[:, ::2], ReduceOp.SUM, False),
        fast.all_reduce(torch.ones(2, requires_grad=True), ReduceOp.SUM, False),
        fast.all_reduce(plain, "sum", False),
        fast.all_reduce([1.0], ReduceOp.SUM, False),
        fast.all_reduce(torch.ones(2, dtype=torch.complex64), ReduceOp.SUM, False),
        fast.all_reduce(torch.ones(2), ReduceOp.BXOR, False),
        fast.reduce_scatter(torch.ones(3), plain, ReduceOp.SUM, False),
        fast.reduce_scatter(torch.ones(2, dtype=torch.int64), plain, ReduceOp.SUM, False),
        fast.all_gather(torch.ones(5), plain, False),
        fast.all_gather(torch.ones(18, dtype=torch.float64), plain, False),
        fast.all_to_all(torch.ones(4), torch.ones(4), False),
        fast.all_to_all(torch.ones(3), plain, False),
        fast.broadcast(plain, comm.size, False),
        fast.broadcast(plain, -1, False),
        fast.broadcast(plain, 1 << 80, False),
        fast.broadcast(plain, True, False),
        fast.broadcast(None, 0, False),
    ]
    comm.barrier()
    assert not any(taken)


@on_ranks_of("ranks")
def test_both_paths_give_the_same_bits_for_every_dtype(comm: Communicator) -> None:
    scaled = ReduceOp.premul_sum(torch.tensor([comm.rank + 1.0]))
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.premul_sum(2.0), scaled):
            if dtype == torch.bool and op.name in ("avg", "premul_sum"):
                continue
            if op.name == "premul_sum" and not dtype.is_floating_point:
                continue
            quick = torch.tensor([comm.rank, 1, 0]).to(dtype)
            slow = quick.clone()
            comm.all_reduce(quick, op)
            comm.all_reduce(slow, op, timeout=30.0)
            assert torch.equal(quick, slow), (dtype, op)


SIBLINGS = [
    dtype
    for dtype in DTYPES
    if dtype.itemsize == 1 and not str(dtype).startswith(("torch.q", "torch.bits")) and dtype != torch.float4_e2m1fn_x2
]
"""Dtypes between which a tensor's bytes can be viewed; DLPack gives several of them one code."""


def told(act: Callable[[], object], output: torch.Tensor) -> object:
    """The bytes that an op gives, or the type of the error that it raises."""
    try:
        act()
    except (TypeError, ValueError, Unsupported) as error:
        return type(error)
    return output.view(torch.uint8).tolist()


@on_ranks_of("ranks")
def test_no_dtype_is_taken_for_another_whatever_ran_before(comm: Communicator) -> None:
    """Both paths refuse the same dtypes, also after an op on another view of the same bytes."""
    draw, size = random.Random(3), comm.size
    program = [(op, dtype, dtype) for op in OPS for dtype in SIBLINGS]
    draw.shuffle(program)
    program += [(draw.choice(OPS), draw.choice(SIBLINGS), draw.choice(SIBLINGS)) for _ in range(300)]
    for turn, (op, first, second) in enumerate(program):
        results = []
        for timeout in (None, 30.0):  # the fast path, then the slow one
            mine = torch.arange(size * 4, dtype=torch.uint8).add_(turn % 3 + comm.rank).view(first)
            part = torch.zeros(4, dtype=torch.uint8).view(second)
            whole = torch.zeros(size * size * 4, dtype=torch.uint8).view(second)
            arguments, output = {
                "all_reduce": ((mine, ReduceOp.MAX), mine),
                "reduce_scatter_single": ((part, mine, ReduceOp.MAX), part),
                "broadcast": ((mine, 0), mine),
                "all_gather_single": ((whole, mine), whole),
                "all_to_all_single": ((whole[: size * 4], mine), whole),
                "barrier": ((), part),
            }[op]
            results.append(told(partial(getattr(comm, op), *arguments, timeout=timeout), output))
        assert results[0] == results[1], (op, first, second)


@pytest.mark.parametrize("ranks", ["shm", "gloo", "ucx"], indirect=True)
@on_ranks_of("ranks")
def test_a_timeout_in_the_fast_path_names_the_op_as_in_the_slow_path(whole: Communicator) -> None:
    whole._executor.timeout = 2.0
    if whole.rank > 1:
        return
    with whole.split([0, 1], timeout=10.0) as comm:
        comm.barrier()
        for _ in range(3):
            perform(comm, "all_reduce", 1, True)
        begun = comm.progress[0]
        if comm.rank == 0:
            time.sleep(4.0)
            return
        with pytest.raises(OpTimeout) as caught:
            comm.all_reduce(torch.ones(1))
        assert comm.over is not None and comm.progress == (begun + 1, False)
        assert (caught.value.op, caught.value.seq - begun) == ("all_reduce", 1)
        assert list(caught.value.missing_ranks) in ([0], []), "gloo does not know"


class _RecordingJournal:
    """A recorder that is its own journal, and keeps all calls."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def journal(self, name: str, epoch: int, rank: int, size: int, backend: str) -> _RecordingJournal:
        return self

    def enter(self, op: str, seq: int, nbytes: int, about: Any, detail: Hashable, peer: int) -> None:
        shape = None if about is None else tuple(about.shape)
        self.lines.append((op, seq, nbytes, shape, detail, peer))

    def leave(self, error: BaseException | None) -> None:
        self.lines.append(("left", type(error).__name__))

    def waits(self, ranks: Sequence[int], gives: Sequence[int] = (), rounds: int = 0) -> None:
        """Do nothing."""


@on_ranks_of("ranks")
def test_both_paths_make_the_same_journal_calls(comm: Communicator) -> None:
    log = _RecordingJournal()
    comm._recorder = log
    with comm.split(range(comm.size)) as part:
        told = []
        for usual, late in product((True, False), (True, False)):
            log.lines.clear()
            for turn, op in enumerate(OPS):
                if late and turn % comm.size == comm.rank:
                    time.sleep(0.02)
                perform(part, op, 3, usual, turn)
            told.append([(line[0], *line[2:]) for line in log.lines])
            first = log.lines[0][1]
            assert isinstance(first, int)
            assert [line[1] for line in log.lines[::2]] == list(range(first, first + len(OPS)))
            assert log.lines[1::2] == [("left", "NoneType")] * len(OPS)
        assert all(each == told[0] for each in told)


@pytest.mark.parametrize("ranks", ["shm", "gloo"], indirect=True)
@on_ranks_of("ranks")
def test_the_journal_gets_the_error_that_ended_an_op(whole: Communicator) -> None:
    if whole.rank > 1:
        return
    log = _RecordingJournal()
    with whole.split([0, 1], timeout=30.0) as comm:
        comm._recorder = log
        part = comm.split([0, 1])
        part.barrier()
        if part.rank == 0:
            with ThreadPoolExecutor(1) as other:
                other.submit(lambda: becomes_true(lambda: len(log.lines) == 5) and part.abort("enough"))
                with pytest.raises(Revoked):
                    part.all_reduce(torch.ones(1))
        comm.barrier()
        part.close()
    assert [line[-1] for line in log.lines[3::2]] == ["NoneType", "Revoked"][: 2 - part.rank]


@on_ranks_of("ranks")
def test_an_op_does_not_overtake_those_before_it(comm: Communicator) -> None:
    for turn in range(20):
        value = torch.tensor([1])
        work = comm.all_reduce(value, async_op=True)
        comm.all_reduce(value)
        work.wait()
        assert value.item() == comm.size**2, turn


def function_path(plan: Callable[..., Any], failed: Callable[..., Any] = print) -> tuple[FastPath, Order]:
    order = Order()
    return FastPath(0, 2, order, plan, registry(), None, 5.0, failed, (1, 0), None, DONE), order


def test_an_op_is_planned_once_and_called_with_a_deadline() -> None:
    """An asynchronous op has a plan of its own, and the work of its function."""
    asked: list[tuple[object, ...]] = []
    called: list[tuple[torch.Tensor, float]] = []
    work = Work("all_reduce")

    def plan(*form: object) -> Callable[[torch.Tensor, float], Work | None]:
        asked.append(form)
        return lambda tensor, deadline: called.append((tensor, deadline)) or (work if form[-1] else None)

    tensor, began = torch.ones(3), time.monotonic()
    fast, order = function_path(plan)
    for _ in range(2):
        assert fast.all_reduce(tensor, ReduceOp.SUM, True) is work
        assert fast.all_reduce(tensor, ReduceOp.SUM, False) is DONE
    assert fast.all_reduce(torch.ones(4), ReduceOp.SUM, False) and fast.all_reduce(tensor, ReduceOp.MAX, False)
    assert [(form[0], form[-1]) for form in asked] == [("all_reduce", True)] + [("all_reduce", False)] * 3
    assert called[0][0] is tensor and began <= called[0][1] - 5.0 <= time.monotonic()
    assert (order.seq, order.joint, order.busy) == (6, 6, False)


def test_the_fast_path_raises_the_error_of_its_failure_callback_and_one_of_planning() -> None:
    def fails(deadline: float) -> None:
        raise ConnectionError("cut")

    def failed(op: str, seq: int, joint: int, error: BaseException) -> None:
        raise RuntimeError(f"{op} {seq} {joint}: {error}") from error

    fast, order = function_path(lambda *form: fails, failed)
    with pytest.raises(RuntimeError, match="barrier 1 1: cut") as caught:
        fast.barrier(False)
    assert isinstance(caught.value.__cause__, ConnectionError) and not order.busy

    def interrupted(*form: object) -> None:
        raise KeyboardInterrupt  # by a signal's handler: no other call would raise it again

    fast, order = function_path(interrupted)
    for op in (partial(fast.barrier, False), partial(fast.broadcast, torch.ones(2), 0, False)) * 2:
        with pytest.raises(KeyboardInterrupt):
            op()
    assert (order.seq, order.busy) == (0, False)


def test_the_fast_path_does_nothing_where_no_op_may_run_and_for_an_op_without_a_plan() -> None:
    for shut in ("over", "queued"):
        fast, order = function_path(pytest.fail)
        setattr(order, shut, True)
        assert not fast.barrier(False)
    fast, order = function_path(pytest.fail)
    for _ in range(2):
        with order as entered:
            assert entered and order.busy and not fast.barrier(False)
            with order as again:
                assert not again
            assert order.busy
        assert not order.busy
    assert order.seq == 0
    fast, order = function_path(lambda *form: None)
    assert not fast.barrier(False) and (order.seq, order.busy) == (0, False)


class Library:
    """A fake library of others: its op doubles a tensor, and is complete after `late` polls."""

    def __init__(self, late: int = 0, stage: bytearray | None = None) -> None:
        self.late, self.begin_fails, self.poll_fails = late, False, False
        self.begun, self.finished = list[tuple[object, ...]](), list[tuple[Any, ...]]()
        self._stage = stage
        self.call: Any = OpCall(self._start, self._is_complete, self._finish_late, 3, stage)

    def _start(self, tensor: torch.Tensor, deadline: float) -> object:
        self.begun.append((tensor, deadline))
        if self.begin_fails:
            raise RuntimeError("cut")
        on = tensor.detach() if self._stage is None else torch.frombuffer(self._stage, dtype=torch.float32)
        self._polled, self._double = 0, lambda: on.mul_(2)
        return "request"

    def _is_complete(self, request: str) -> bool:
        assert request == "request"
        if self.poll_fails:
            raise RuntimeError("cut")
        self._polled += 1
        if self._polled > self.late:
            self._double()
        return self._polled > self.late

    def _finish_late(self, *arguments: Any) -> None:
        self.finished.append(arguments)
        if arguments[1] is not None:
            raise Revoked(3, "explained") from arguments[1]
        while not self._is_complete(arguments[0]):
            pass


@pytest.fixture(params=[False, True], ids=["direct", "staged"])
def stage(request: pytest.FixtureRequest) -> bytearray | None:
    return bytearray(12) if request.param else None


def test_a_call_of_a_library_is_polled_and_finished_by_the_slow_path(stage: bytearray | None) -> None:
    for late in (0, 1, 2, 5):
        library = Library(late, stage=stage)
        for needs_grad in (False, True):
            tensor = torch.full((3,), 2.0, requires_grad=needs_grad)
            assert library.call(tensor, 5.0) is None
            assert tensor.tolist() == [4.0] * 3
        assert library.begun[-1][0] is tensor and library.begun[-1][1] == 5.0
        assert [each[:2] + each[3:] for each in library.finished] == [("request", None, 5.0)] * (2 if late == 5 else 0)
        assert late < 5 or library.finished[-1][2] is tensor


def test_a_failed_call_is_explained_by_the_slow_path(stage: bytearray | None) -> None:
    for moment in ("begin_fails", "poll_fails"):
        library, tensor = Library(stage=stage), torch.ones(3)
        setattr(library, moment, True)
        with pytest.raises(Revoked, match="explained") as caught:
            library.call(tensor, 0.0)
        assert str(caught.value.__cause__) == "cut" and tensor.tolist() == [1.0] * 3
        assert library.finished[0][0] == (None if moment == "begin_fails" else "request")


def test_what_an_op_accesses_is_kept_until_it_is_complete_and_what_is_no_failure_of_its_library_is_passed_on() -> None:
    under_way: list[object] = []
    kept: list[int] = []

    def start(tensor: torch.Tensor, deadline: float) -> str:
        under_way.append(tensor)
        return "request"

    def is_complete(request: str) -> bool:
        kept.append(len(under_way))
        return True

    def interrupted(*arguments: object) -> Any:
        raise KeyboardInterrupt

    OpCall(start, is_complete, pytest.fail, under_way=under_way)(torch.ones(1), 0.0)
    assert kept == [1] and not under_way
    assert OpCall(lambda *arguments: None, pytest.fail, pytest.fail)(0.0) is None, "complete at once"
    with pytest.raises(KeyboardInterrupt):
        OpCall(interrupted, pytest.fail, pytest.fail)(0.0)
    with pytest.raises(KeyboardInterrupt):
        OpCall(start, interrupted, pytest.fail, under_way=under_way)(torch.ones(1), 0.0)
    assert len(under_way) == 1, "the library may still write there"
    OpCall(start, lambda request: False, lambda *late: None, under_way=under_way)(torch.ones(1), 0.0)
    assert not under_way


def test_a_staged_call_takes_tensors_of_its_size_only() -> None:
    library = Library(stage=bytearray(12))
    for wrong in (torch.ones(2), torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(0)):
        with pytest.raises(ValueError, match=f"the tensor has {wrong.nbytes} bytes, and the call was prepared for 12"):
            library.call(wrong, 0.0)
    with pytest.raises(TypeError):
        library.call("no tensor", 0.0)
    with pytest.raises(IndexError):
        library.call()
    assert not library.begun
    with pytest.raises(BufferError):
        OpCall(print, print, print, stage=bytes(12))  # type: ignore[arg-type]
    held = sys.getrefcount(library)
    for _ in range(10):
        with pytest.raises(TypeError):
            OpCall(library, library, library, library)  # type: ignore[arg-type]
    assert sys.getrefcount(library) == held


two_unchecked_ranks = shared_ranks(2, "inproc", "shm", "gloo", *second_tier("ucx", "mpi"), checks="0")


@on_ranks_of("two_unchecked_ranks")
def test_a_prepared_op_does_what_the_plain_call_does(comm: Communicator) -> None:
    assert set(PREPARABLE) == {*COLLECTIVES, "send", "recv"}
    numbers, got = torch.arange(4.0) + comm.rank, torch.zeros(4)
    message = ("send", numbers, 1) if comm.rank == 0 else ("recv", got, 0)
    for start in (
        PreparedOp.__call__,
        partial(PreparedOp.start, timeout=30.0),
        partial(PreparedOp.start, async_op=True),
    ):
        for op in COLLECTIVES:
            call, as_it_was = (collective(op, comm.rank, 2, 4, root=1) for _ in range(2))
            work = start(comm.prepare(op, *call.arguments))
            work.wait()
            assert isinstance(work, Work)
            call.check()
            assert all(map(torch.equal, call.inputs, as_it_was.inputs)), op
        start(comm.prepare(*message)).wait()
        assert comm.rank == 0 or got.tolist() == [0, 1, 2, 3]
        largest, least = numbers.clone(), torch.empty(2)
        start(comm.prepare("all_reduce", largest, ReduceOp.MAX)).wait()
        start(comm.prepare("reduce_scatter_single", least, numbers, ReduceOp.MIN)).wait()
        assert largest.tolist() == [1, 2, 3, 4] and least.tolist() == [[0, 1], [2, 3]][comm.rank]
        got.zero_()


@on_ranks_of("two_unchecked_ranks")
def test_it_runs_on_the_tensor_as_it_is_then(comm: Communicator) -> None:
    tensor = torch.ones(2)
    summed, gathered = comm.prepare("all_reduce", tensor), comm.prepare("reduce", tensor, dst=0)
    for count in (2, 3, 3, 1000):
        tensor.resize_(count)
        for options in ({}, {"timeout": 30.0}):
            tensor.fill_(1.0)
            summed.start(**options)
            assert tensor.tolist() == [2.0] * count
            gathered.start(**options)
            assert tensor.tolist() == [4.0 if comm.rank == 0 else 2.0] * count
    tensor.untyped_storage().resize_(0)
    for handle in (summed, gathered):
        with pytest.raises(Unsupported, match="freed or resized"):
            handle()
    comm.barrier()


@on_ranks_of("two_unchecked_ranks")
def test_a_handle_of_a_communicator_that_is_over_raises_as_its_ops_do(comm: Communicator) -> None:
    for end in (Communicator.close, Communicator.abort):
        with comm.split([0, 1]) as part:
            handles = [part.prepare("barrier"), part.prepare("reduce", torch.ones(1), 0)]
            end(part)
            for handle in handles:
                for options in ({}, {"async_op": True}):
                    with pytest.raises(Revoked):
                        handle.start(**options)
            with pytest.raises(Revoked):
                part.prepare("barrier")()
        comm.barrier()


alone = shared_ranks(1, "inproc", checks="0")
alone_and_unchecked = on_ranks_of("alone")


@alone_and_unchecked
def test_bad_arguments_are_refused_by_prepare_itself(comm: Communicator) -> None:
    tensor = torch.ones(2)
    refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "there is no such op; there are all_reduce", lambda: comm.prepare("allreduce", tensor)),
        (TypeError, "async_op and timeout belong to each", lambda: comm.prepare("barrier", timeout=1, async_op=True)),
        (TypeError, "missing a required argument: 'src'", lambda: comm.prepare("broadcast", tensor)),
        (TypeError, "unexpected keyword argument 'root'", lambda: comm.prepare("broadcast", tensor, 0, root=0)),
        (TypeError, "expected a tensor, not str", lambda: comm.prepare("all_reduce", "tensor")),
        (ValueError, "src=5 is out of range", lambda: comm.prepare("broadcast", tensor, 5)),
        (TypeError, "op must be a", lambda: comm.prepare("all_reduce", tensor, op="sum")),
        (TypeError, "takes at most 2 arguments|unexpected keyword", lambda: comm.prepare("barrier").start(tag=1)),  # type: ignore[call-arg]
    ]
    for kind, message, call in refusals:
        with pytest.raises(kind, match=message):
            call()
    assert comm.progress == (0, False)


@alone_and_unchecked
def test_a_start_costs_less_than_the_plain_call(comm: Communicator) -> None:
    """A usual op enters no Python at all; the others check nothing again."""
    gathers = [torch.ones(2), [torch.ones(2)], 0]
    usual: dict[str, list[Any]] = {"all_reduce": [torch.ones(2)], "broadcast": [torch.ones(2), 0], "barrier": []}
    for op, arguments in {**usual, "gather": gathers}.items():
        plain, prepared = partial(getattr(comm, op), *arguments), comm.prepare(op, *arguments)
        plain(), prepared()  # what is made once is made
        assert len(functions_entered(prepared)) < len(functions_entered(plain))
        assert op not in usual or functions_entered(prepared) == []


@alone_and_unchecked
def test_a_handle_follows_its_communicator_through_reconfigure(comm: Communicator) -> None:
    tensor = torch.ones(2)
    handles = [comm.prepare("all_reduce", tensor), comm.prepare("reduce", tensor, 0), comm.prepare("barrier")]
    for handle in handles:
        handle()
    comm.reconfigure("again", [comm.handle()])
    for number, handle in enumerate(handles, 1):
        handle()
        assert comm.progress == (number, False)


def test_each_name_in_the_comparison_of_libraries_is_there_and_each_op_is_compared(comm: Communicator) -> None:
    groups = tomllib.loads((ROOT / "docs/reference/compared.toml").read_text())["group"]
    places = SimpleNamespace(**{**vars(hooks), **vars(comms)}, comms=comms, ft=ft, spec=spec)
    places.quantised, places.Communicator, places.Work = quantised, comm, Work("all_reduce")
    commands = {each.name or (each.callback and each.callback.__name__) for each in app.registered_commands}
    named: set[str] = set()
    for row in (row for group in groups for row in group["rows"]):
        assert {"what", "holdfast"} <= set(row) <= {"what", "holdfast", "torchcomms", "c10d", "mpi4py", "nccl", "nixl"}
        if not row["holdfast"].startswith("Unsupported: "):
            named.update(row["holdfast"].split(", "))
    for name in sorted(named):
        kind, _, rest = name.partition(" ")
        if rest:
            assert rest in commands if kind == "command" else registry().backend(rest), name
        else:
            attrgetter(name)(places)
    assert {f"Communicator.{op}" for op in PREPARABLE} <= named, "add them to docs/reference/compared.toml"
