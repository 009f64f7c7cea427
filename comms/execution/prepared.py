"""`prepare`: an op with its arguments, to be started many times for less than a plain call costs.

The arguments are checked once. A start compares the tensors with what was checked, and checks them again only if they
have changed since: the op runs on the tensors as they are then.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from holdfast.comms import plan
from holdfast.comms._native import PreparedOp
from holdfast.comms.ops import Recv, Send
from holdfast.comms.tensors.memory import held_bytes
from holdfast.comms.work import DONE, Work

if TYPE_CHECKING:
    from holdfast.comms.collectives import CheckedOp
    from holdfast.comms.communicator import Communicator

__all__ = ["OPS", "PreparedOp", "prepare"]

SINGLES = ("reduce_scatter_single", "all_gather_single", "all_to_all_single")
OPS = (*plan.OPS, *SINGLES, "send", "recv", "batch_send_recv")
_FAST = {
    "all_reduce": ("tensor", "op"),
    "reduce_scatter_single": ("output", "tensor", "op"),
    "broadcast": ("tensor", "src"),
    "all_gather_single": ("output", "tensor"),
    "all_to_all_single": ("output", "tensor"),
    "barrier": (),
}
"""The ops of a fast path, and its arguments; all others must have their defaults."""

_OPTIONS = ("async_op", "timeout", "hints")
"""The arguments of a call that are not its op's."""


def prepare(communicator: Communicator, name: str, args: Sequence[Any], named: dict[str, Any]) -> PreparedOp:
    """See `Communicator.prepare`."""
    if name not in OPS:
        raise ValueError(f"prepare({name!r}): there is no such op; there are {', '.join(OPS)}")
    if options := {"async_op", "timeout"} & named.keys():
        raise TypeError(f"prepare({name!r}): {' and '.join(sorted(options))} belong to each start of the handle")
    signature = inspect.signature(getattr(communicator, name))
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"prepare({name!r}): {error}") from None
    bound.apply_defaults()
    general = _GeneralStart(communicator, name, bound.arguments)
    usual = name in _FAST and all(
        argument in _FAST[name] or value == signature.parameters[argument].default
        for argument, value in bound.arguments.items()
    )
    path = communicator._fast if usual else None
    arguments = tuple(bound.arguments[argument] for argument in _FAST[name]) if usual else ()
    return PreparedOp(path, name, arguments, general, DONE)


class _GeneralStart:
    """Starts an op through the executor, with the arguments that `prepare` has checked."""

    def __init__(self, communicator: Communicator, name: str, arguments: Mapping[str, Any]) -> None:
        self._communicator, self._name = communicator, name
        self._hints = communicator._check.hints(arguments.get("hints"))
        self._arguments = {key: value for key, value in arguments.items() if key not in _OPTIONS}
        self._tensors = list(_tensors_in(tuple(self._arguments.values())))
        self._renew()

    def _renew(self) -> None:
        self._executor = self._communicator._executor
        self._op: CheckedOp = getattr(self._communicator._ops, self._name)(**self._arguments)
        self._shapes = self._shapes_now()

    def _shapes_now(self) -> list[tuple[torch.Size, torch.dtype, int | None]]:
        return [(each.shape, each.dtype, held_bytes(each)) for each in self._tensors]

    def __call__(self, async_op: bool = False, timeout: float | None = None) -> Work:
        # `reconfigure` gives a communicator other ranks: another executor, transport and checks
        if self._communicator._executor is not self._executor or self._shapes_now() != self._shapes:
            self._renew()
        return self._executor.issue(self._op.description, self._op.prepare, async_op, timeout, self._hints)


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Send | Recv):
            yield value.tensor
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
