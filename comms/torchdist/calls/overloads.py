"""Maps torch's overloads of `ProcessGroup`'s methods, by position or by name, to one `Call`.

torch binds several overloads of each collective (`broadcast(tensors, opts)`, `broadcast(tensor, root, timeout)`).
A method of a Python subclass replaces all of them, so it must distinguish them.
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
