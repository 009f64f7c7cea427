"""torch's calls of a process group: its overloads become one `Call`, its lists one tensor, its types holdfast's.

torch binds several overloads of each collective (`broadcast(tensors, opts)`, `broadcast(tensor, root, timeout)`). A
method of a Python subclass replaces all of them, so it must distinguish them. A list is, in torch, the tensors of
several devices of one rank; it must have one here, as over NCCL, unless the op is for several ("coalesced").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

import torch
import torch.distributed as dist

from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp

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
T = TypeVar("T")


def one(op: str, items: Sequence[T], what: str) -> T:
    """The only item of a list: a tensor, or a list of tensors. Raises ValueError for others."""
    if len(items) != 1:
        raise ValueError(f"{op}: {what} must be a list of one, not of {len(items)}: a rank has one device here")
    return items[0]


def one_of_root(op: str, tensors: Sequence[Tensor], opts: Any) -> Tensor:
    """The only tensor of a list, which torch's options must name as that of the root."""
    if opts.rootTensor != 0:
        raise ValueError(f"{op}: rootTensor={opts.rootTensor} is out of range: it is the number of the only tensor, 0")
    return one(op, tensors, "tensors")


def alike(op: str, tensors: Sequence[Tensor]) -> None:
    """Require one dtype and one number of elements: alike on all ranks, none of which then waits for the others."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype or tensor.numel() != tensors[0].numel():
            kinds = [f"{tuple(each.shape)} of {each.dtype}" for each in (tensor, tensors[0])]
            raise ValueError(f"{op}: tensor {index} is {kinds[0]}, another {kinds[1]}; pass one size and dtype")


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
