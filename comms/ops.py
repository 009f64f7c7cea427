"""`ReduceOp`, and `Send` and `Recv`, the items of a point-to-point batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

ReduceName = Literal["sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum"]


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """A reduction. `factor` scales each input of `premul_sum` and is 1 otherwise.

    AVG and `premul_sum` of floats below 32 bits are computed in float32, where each input is scaled before it is added;
    AVG of integers below 64 bits is computed in int64. The result is rounded once at the end (integers towards zero),
    and an average never overflows. Wider numbers are added in their own dtype and then divided: they overflow where
    their sum does. On nccl and rccl, AVG of floats is the library's own instead: each input is divided by the number of
    ranks, and added in its dtype.
    """

    name: ReduceName
    factor: float | torch.Tensor = 1.0

    SUM: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]

    @staticmethod
    def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
        """The sum of every rank's tensor times that rank's `factor`: a number, or a tensor with one real element.

        A tensor is read when the op runs, on its device: it may be the result of a computation that goes on.
        """
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1 or factor.is_complex():
                raise ValueError(f"a factor must have one real element, not {tuple(factor.shape)} of {factor.dtype}")
            return ReduceOp("premul_sum", factor)
        return ReduceOp("premul_sum", float(factor))


ReduceOp.SUM = ReduceOp("sum")
ReduceOp.PRODUCT = ReduceOp("product")
ReduceOp.MIN = ReduceOp("min")
ReduceOp.MAX = ReduceOp("max")
ReduceOp.AVG = ReduceOp("avg")
ReduceOp.BAND = ReduceOp("band")
ReduceOp.BOR = ReduceOp("bor")
ReduceOp.BXOR = ReduceOp("bxor")


@dataclass(frozen=True, slots=True)
class Send:
    """One send of a batch: `tensor` to rank `dst` under `tag`."""

    tensor: torch.Tensor
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """One receive of a batch: into `tensor` from rank `src` under `tag`."""

    tensor: torch.Tensor
    src: int
    tag: int = 0
