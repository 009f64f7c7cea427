"""`comm.prepare(op, ...)`: a handle of one op that is started many times, for less than a plain call costs."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, PreparedOp, ReduceOp, Revoked, Unsupported, UsedAfterFork, Work
from holdfast.comms.collectives import PREPARABLE
from holdfast.comms.plugins.registry import registry
from holdfast.harness.cli.app import app
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import on_ranks, on_ranks_of, second_tier, shared_ranks
from support.source_tree import ROOT

ranks = shared_ranks(2, "inproc", "shm", "gloo", *second_tier("ucx", "mpi"), checks="0")


@on_ranks_of("ranks")
def test_a_prepared_op_does_what_the_plain_call_does(comm: Communicator) -> None:
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


def test_every_op_can_be_prepared() -> None:
    assert set(PREPARABLE) == {*COLLECTIVES, "send", "recv"}


@on_ranks_of("ranks")
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


@on_ranks_of("ranks")
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


alone_and_unchecked = on_ranks(1, "inproc", checks="0")


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


@alone_and_unchecked
def test_a_start_costs_less_than_the_plain_call(comm: Communicator) -> None:
    """A usual op enters no Python at all; the others check nothing again."""
    usual: dict[str, list[Any]] = {"all_reduce": [torch.ones(2)], "broadcast": [torch.ones(2), 0], "barrier": []}
    for op, args in usual.items():
        assert python_calls(comm.prepare(op, *args)) == 0 < python_calls(partial(getattr(comm, op), *args))
    tensor, output = torch.ones(2), [torch.ones(2)]
    plain = python_calls(lambda: comm.gather(tensor, output, 0))
    assert python_calls(comm.prepare("gather", tensor, output, 0)) < plain


@alone_and_unchecked
def test_a_forked_child_cannot_start_the_ops_of_its_parent(comm: Communicator) -> None:
    handle = comm.prepare("barrier")
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


@on_ranks(1, "shm", checks="0")
def test_a_handle_follows_its_communicator_through_reconfigure(comm: Communicator) -> None:
    tensor = torch.ones(2)
    handles = [comm.prepare("all_reduce", tensor), comm.prepare("reduce", tensor, 0), comm.prepare("barrier")]
    for handle in handles:
        handle()
    comm.reconfigure("again", [comm.handle()])
    for number, handle in enumerate(handles, 1):
        handle()
        assert comm.progress == (number, False)


COLUMNS = {"what", "holdfast", "torchcomms", "c10d", "mpi4py", "nccl", "nixl"}
HOMES = {
    "comms": "holdfast.comms",
    "ft": "holdfast.ft",
    "hooks": "holdfast.comms.hooks",
    "quantised": "holdfast.comms.quantised",
    "spec": "holdfast.comms.plugins.spec",
}


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


def test_each_name_in_the_comparison_of_libraries_is_there_and_each_op_is_compared() -> None:
    groups = tomllib.loads((ROOT / "docs/reference/compared.toml").read_text())["group"]
    named: set[str] = set()
    for row in (row for group in groups for row in group["rows"]):
        assert {"what", "holdfast"} <= set(row) <= COLUMNS, row
        if not row["holdfast"].startswith("Unsupported: "):
            named.update(row["holdfast"].split(", "))
    for name in sorted(named):
        assert find(name) is not None, name
    assert {f"Communicator.{op}" for op in PREPARABLE} <= named, "add them to docs/reference/compared.toml"
