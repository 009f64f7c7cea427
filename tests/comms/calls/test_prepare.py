"""`comm.prepare(op, ...)`: a handle of one op that is started many times, for less than a plain call costs."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, PreparedOp, Recv, ReduceOp, Revoked, Send, Unsupported, UsedAfterFork, Work
from holdfast.comms.collectives import PREPARABLE
from holdfast.comms.plugins.registry import registry
from holdfast.harness import LocalCluster
from holdfast.harness.cli.app import app
from holdfast.harness.conformance.helpers import on_each_rank
from support.source_tree import ROOT

RANKS = 2


@pytest.fixture(
    scope="module",
    params=["inproc", "shm", "gloo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ucx", "mpi"))],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    environment = {"HOLDFAST_CHECK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CHECK", "0")
        with LocalCluster(RANKS, str(request.param), timeout=60.0, environ=environment) as cluster:
            cluster.run(Communicator.barrier)
            yield cluster


def arguments(op: str, rank: int) -> tuple[list[Any], Callable[[], list[list[float]]]]:
    """Arguments of an op on rank `rank` of two, and a function that returns what their tensors hold."""
    mine, whole = torch.arange(4.0) + rank, torch.zeros(8)
    parts, other = [torch.zeros(2), torch.zeros(2)], 1 - rank
    given = {
        "all_reduce": [mine, ReduceOp.MAX],
        "reduce": [mine, 1],
        "reduce_scatter": [parts[0], [mine[:2], mine[2:]]],
        "reduce_scatter_single": [parts[0], mine, ReduceOp.MIN],
        "broadcast": [mine, 1],
        "all_gather": [parts, mine[1:3]],
        "all_gather_single": [whole, mine],
        "all_to_all": [parts, [mine[:2], mine[2:]]],
        "all_to_all_single": [whole[:4], mine],
        "gather": [mine[:2], parts if rank == 0 else None, 0],
        "scatter": [parts[0], [mine[:2], mine[2:]] if rank == 0 else None, 0],
        "barrier": [],
        "send": [mine, other],
        "recv": [whole[:4], other],
        "batch_send_recv": [[Send(mine, other), Recv(whole[:4], other)]],
    }
    return given[op], lambda: [each.tolist() for each in (mine, whole, *parts)]


@on_each_rank
def test_a_prepared_op_does_what_the_plain_call_does(comm: Communicator) -> None:
    for op in PREPARABLE:
        if op in ("send", "recv"):
            op = ("send", "recv")[comm.rank]
        args, plain = arguments(op, comm.rank)
        getattr(comm, op)(*args)
        for start in ({}, {"timeout": 30.0}, {"async_op": True}):
            args, prepared = arguments(op, comm.rank)
            handle = comm.prepare(op, *args)
            work = handle.start(**start) if start else handle()
            work.wait()
            assert isinstance(work, Work) and prepared() == plain(), op


@on_each_rank
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


@on_each_rank
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


def alone(body: Callable[[Communicator], None], backend: str = "inproc") -> None:
    with LocalCluster(1, backend, environ={"HOLDFAST_CHECK": "0"}) as cluster:
        cluster.run(body)


def test_bad_arguments_are_refused_by_prepare_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECK", "0")

    def body(comm: Communicator) -> None:
        tensor = torch.ones(2)
        refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (ValueError, "there is no such op; there are all_reduce", lambda: comm.prepare("allreduce", tensor)),
            (
                TypeError,
                "async_op and timeout belong to each start",
                lambda: comm.prepare("barrier", timeout=1, async_op=True),
            ),
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

    alone(body)


def python_calls(call: Callable[[], object]) -> int:
    """The number of Python functions that `call` enters once it has run before."""
    call()
    entered = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def test_a_start_costs_less_than_the_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A usual op enters no Python at all; the others check nothing again."""
    monkeypatch.setenv("HOLDFAST_CHECK", "0")

    def body(comm: Communicator) -> None:
        usual: dict[str, list[Any]] = {"all_reduce": [torch.ones(2)], "broadcast": [torch.ones(2), 0], "barrier": []}
        for op, args in usual.items():
            assert python_calls(comm.prepare(op, *args)) == 0 < python_calls(partial(getattr(comm, op), *args))
        tensor, output = torch.ones(2), [torch.ones(2)]
        plain = python_calls(lambda: comm.gather(tensor, output, 0))
        assert python_calls(comm.prepare("gather", tensor, output, 0)) < plain

    alone(body)


def test_a_forked_child_cannot_start_the_ops_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECK", "0")

    def body(comm: Communicator) -> None:
        handle: PreparedOp = comm.prepare("barrier")
        handle()
        if (child := os.fork()) == 0:
            try:
                handle()
            except UsedAfterFork:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        handle()

    alone(body)


def test_a_handle_follows_its_communicator_through_reconfigure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECK", "0")

    def body(comm: Communicator) -> None:
        tensor = torch.ones(2)
        handles = [comm.prepare("all_reduce", tensor), comm.prepare("reduce", tensor, 0), comm.prepare("barrier")]
        for handle in handles:
            handle()
        comm.reconfigure("again", [comm.handle()])
        for number, handle in enumerate(handles, 1):
            handle()
            assert comm.progress == (number, False)

    alone(body, "shm")


GROUPS = tomllib.loads((ROOT / "docs/reference/compared.toml").read_text())["group"]
ROWS = [row for group in GROUPS for row in group["rows"]]
COLUMNS = {"what", "holdfast", "torchcomms", "c10d", "mpi4py", "nccl", "nixl"}
HOMES = {
    "comms": "holdfast.comms",
    "ft": "holdfast.ft",
    "hooks": "holdfast.comms.hooks",
    "quantised": "holdfast.comms.quantised",
    "spec": "holdfast.comms.plugins.spec",
}


def names() -> Iterator[str]:
    """Every name in the column of holdfast."""
    for row in ROWS:
        if not row["holdfast"].startswith("Unsupported: "):
            yield from row["holdfast"].split(", ")


def find(name: str) -> Any:
    """The object of a name: `Class.method` of holdfast.comms, or `module.name`; a backend, or a command."""
    first, _, rest = name.partition(" ")
    if first == "backend":
        return registry().backend(rest)
    if first == "command":
        return next(
            each for each in app.registered_commands if rest in (each.name, each.callback and each.callback.__name__)
        )
    first, _, rest = name.partition(".")
    if first in HOMES:
        return getattr(importlib.import_module(HOMES[first]), rest)
    place = getattr(comms, first, None) or getattr(importlib.import_module("holdfast.comms.hooks"), first)
    if rest and not hasattr(place, rest):  # an attribute that __init__ sets
        source = "".join(inspect.getsource(kind) for kind in place.__mro__[:-1])
        assert re.search(rf"^        self\.{rest}\b.* = ", source, re.M), name
        return rest
    return getattr(place, rest) if rest else place


@pytest.mark.parametrize("name", sorted(set(names())))
def test_each_name_of_holdfast_is_there(name: str) -> None:
    assert find(name) is not None


def test_every_row_has_holdfasts_column_and_no_unknown_one() -> None:
    for row in ROWS:
        assert {"what", "holdfast"} <= set(row) <= COLUMNS, row


def test_every_op_of_a_communicator_is_compared() -> None:
    ops = {f"Communicator.{name}" for name in PREPARABLE}
    assert not ops - set(names()), "add them to docs/reference/compared.toml"
