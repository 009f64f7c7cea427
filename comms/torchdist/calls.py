"""torch's calls of a process group: its overloads become one `Call`, its lists one tensor, its types holdfast's.

torch binds several overloads of each collective (`broadcast(tensors, opts)`, `broadcast(tensor, root, timeout)`). A
method of a Python subclass replaces all of them, so it must distinguish them. A list is, in torch, the tensors of
several devices of one rank: it is checked as torch's gloo group does, which raises ValueError, and reduced to one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

import torch
import torch.distributed as dist

from holdfast.comms import arithmetic
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors.overlap import span

if TYPE_CHECKING:
    from holdfast.comms.torchdist.process_group import HoldfastProcessGroup
    from holdfast.comms.torchdist.works import TorchWork


Group = TypeVar("Group", bound="HoldfastProcessGroup")


class Kind(Enum):
    """The kind of a parameter. The value of tensor kinds is their nesting depth: tensor, list, list of lists."""

    TENSOR = 0
    LIST = 1
    LISTS = 2
    SIZES = "sizes"
    OPTIONS = "opts"
    OP = "op"
    ROOT = "root"
    TIMEOUT = "timeout"


TENSOR, LIST, LISTS, SIZES = Kind.TENSOR, Kind.LIST, Kind.LISTS, Kind.SIZES
_OPTIONAL = (Kind.OPTIONS, Kind.OP, Kind.TIMEOUT)
_FIELDS = {Kind.OP: "reduceOp", Kind.ROOT: "rootRank", Kind.TIMEOUT: "timeout"}
"""The field of torch's options for the same argument."""

Form = dict[str, Kind]
"""One overload: the kind of each parameter, in order. Outputs come first, inputs second."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call, converted to the first form of its method. An in-place op has equal `outputs` and `inputs`."""

    outputs: Any
    inputs: Any
    opts: Any
    splits: tuple[Sequence[int] | None, ...] = field(default=())


def form(*names: str, **tensors: Kind) -> Form:
    """The overload with the parameters `tensors`, followed by `names` ("opts", "op", "root", "timeout")."""
    return {**tensors, **{name: Kind(name) for name in names}}


def overloads(
    options: Callable[[], Any], *forms: Form
) -> Callable[[Callable[[Group, Call], TorchWork]], Callable[Concatenate[Group, ...], TorchWork]]:
    """Let a method that takes a `Call` be called in any of `forms`; raise TypeError if none fits."""

    def decorate(method: Callable[[Group, Call], TorchWork]) -> Callable[Concatenate[Group, ...], TorchWork]:
        @functools.wraps(method)
        def bound(self: Group, *arguments: Any, **named: Any) -> TorchWork:
            for each in forms:
                given = _bind(each, arguments, named)
                if given is not None and all(_fits(each[name], value, options) for name, value in given.items()):
                    call = _call(forms[0], each, given, options)
                    if self.hooked is None:
                        return method(self, call)
                    return self.hooked(method.__name__, call, functools.partial(method, self, call))
            said = ", ".join([*map(_type, arguments), *(f"{name}={_type(value)}" for name, value in named.items())])
            known = " or ".join(f"({', '.join(each)})" for each in forms)
            raise TypeError(f"{method.__name__}({said}): incompatible arguments; it takes {known}")

        return bound

    return decorate


def _bind(each: Form, arguments: Sequence[Any], named: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments by parameter name; None if there are too many, unknown or missing ones for this form."""
    if len(arguments) > len(each):
        return None
    given = dict(zip(each, arguments, strict=False))
    if named:
        if not named.keys() <= each.keys() - given.keys():
            return None
        given.update(named)
    needed = (name for name, kind in each.items() if kind not in _OPTIONAL)
    return given if all(name in given for name in needed) else None


def _fits(kind: Kind, value: Any, options: Any) -> bool:
    """Whether torch accepts `value` for a parameter of this kind."""
    match kind:
        case Kind.TENSOR:
            return isinstance(value, torch.Tensor)
        case Kind.LIST:
            return _all(value, lambda each: isinstance(each, torch.Tensor))
        case Kind.LISTS:
            return _all(value, lambda each: _fits(LIST, each, options))
        case Kind.SIZES:
            return value is None or _all(value, _is_whole)
        case Kind.OPTIONS:
            return value is None or isinstance(value, options)
        case Kind.OP:
            return isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType)
        case Kind.ROOT:
            return _is_whole(value)
        case Kind.TIMEOUT:
            return value is None or isinstance(value, timedelta)


def _call(first: Form, each: Form, given: dict[str, Any], options: Callable[[], Any]) -> Call:
    tensors, splits, opts = [], [], None
    for (name, kind), meant in zip(each.items(), [*first.values(), *[None] * len(each)], strict=False):
        value = given.get(name)
        if kind in (TENSOR, LIST, LISTS):
            assert meant is not None
            if meant is not kind:
                value = [] if kind is LIST and not value else [value]
            tensors.append(value)
        elif kind is SIZES:
            splits.append(value)
        elif kind is Kind.OPTIONS:
            opts = value
        elif value is not None:
            opts = opts or options()
            setattr(opts, _FIELDS[kind], value)
    outputs, inputs = (tensors[0], tensors[-1]) if tensors else ((), ())
    return Call(outputs, inputs, opts or options(), tuple(splits))


def _all(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | torch.Tensor) and all(map(fits, value))


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, torch.Tensor)


def _type(value: Any) -> str:
    if isinstance(value, list | tuple):
        kinds: Iterable[str] = dict.fromkeys(map(_type, value))
        return f"{type(value).__name__} of {', '.join(kinds) or 'nothing'}"
    return type(value).__name__


Tensor = torch.Tensor
Tensors = Sequence[Tensor]


def some(op: str, tensors: Tensors) -> None:
    """Require at least one tensor."""
    if not tensors:
        raise ValueError(f"{op}: the list of tensors is empty; pass at least one")


def of_one_type(op: str, tensors: Tensors) -> None:
    """Require at least one tensor, and one dtype."""
    some(op, tensors)
    for index, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{op}: tensor {index} is {tensor.dtype}, tensor 0 {tensors[0].dtype}; pass one dtype")


def of_one_size(op: str, tensors: Tensors) -> None:
    """Require at least one tensor, one dtype, and one number of elements."""
    of_one_type(op, tensors)
    for index, tensor in enumerate(tensors):
        if tensor.numel() != tensors[0].numel():
            sizes = f"{tuple(tensor.shape)}, another {tuple(tensors[0].shape)}"
            raise ValueError(f"{op}: tensor {index} has the shape {sizes}; pass one shape")


def alike(op: str, tensors: Tensors) -> None:
    """Require at least one tensor, one dtype and one shape. A tensor may be repeated, but not overlap another."""
    of_one_type(op, tensors)
    for index, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            sizes = f"{tuple(tensor.shape)}, tensor 0 {tuple(tensors[0].shape)}"
            raise ValueError(f"{op}: tensor {index} has the shape {sizes}; pass one shape")
    if overlap(list({tensor.data_ptr(): tensor for tensor in tensors if tensor.layout == torch.strided}.values())):
        raise ValueError(f"{op}: two of the tensors overlap; pass tensors with memory of their own")


def root_tensor(op: str, tensors: Tensors, index: int) -> None:
    """Require that `opts.rootTensor` is the index of one of the tensors."""
    if not 0 <= index < len(tensors):
        raise ValueError(f"{op}: rootTensor={index} is out of range: {len(tensors)} tensors were given")


def one(op: str, items: Sequence[object], what: str) -> None:
    """Require a list of length one: of one tensor, or of one list of tensors."""
    if len(items) != 1:
        raise ValueError(f"{op}: {what} must be a list of one, not of {len(items)}: a rank has one device here")


def of_root(op: str, items: Sequence[object], what: str, rank: int, root: int) -> None:
    """Require a list of length one on the root, and an empty list on other ranks."""
    if rank == root:
        one(op, items, what)
    elif items:
        raise ValueError(f"{op}: {what} must be empty on rank {rank}: it belongs to the root, rank {root}")


def pairs(op: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
    """Require as many outputs as inputs, and at least one."""
    if not inputs or len(outputs) != len(inputs):
        raise ValueError(
            f"{op}: {len(outputs)} outputs for {len(inputs)} inputs; pass one output for each, and at least one"
        )


def overlap(tensors: Tensors) -> bool:
    """Whether any two of the tensors may share memory."""
    extents = sorted(span(tensor) for tensor in tensors if tensor.numel())
    return any(end > start for (_, end), (start, _) in pairwise(extents))


# -- reductions


def total(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """The reduction of the tensors, in memory of its own.

    Raises `Unsupported` for several tensors if their reduction depends on the number of ranks, and for several sparse
    ones unless they are summed.
    """
    result = tensors[0].detach().clone()
    if len(tensors) == 1:
        return result
    if result.layout != torch.strided:
        if op is not ReduceOp.SUM:
            raise Unsupported(f"allreduce of several sparse tensors by {op.name}", "pass one tensor, or sum them")
        return sum(tensors[1:], result).detach()
    if op.name in arithmetic.SCALED:
        raise Unsupported(f"allreduce ({op.name}) of several tensors of one rank", "pass one tensor")
    for tensor in tensors[1:]:
        arithmetic.combine(result, tensor.detach(), op)
    return result


def copy_to_all(result: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set each of the tensors to the result."""
    with torch.no_grad():  # `detach` would give a sparse tensor other values
        for tensor in tensors:
            tensor.copy_(result)


def reduction(op: Any, tensor: torch.Tensor) -> ReduceOp:
    """Convert torch's reduction (a `ReduceOp` or `RedOpType`) to holdfast's. Booleans sum by or, multiply by and."""
    kind = getattr(op, "op", op)
    name = kind.name
    if name == "PREMUL_SUM":
        factor = op.factor
        return ReduceOp.premul_sum(float(factor))
    found = getattr(ReduceOp, name, None)
    if not isinstance(found, ReduceOp):
        raise Unsupported(f"the reduction {name}")
    if tensor.dtype == torch.bool:
        found = {"sum": ReduceOp.BOR, "max": ReduceOp.BOR, "product": ReduceOp.BAND, "min": ReduceOp.BAND}.get(
            found.name, found
        )
    return found


def seconds(timeout: timedelta | float | None) -> float | None:
    """A timeout in seconds; None if torch passed none, which it may express as a value of zero or less."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return value if value > 0 else None


def is_async(opts: Any) -> bool:
    """Whether the op is asynchronous: torch's default if the options do not say."""
    return bool(getattr(opts, "asyncOp", True))
