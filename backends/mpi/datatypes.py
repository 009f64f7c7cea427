"""Translate torch dtypes and reductions to MPI's, where Open MPI reduces as torch does.

The 16-bit floats have no MPI datatype. MPI's MIN and MAX of floats drop NaNs, which torch and numpy keep. Both use
holdfast's own algorithms over MPI's messages.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from holdfast.comms.ops import ReduceOp

_INTEGERS = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_SUMS = {"sum": MPI.SUM, "avg": MPI.SUM, "premul_sum": MPI.SUM, "product": MPI.PROD}
_ORDERS = {"min": MPI.MIN, "max": MPI.MAX, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
_OF_BOOL = {"sum": MPI.MAX, "product": MPI.MIN, **_ORDERS}

Native = tuple[MPI.Datatype, MPI.Op]

_NATIVE: dict[tuple[torch.dtype, str], Native] = {
    **{(dtype, name): (mpi, op) for dtype, mpi in _FLOATS.items() for name, op in _SUMS.items()},
    **{(dtype, name): (mpi, op) for dtype, mpi in _INTEGERS.items() for name, op in (_SUMS | _ORDERS).items()},
    **{(torch.bool, name): (MPI.UINT8_T, op) for name, op in _OF_BOOL.items()},
}


def native(dtype: torch.dtype, op: ReduceOp) -> Native | None:
    """MPI's datatype and operation; None where MPI has none, or its results differ from torch's."""
    return _NATIVE.get((dtype, op.name))
