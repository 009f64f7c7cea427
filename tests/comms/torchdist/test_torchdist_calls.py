"""Every form of calling a process group has the same results and errors over holdfast as over plain gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON, in_group

Tensor = torch.Tensor
Made = tuple[list[Tensor], object]
Calling = Callable[[Any, int], Made]
"""Makes one call of a group, given the rank. Returns the tensors that it filled, and the value of the work's future."""

MAX = dist.ReduceOp.MAX
SECONDS = timedelta(seconds=9)
CALLS: dict[str, Calling] = {}
VALUED = {"allreduce", "allreduce_coalesced", "broadcast", "allgather", "allgather_coalesced", "gather", "scatter"}
"""Methods whose future holds what they fill; over gloo that of others holds its own buffers, or there is none."""


def t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def z(count: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def options(kind: Any, **fields: Any) -> Any:
    """torch's options, made in the rank's process, since they cannot be pickled."""

    def make() -> Any:
        made = kind()
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    return make


def _value(given: Any) -> object:
    """The value of a future, as numbers: a tensor, a list of tensors or a list of lists."""
    if isinstance(given, Tensor):
        return given.to_dense().tolist()
    return [_value(each) for each in given] if isinstance(given, list) else given


def _now(argument: Any) -> Any:
    return argument() if isinstance(argument, FunctionType) else argument


def call(name: str, method: str, make: Callable[[int], tuple[Sequence[Any], dict[str, Any], Sequence[Tensor]]]) -> None:
    """Add a call of `method`, if this torch has it. `make(rank)` returns arguments, named ones, and what is filled."""
    if not hasattr(dist.ProcessGroup, method):
        return  # torch 2.13 renamed some

    def run(group: Any, rank: int) -> Made:
        arguments, named, filled = make(rank)
        named = {key: _now(value) for key, value in named.items()}
        work = getattr(group, method)(*map(_now, arguments), **named)
        work.wait()
        return [tensor.clone() for tensor in filled], _value(work.get_future().value()) if method in VALUED else None

    assert name not in CALLS
    CALLS[name] = run


def in_place(name: str, method: str, make: Callable[[int], tuple[list[Tensor], Sequence[Any], dict[str, Any]]]) -> None:
    """Add a call with a list of tensors that it changes, and further arguments."""
    call(name, method, lambda rank: (lambda ts, more, named: ((ts, *more), named, ts))(*make(rank)))


def of_tensor(name: str, method: str, *more: Any, **named: Any) -> None:
    """Add calls with one tensor, by position and as `tensor=`. The root (rank 0), or all ranks, get the result."""
    call(name, method, lambda rank: (lambda x: ((x, *more), named, [x]))(t(1 + rank)))
    call(f"{name}, by name", method, lambda rank: (lambda x: (more, {"tensor": x, **named}, [x]))(t(1 + rank)))


def two(rank: int) -> list[Tensor]:
    return [t(1 + rank), t(10 * (1 + rank))]


ALL_REDUCE, COALESCED = dist.AllreduceOptions, dist.AllreduceCoalescedOptions
in_place("allreduce of two sizes", "allreduce", lambda r: ([t(1), t(1, 2)], [], {}))
in_place("allreduce of two shapes", "allreduce", lambda r: ([t(1, 2), t(1, 2).view(2, 1)], [], {}))
in_place("allreduce of two dtypes", "allreduce", lambda r: ([t(1), z(1, torch.int64)], [], {}))
in_place("allreduce of nothing", "allreduce", lambda r: ([], [], {}))
in_place("allreduce with another op's options", "allreduce", lambda r: ([t(1)], [options(dist.BroadcastOptions)], {}))
in_place("allreduce with a number as op", "allreduce", lambda r: ([t(1)], [3], {}))
in_place("allreduce with options", "allreduce", lambda r: ([t(r)], [options(ALL_REDUCE, reduceOp=MAX)], {}))
in_place("allreduce with op and timeout", "allreduce", lambda r: ([t(r)], [MAX, SECONDS], {}))
in_place("allreduce with a kind of op", "allreduce", lambda r: ([t(r)], [], {"op": dist.ReduceOp.RedOpType.MAX}))
call("allreduce of numbers", "allreduce", lambda r: (([1], [10]), {}, []))
call("allreduce of nothing at all", "allreduce", lambda r: ((None,), {}, []))
call("allreduce by a name that is none", "allreduce", lambda r: ((), {"input": t(1)}, []))
call("allreduce, tensors by name", "allreduce", lambda r: (lambda x: ((), {"tensors": [x], "op": MAX}, [x]))(t(r)))
of_tensor("allreduce of a tensor", "allreduce")
of_tensor("allreduce of a tensor with op", "allreduce", op=MAX)
of_tensor("allreduce of a tensor with timeout", "allreduce", timeout=SECONDS)
in_place("coalesced allreduce", "allreduce_coalesced", lambda r: ([t(r), t(1, 2)], [], {}))
in_place("coalesced by max", "allreduce_coalesced", lambda r: ([t(r)], [], {"opts": options(COALESCED, reduceOp=MAX)}))
in_place("coalesced of nothing", "allreduce_coalesced", lambda r: ([], [], {}))


def sparse(*places: int) -> Tensor:
    """Ones at some places of four."""
    return torch.sparse_coo_tensor(torch.tensor([places]), torch.ones(len(places)), (4,))


in_place("sparse allreduce", "allreduce", lambda r: ([sparse(r, 3)], [], {}))
in_place("sparse allreduce by max", "allreduce", lambda r: ([sparse(r)], [MAX], {}))

BROADCAST = dist.BroadcastOptions
for fields in ({"rootRank": 1}, {"rootRank": 5}, {"rootRank": -1}, {"rootTensor": 1}, {"rootTensor": -1}):
    in_place(f"broadcast {fields}", "broadcast", lambda r, f=fields: ([t(1 + r)], [options(BROADCAST, **f)], {}))
in_place("broadcast of nothing", "broadcast", lambda r: ([], [], {}))
in_place("broadcast of two dtypes", "broadcast", lambda r: ([t(1), z(1, torch.int64)], [], {}))
in_place("broadcast of two sizes", "broadcast", lambda r: ([t(1), t(1, 2)], [], {}))
in_place("broadcast of a list without options", "broadcast", lambda r: ([t(1 + r)], [], {}))
in_place("broadcast of a list with a root", "broadcast", lambda r: ([t(1 + r)], [1], {}))
of_tensor("broadcast of a tensor without a root", "broadcast")
of_tensor("broadcast of a tensor", "broadcast", root=1)
of_tensor("broadcast of a tensor with timeout", "broadcast", root=1, timeout=SECONDS)
call("broadcast, all by position", "broadcast", lambda r: (lambda x: ((x, 1, SECONDS), {}, [x]))(t(r)))


def on_root(name: str, where: int, /, *more: Any, make: Callable[[int], list[Tensor]], **named: Any) -> None:
    """Add a reduce. Only the root gets the result."""

    def given(rank: int) -> tuple[Sequence[Any], dict[str, Any], Sequence[Tensor]]:
        tensors = make(rank)
        first = tensors if not named else tensors[0]
        return (first, *more), named, tensors if rank == where else []

    call(name, "reduce", given)


REDUCE = dist.ReduceOptions
on_root("reduce", 1, options(REDUCE, rootRank=1), make=lambda r: [t(1 + r)])
on_root("reduce with rootTensor=1", 1, options(REDUCE, rootRank=1, rootTensor=1), make=lambda r: [t(1 + r)])
on_root("reduce of several", 0, make=two)
on_root("reduce of nothing", 0, make=lambda r: [])
on_root("reduce without options", 0, make=lambda r: [t(1 + r)])
on_root("reduce to a rank that is none", 0, options(REDUCE, rootRank=7), make=lambda r: [t(1 + r)])
on_root("reduce of a tensor", 1, make=lambda r: [t(1 + r)], root=1)
on_root("reduce of a tensor with op", 1, make=lambda r: [t(1 + r)], root=1, op=MAX, timeout=SECONDS)


def pair(
    name: str, method: str, make: Callable[[int], tuple[Any, Any]], names: tuple[str, str], *more: Any, **named: Any
) -> None:
    """Add calls with outputs and inputs, by position and by name."""
    call(name, method, lambda r: (lambda o, i: ((o, i, *more), named, _flat(o)))(*make(r)))
    call(
        f"{name}, by name",
        method,
        lambda r: (lambda o, i: ((), dict(zip(names, (o, i), strict=True)) | named, _flat(o)))(*make(r)),
    )


def _flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [tensor for each in outputs for tensor in _flat(each)]


LISTS, OF_LIST = ("output_tensors", "input_tensors"), ("output_tensors", "input_tensor")
TENSORS, SHAPED = ("output", "input"), ("outputTensor", "inputTensor")
i32 = torch.int32
for name, make in {
    "": lambda r: ([[z(), z()]], [t(1 + r)]),
    "into two lists": lambda r: ([[z(), z()], [z(), z()]], [t(1)]),
    "into too few": lambda r: ([[z()]], [t(1)]),
    "into too many": lambda r: ([[z(), z(), z()]], [t(1)]),
    "of nothing": lambda r: ([], []),
    "without input": lambda r: ([[z(), z()]], []),
    "into an empty list": lambda r: ([[]], [t(1)]),
    "into another dtype": lambda r: ([[z(1, i32), z(1, i32)]], [t(1)]),
    "into mixed dtypes": lambda r: ([[z(1, i32), z()]], [t(1)]),
    "into another size": lambda r: ([[z(2), z(2)]], [t(1)]),
    "into mixed sizes": lambda r: ([[z(1), z(2)]], [t(1)]),
    "of a list into a list": lambda r: ([z(), z()], [t(1 + r)]),
}.items():
    pair(f"allgather {name}", "allgather", make, LISTS)
pair("allgather of a tensor", "allgather", lambda r: ([z(), z()], t(1 + r)), OF_LIST)
pair("allgather of a tensor with timeout", "allgather", lambda r: ([z(), z()], t(1 + r)), OF_LIST, timeout=SECONDS)
for name, make in {
    "": lambda r: ([[z(), z(2)], [z(), z(2)]], [t(1 + r), t(2, r)]),
    "into too few": lambda r: ([[z(), z(2)]], [t(1 + r), t(2, r)]),
    "into lists that are too short": lambda r: ([[z()], [z()]], [t(1 + r), t(2, r)]),
    "into lists that are too long": lambda r: ([[z(), z()], [z(), z()]], [t(1 + r)]),
    "into another dtype": lambda r: ([[z(1, i32)], [z(1, i32)]], [t(1)]),
    "into another size": lambda r: ([[z(2)], [z(2)]], [t(1)]),
    "of nothing": lambda r: ([], []),
    "of empty lists": lambda r: ([[], []], []),
}.items():
    pair(f"coalesced allgather {name}", "allgather_coalesced", make, ("output_lists", "input_list"))
for method in ("_allgather_base", "all_gather_single"):
    pair(method, method, lambda r: (z(2), t(1 + r)), TENSORS)
    pair(f"{method} with options", method, lambda r: (z(2), t(1 + r)), TENSORS, opts=options(AllgatherOptions))
    pair(f"{method} into another size", method, lambda r: (z(3), t(1 + r)), TENSORS)
    pair(f"{method} into another dtype", method, lambda r: (z(2, i32), t(1 + r)), TENSORS)
for method, size in (("allgather_into_tensor_coalesced", 2), ("reduce_scatter_tensor_coalesced", 1)):
    names = ("outputs", "inputs")
    pair(method, method, lambda r, n=size: ([z(n), z(2 * n)], [t(*[1 + r] * (3 - n)), t(*range(2 * (3 - n)))]), names)
    pair(f"{method} of more", method, lambda r, n=size: ([z(n)], [t(*[1] * (3 - n))] * 2), names)
    pair(f"{method} into more", method, lambda r, n=size: ([z(n), z(n)], [t(*[1] * (3 - n))]), names)
    pair(f"{method} of nothing", method, lambda r: ([], []), names)

SCATTERED = options(dist.ReduceScatterOptions, reduceOp=MAX)
for name, make in {
    "": lambda r: ([z()], [[t(1 + r), t(2)]]),
    "of two lists": lambda r: ([z(), z()], [[t(1 + r), t(2)]] * 2),
    "of nothing": lambda r: ([], []),
    "of too few": lambda r: ([z()], [[t(1)]]),
    "of too many": lambda r: ([z()], [[t(1)] * 3]),
    "into another size": lambda r: ([z()], [[t(1, 2)] * 2]),
    "into another dtype": lambda r: ([z(1, i32)], [[t(1)] * 2]),
}.items():
    pair(f"reduce_scatter {name}", "reduce_scatter", make, LISTS)
pair("reduce_scatter by max", "reduce_scatter", lambda r: ([z()], [[t(1 + r), t(2)]]), LISTS, opts=SCATTERED)
pair("reduce_scatter of a list", "reduce_scatter", lambda r: (z(), [t(1 + r), t(2)]), TENSORS)
pair("reduce_scatter of a list by max", "reduce_scatter", lambda r: (z(), [t(1 + r), t(2)]), TENSORS, op=MAX)
for method in ("_reduce_scatter_base", "reduce_scatter_single"):
    pair(method, method, lambda r: (z(), t(1 + r, 2)), SHAPED)
    pair(f"{method} by max", method, lambda r: (z(), t(1 + r, 2)), SHAPED, opts=SCATTERED)
    pair(f"{method} of another size", method, lambda r: (z(), t(1 + r, 2, 3)), SHAPED)
    pair(f"{method} of another dtype", method, lambda r: (z(1, i32), t(1 + r, 2)), SHAPED)

GATHER, SCATTER = options(dist.GatherOptions, rootRank=1), options(dist.ScatterOptions, rootRank=1)
pair("gather", "gather", lambda r: ([[z(), z()]] if r else [], [t(1 + r)]), LISTS, opts=GATHER)
pair("gather without options", "gather", lambda r: ([] if r else [[z(), z()]], [t(1 + r)]), LISTS)
pair("gather of two", "gather", lambda r: ([[z(), z()]] if r else [], two(r)), LISTS, opts=GATHER)
pair("gather of nothing", "gather", lambda r: ([[z(), z()]] if r else [], []), LISTS, opts=GATHER)
pair("gather to a rank that is none", "gather", lambda r: ([z(), z()], t(1)), OF_LIST, root=4)
pair("gather of a tensor", "gather", lambda r: ([z(), z()] if r else [], t(1 + r)), OF_LIST, root=1)
SINGLE = ("output_tensor", "input_tensors")
pair("scatter", "scatter", lambda r: ([z()], [[t(1), t(2)]] if r else []), LISTS, opts=SCATTER)
pair("scatter without options", "scatter", lambda r: ([z()], [] if r else [[t(1), t(2)]]), LISTS)
pair("scatter into two", "scatter", lambda r: ([z(), z()], [[t(1), t(2)]] if r else []), LISTS, opts=SCATTER)
pair("scatter into nothing", "scatter", lambda r: ([], [[t(1), t(2)]] if r else []), LISTS, opts=SCATTER)
pair("scatter into a tensor", "scatter", lambda r: (z(), [t(1), t(2)] if r else []), SINGLE, root=1)

pair("alltoall", "alltoall", lambda r: ([z(), z()], [t(1 + r), t(2 + r)]), LISTS)
pair(
    "alltoall with options", "alltoall", lambda r: ([z(), z()], [t(r), t(r)]), LISTS, opts=options(dist.AllToAllOptions)
)
for method in ("alltoall_base", "all_to_all_single"):
    for name, sizes in {"evenly": ([], []), "by rows": ([1, 1], [1, 1]), "by rows of one side": ([1, 1], [])}.items():
        named = {"output_split_sizes": sizes[0], "input_split_sizes": sizes[1]}
        pair(f"{method} {name}", method, lambda r: (z(2), t(r, 2)), TENSORS, **named)
        pair(f"{method} {name} with timeout", method, lambda r: (z(2), t(r, 2)), TENSORS, timeout=SECONDS, **named)
    for sizes in (([1, 2], [1, 1]), ([2], [2])):
        named = {"output_split_sizes": sizes[0], "input_split_sizes": sizes[1]}
        pair(f"{method} by {sizes}", method, lambda r: (z(2), t(r, 2)), TENSORS, **named)
call("alltoall_base, all by position", "alltoall_base", lambda r: (lambda o: ((o, t(r, 2), [], []), {}, [o]))(z(2)))
call("barrier", "barrier", lambda r: ((), {}, []))
call("barrier with timeout", "barrier", lambda r: ((SECONDS,), {}, []))
call("barrier with timeout by name", "barrier", lambda r: ((), {"timeout": SECONDS}, []))
call("barrier with options", "barrier", lambda r: ((), {"opts": options(dist.BarrierOptions)}, []))


def message(name: str, by_name: bool, method: str = "recv") -> None:
    def run(group: Any, rank: int) -> Made:
        x = t(7) if rank == 0 else z()
        peer = {"dstRank": 1} if rank == 0 else {"srcRank": 0}
        end = "send" if rank == 0 else method
        if end == "recv_anysource":
            work = group.recv_anysource([x], 3)
        elif by_name:
            work = getattr(group, end)(tensors=[x], tag=3, **peer)
        else:
            work = getattr(group, end)([x], *peer.values(), 3)
        work.wait()
        return [x], None

    CALLS[name] = run


message("send and recv", False)
message("send and recv, by name", True)
message("recv from any source", False, "recv_anysource")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, Any]]]:
    """By call: the results over plain gloo and over holdfast on each of two ranks; None stands for an error."""

    def body(rank: int, size: int) -> dict[str, tuple[Any, Any]]:
        def outcome(make: Calling, group: Any) -> tuple[list[Any], object] | None:
            try:
                filled, value = make(group, rank)
                return [tensor.to_dense().tolist() for tensor in filled], value
            except (RuntimeError, ValueError, TypeError):
                return None

        ours = dist.new_group(backend="holdfast")
        return {name: (outcome(make, dist.group.WORLD), outcome(make, ours)) for name, make in CALLS.items()}

    with LocalCluster(2, "shm", timeout=90.0, environ={**ENVIRON, "HOLDFAST_BACKEND": "shm"}) as cluster:
        by_rank = in_group(cluster, tmp_path_factory.mktemp("calls"), body, "gloo")
    return {name: [of_rank[name] for of_rank in by_rank] for name in CALLS}


SEVERAL: dict[str, Callable[[Any], object]] = {
    "allreduce": lambda group: group.allreduce([t(1), t(2)]),
    "allreduce of one twice": lambda group: group.allreduce([t(1)] * 2),
    "broadcast": lambda group: group.broadcast([t(1), t(2)], dist.BroadcastOptions()),
    "allgather": lambda group: group.allgather([[z() for _ in range(4)]] * 2, [t(1), t(2)]),
    "allreduce_coalesced": lambda group: (lambda x: group.allreduce_coalesced([x[:3], x[1:]]))(t(1, 2, 3, 4)),
}


def test_tensors_of_several_devices_are_refused(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> list[str]:
        return [name for name, make in SEVERAL.items() if not _is_refused(make)]

    with LocalCluster(2, "shm", timeout=60.0, environ={**ENVIRON, "HOLDFAST_BACKEND": "shm"}) as cluster:
        assert in_group(cluster, tmp_path, body) == [[], []]


def _is_refused(make: Callable[[Any], object]) -> bool:
    try:
        make(dist.group.WORLD)
    except ValueError as error:
        return "list of one" in str(error) or "share memory" in str(error)
    return False


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_outcome_of_plain_gloo(outcomes: dict[str, list[tuple[Any, Any]]], name: str) -> None:
    plain, ours = zip(*outcomes[name], strict=True)
    if plain == (None, None) and name.startswith("alltoall") and torch.__version__ < "2.12":
        pytest.skip("gloo of this torch refuses alltoall, which holdfast does")
    assert ours == plain
