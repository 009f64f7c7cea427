"""Every form of calling a process group has the same results and errors over holdfast as over plain gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.comms.errors import Unsupported
from holdfast.harness import LocalCluster
from support.comms.torch_groups import in_group, on_each_rank_of, shared_groups

Tensor = torch.Tensor
Arguments = dict[str, Any]
Form = tuple[str, Callable[[int], Arguments], int]
"""A method ("send recv": of two ranks), its arguments on a rank, and how many of them are passed by position."""

MAX, BROADCAST = dist.ReduceOp.MAX, dist.BroadcastOptions
SECONDS = timedelta(seconds=9)
VALUED = {"allreduce", "allreduce_coalesced", "broadcast", "allgather", "allgather_coalesced", "gather", "scatter"}
"""Methods whose future holds what they fill; over gloo that of others holds its own buffers, or there is none."""
i32 = torch.int32


def t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def z(count: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def sparse(*places: int) -> Tensor:
    """Ones at some places of four."""
    return torch.sparse_coo_tensor(torch.tensor([places]), torch.ones(len(places)), (4,), check_invariants=True)


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def lists(outputs: Any, inputs: Any, **more: Any) -> Arguments:
    return {"output_tensors": outputs, "input_tensors": inputs, **more}


def single(output: Any, given: Any, **more: Any) -> Arguments:
    return {"output": output, "input": given, **more}


def shaped(output: Any, given: Any, **more: Any) -> Arguments:
    return {"outputTensor": output, "inputTensor": given, **more}


def coalesced(outputs: Any, inputs: Any) -> Arguments:
    return {"outputs": outputs, "inputs": inputs}


def by_max() -> Any:
    return options(dist.ReduceScatterOptions, reduceOp=MAX)


def root(kind: Any, rank: int) -> Any:
    return options(kind, rootRank=rank)


# The first argument is what a call fills; that of a reduce, where `filled_on` says.
METHODS: dict[str, dict[str, Callable[[int], Arguments]]] = {
    "allreduce": {
        "of two sizes": lambda r: {"tensors": [t(1), t(1, 2)]},
        "of two shapes": lambda r: {"tensors": [t(1, 2), t(1, 2).view(2, 1)]},
        "of two dtypes": lambda r: {"tensors": [t(1), z(1, torch.int64)]},
        "of nothing": lambda r: {"tensors": []},
        "of nothing at all": lambda r: {"tensors": None},
        "of numbers": lambda r: {"tensors": [1], "op": [10]},
        "with another op's options": lambda r: {"tensors": [t(1)], "opts": dist.BroadcastOptions()},
        "with a number as op": lambda r: {"tensors": [t(1)], "op": 3},
        "with options": lambda r: {"tensors": [t(r)], "opts": options(dist.AllreduceOptions, reduceOp=MAX)},
        "with op": lambda r: {"tensors": [t(r)], "op": MAX},
        "with op and timeout": lambda r: {"tensors": [t(r)], "op": MAX, "timeout": SECONDS},
        "with a kind of op": lambda r: {"tensors": [t(r)], "op": dist.ReduceOp.RedOpType.MAX},
        "by a name that is none": lambda r: {"input": t(1)},
        "of a tensor": lambda r: {"tensor": t(1 + r)},
        "of a tensor with timeout": lambda r: {"tensor": t(1 + r), "timeout": SECONDS},
        "of a tensor with op": lambda r: {"tensor": t(1 + r), "op": MAX},
        "of a tensor with op and timeout": lambda r: {"tensor": t(1 + r), "op": MAX, "timeout": SECONDS},
        "of a sparse tensor": lambda r: {"tensors": [sparse(r, 3)]},
        "of a sparse tensor by max": lambda r: {"tensors": [sparse(r)], "op": MAX},
    },
    "allreduce_coalesced": {
        "": lambda r: {"tensors": [t(r), t(1, 2)]},
        "by max": lambda r: {"tensors": [t(r)], "opts": options(dist.AllreduceCoalescedOptions, reduceOp=MAX)},
        "of nothing": lambda r: {"tensors": []},
    },
    "broadcast": {
        "of nothing": lambda r: {"tensors": []},
        "of two dtypes": lambda r: {"tensors": [t(1), z(1, torch.int64)]},
        "of two sizes": lambda r: {"tensors": [t(1), t(1, 2)]},
        "of a list without options": lambda r: {"tensors": [t(1 + r)]},
        "of a list with a root": lambda r: {"tensors": [t(1 + r)], "root": 1},
        "of a tensor without a root": lambda r: {"tensor": t(1 + r)},
        "of a tensor": lambda r: {"tensor": t(1 + r), "root": 1},
        "of a tensor with timeout": lambda r: {"tensor": t(1 + r), "root": 1, "timeout": SECONDS},
        "with rootRank=1": lambda r: {"tensors": [t(1 + r)], "opts": options(BROADCAST, rootRank=1)},
        "with rootRank=5": lambda r: {"tensors": [t(1 + r)], "opts": options(BROADCAST, rootRank=5)},
        "with rootRank=-1": lambda r: {"tensors": [t(1 + r)], "opts": options(BROADCAST, rootRank=-1)},
        "with rootTensor=1": lambda r: {"tensors": [t(1 + r)], "opts": options(BROADCAST, rootTensor=1)},
        "with rootTensor=-1": lambda r: {"tensors": [t(1 + r)], "opts": options(BROADCAST, rootTensor=-1)},
    },
    "reduce": {
        "": lambda r: {"tensors": [t(1 + r)], "opts": root(dist.ReduceOptions, 1), "filled_on": 1},
        "with rootTensor=1": lambda r: {
            "tensors": [t(1 + r)],
            "opts": options(dist.ReduceOptions, rootRank=1, rootTensor=1),
            "filled_on": 1,
        },
        "of several": lambda r: {"tensors": [t(1 + r), t(9)], "filled_on": 0},
        "of nothing": lambda r: {"tensors": [], "filled_on": 0},
        "without options": lambda r: {"tensors": [t(1 + r)], "filled_on": 0},
        "to a rank that is none": lambda r: {"tensors": [t(1)], "opts": root(dist.ReduceOptions, 7), "filled_on": 0},
        "of a tensor": lambda r: {"tensor": t(1 + r), "root": 1, "filled_on": 1},
        "of a tensor with timeout": lambda r: {"tensor": t(1 + r), "timeout": SECONDS},
        "of a tensor with op": lambda r: {"tensor": t(1 + r), "root": 1, "op": MAX, "timeout": SECONDS, "filled_on": 1},
    },
    "allgather": {
        "": lambda r: lists([[z(), z()]], [t(1 + r)]),
        "into two lists": lambda r: lists([[z(), z()], [z(), z()]], [t(1)]),
        "into too few": lambda r: lists([[z()]], [t(1)]),
        "into too many": lambda r: lists([[z(), z(), z()]], [t(1)]),
        "of nothing": lambda r: lists([], []),
        "without input": lambda r: lists([[z(), z()]], []),
        "into an empty list": lambda r: lists([[]], [t(1)]),
        "into another dtype": lambda r: lists([[z(1, i32), z(1, i32)]], [t(1)]),
        "into mixed dtypes": lambda r: lists([[z(1, i32), z()]], [t(1)]),
        "into another size": lambda r: lists([[z(2), z(2)]], [t(1)]),
        "into mixed sizes": lambda r: lists([[z(1), z(2)]], [t(1)]),
        "of a list into a list": lambda r: lists([z(), z()], [t(1 + r)]),
        "of a tensor": lambda r: {"output_tensors": [z(), z()], "input_tensor": t(1 + r)},
        "of a tensor with timeout": lambda r: {
            "output_tensors": [z(), z()],
            "input_tensor": t(1 + r),
            "timeout": SECONDS,
        },
    },
    "allgather_coalesced": {
        name: lambda r, make=make: dict(zip(("output_lists", "input_list"), make(r), strict=True))
        for name, make in {
            "": lambda r: ([[z(), z(2)], [z(), z(2)]], [t(1 + r), t(2, r)]),
            "into too few": lambda r: ([[z(), z(2)]], [t(1 + r), t(2, r)]),
            "into lists that are too short": lambda r: ([[z()], [z()]], [t(1 + r), t(2, r)]),
            "into lists that are too long": lambda r: ([[z(), z()], [z(), z()]], [t(1 + r)]),
            "into another dtype": lambda r: ([[z(1, i32)], [z(1, i32)]], [t(1)]),
            "into another size": lambda r: ([[z(2)], [z(2)]], [t(1)]),
            "of nothing": lambda r: ([], []),
            "of empty lists": lambda r: ([[], []], []),
        }.items()
    },
    "allgather_into_tensor_coalesced": {
        "": lambda r: coalesced([z(2), z(4)], [t(1 + r), t(0, 1)]),
        "of more": lambda r: coalesced([z(2)], [t(1)] * 2),
        "into more": lambda r: coalesced([z(2), z(2)], [t(1)]),
        "of nothing": lambda r: coalesced([], []),
    },
    "reduce_scatter_tensor_coalesced": {
        "": lambda r: coalesced([z(1), z(2)], [t(1 + r, 1 + r), t(0, 1, 2, 3)]),
        "of more": lambda r: coalesced([z(1)], [t(1, 1)] * 2),
        "into more": lambda r: coalesced([z(1), z(1)], [t(1, 1)]),
        "of nothing": lambda r: coalesced([], []),
    },
    "reduce_scatter": {
        "": lambda r: lists([z()], [[t(1 + r), t(2)]]),
        "of two lists": lambda r: lists([z(), z()], [[t(1 + r), t(2)]] * 2),
        "of nothing": lambda r: lists([], []),
        "of too few": lambda r: lists([z()], [[t(1)]]),
        "of too many": lambda r: lists([z()], [[t(1)] * 3]),
        "into another size": lambda r: lists([z()], [[t(1, 2)] * 2]),
        "into another dtype": lambda r: lists([z(1, i32)], [[t(1)] * 2]),
        "by max": lambda r: lists([z()], [[t(1 + r), t(2)]], opts=by_max()),
        "of a list": lambda r: single(z(), [t(1 + r), t(2)]),
        "of a list by max": lambda r: single(z(), [t(1 + r), t(2)], op=MAX),
    },
    "gather": {
        "": lambda r: lists([[z(), z()]] if r else [], [t(1 + r)], opts=root(dist.GatherOptions, 1)),
        "without options": lambda r: lists([] if r else [[z(), z()]], [t(1 + r)]),
        "of two": lambda r: lists([[z(), z()]] if r else [], [t(1), t(9)], opts=root(dist.GatherOptions, 1)),
        "of nothing": lambda r: lists([[z(), z()]] if r else [], [], opts=root(dist.GatherOptions, 1)),
        "to a rank that is none": lambda r: {"output_tensors": [z(), z()], "input_tensor": t(1), "root": 4},
        "of a tensor": lambda r: {"output_tensors": [z(), z()] if r else [], "input_tensor": t(1 + r), "root": 1},
    },
    "scatter": {
        "": lambda r: lists([z()], [[t(1), t(2)]] if r else [], opts=root(dist.ScatterOptions, 1)),
        "without options": lambda r: lists([z()], [] if r else [[t(1), t(2)]]),
        "into two": lambda r: lists([z(), z()], [[t(1), t(2)]] if r else [], opts=root(dist.ScatterOptions, 1)),
        "into nothing": lambda r: lists([], [[t(1), t(2)]] if r else [], opts=root(dist.ScatterOptions, 1)),
        "into a tensor": lambda r: {"output_tensor": z(), "input_tensors": [t(1), t(2)] if r else [], "root": 1},
    },
    "alltoall": {
        "": lambda r: lists([z(), z()], [t(1 + r), t(2 + r)]),
        "with options": lambda r: lists([z(), z()], [t(r), t(r)], opts=dist.AllToAllOptions()),
    },
    "barrier": {
        "": lambda r: {},
        "with timeout": lambda r: {"timeout": SECONDS},
        "with options": lambda r: {"opts": dist.BarrierOptions()},
    },
    "send recv": {"": lambda r: {"tensors": [z() if r else t(7)], "srcRank" if r else "dstRank": 1 - r, "tag": 3}},
    "send recv_anysource": {"": lambda r: {"tensors": [z() if r else t(7)], **({} if r else {"dstRank": 1}), "tag": 3}},
}
for method in ("_allgather_base", "all_gather_single"):
    METHODS[method] = {
        "": lambda r: single(z(2), t(1 + r)),
        "with options": lambda r: single(z(2), t(1 + r), opts=AllgatherOptions()),
        "into another size": lambda r: single(z(3), t(1 + r)),
        "into another dtype": lambda r: single(z(2, i32), t(1 + r)),
    }
for method in ("_reduce_scatter_base", "reduce_scatter_single"):
    METHODS[method] = {
        "": lambda r: shaped(z(), t(1 + r, 2)),
        "by max": lambda r: shaped(z(), t(1 + r, 2), opts=by_max()),
        "of another size": lambda r: shaped(z(), t(1 + r, 2, 3)),
        "of another dtype": lambda r: shaped(z(1, i32), t(1 + r, 2)),
    }
for method in ("alltoall_base", "all_to_all_single"):
    METHODS[method] = {
        f"by {taken} and {given}{' with timeout' * bool(more)}": lambda r, taken=taken, given=given, more=more: single(
            z(2), t(r, 2), output_split_sizes=taken, input_split_sizes=given, **more
        )
        for taken, given in (([], []), ([1, 1], [1, 1]), ([1, 1], []), ([1, 2], [1, 1]), ([2], [2]))
        for more in ({}, {"timeout": SECONDS})
    }


def forms() -> Iterator[tuple[str, Form]]:
    for method, calls in METHODS.items():
        if all(hasattr(dist.ProcessGroup, name) for name in method.split()):  # torch 2.13 renamed some
            for name, make in calls.items():
                count = len(make(0).keys() - {"filled_on"})
                for positional in range(count + 1):
                    if positional == count or "anysource" not in method:  # its arguments have no names over gloo
                        yield f"{method} {name}, {positional} of {count} by position", (method, make, positional)


FORMS = dict(forms())


def flat(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else [tensor for each in given or () for tensor in flat(each)]


def numbers(value: Any) -> object:
    """The value of a future, as numbers: a tensor, a list of tensors or a list of lists."""
    if isinstance(value, Tensor):
        return value.to_dense().tolist()
    return [numbers(each) for each in value] if isinstance(value, list) else value


BY_SIGNATURE, REFUSED = "refused by its signature", "refused"
PLAIN, OURS = (RuntimeError,), (ValueError, Unsupported)
"""The errors by which plain gloo and holdfast refuse arguments: no other one of holdfast passes for a refusal."""
ACCEPTED = 223
"""So many forms both accept with torch 2.13, which has all methods: a form that both refuse compares little."""


def outcome(form: Form, group: Any, rank: int, refusals: tuple[type[Exception], ...]) -> object:
    """What a call has filled, and the value of its future; or how it was refused; or another error, in words."""
    method, make, positional = form
    method = method.split()[rank] if " " in method else method
    arguments = make(rank)
    filled = arguments.pop("filled_on", rank) == rank and method != "barrier"
    names, values = list(arguments), list(arguments.values())
    try:
        named = dict(zip(names[positional:], values[positional:], strict=True))
        work = getattr(group, method)(*values[:positional], **named)
        work.wait()
        value = numbers(work.get_future().value()) if method in VALUED else None
    except TypeError as error:
        return BY_SIGNATURE if "incompatible" in str(error) else f"TypeError: {error}"
    except Exception as error:
        return REFUSED if isinstance(error, refusals) else f"{type(error).__name__}: {error}"
    return numbers(flat(values[0])) if filled else [], value


@pytest.fixture(scope="module")
def outcomes(pair: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, Any]]]:
    """By form of call: the outcomes over plain gloo and over holdfast on each of two ranks."""

    def body(rank: int, size: int) -> dict[str, tuple[Any, Any]]:
        ours = dist.new_group(backend="holdfast")
        return {
            name: (outcome(form, dist.group.WORLD, rank, PLAIN), outcome(form, ours, rank, OURS))
            for name, form in FORMS.items()
        }

    by_rank = in_group(pair, tmp_path_factory.mktemp("calls"), body, "gloo")
    return {name: [of_rank[name] for of_rank in by_rank] for name in FORMS}


@pytest.mark.parametrize("method", sorted({method for method, *_ in FORMS.values()}))
def test_a_call_has_the_outcome_of_plain_gloo(outcomes: dict[str, list[tuple[Any, Any]]], method: str) -> None:
    differ = {}
    for name in [name for name in FORMS if FORMS[name][0] == method]:
        plain, ours = zip(*outcomes[name], strict=True)
        lacks = method.startswith("alltoall") and torch.__version__ < "2.12"  # its gloo refuses what holdfast does
        if ours != plain and not (lacks and plain == (REFUSED, REFUSED)):
            differ[name] = plain, ours
    assert differ == {}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older torch lacks methods, and its gloo refuses more")
def test_as_many_calls_as_before_are_accepted_by_both(outcomes: dict[str, list[tuple[Any, Any]]]) -> None:
    accepted = [all(type(each) is tuple for pair in of for each in pair) for of in outcomes.values()]
    assert sum(accepted) >= ACCEPTED


pair = shared_groups(2, "shm")


@on_each_rank_of("pair")
def test_tensors_of_several_devices_are_refused(rank: int, size: int) -> None:
    group, numbers = dist.group.WORLD, t(1, 2, 3, 4)
    for method, *arguments in (
        ("allreduce", [t(1), t(2)]),
        ("allreduce", [t(1)] * 2),
        ("broadcast", [t(1), t(2)], dist.BroadcastOptions()),
        ("allgather", [[z() for _ in range(4)]] * 2, [t(1), t(2)]),
        ("allreduce_coalesced", [numbers[:3], numbers[1:]]),
    ):
        with pytest.raises(ValueError, match=r"list of one|share memory"):
            getattr(group, method)(*arguments)
