"""Converts torch's reductions, options and timeouts to holdfast's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp


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
