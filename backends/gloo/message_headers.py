"""Headers for a transport that has none: the size and dtype of the message that follows."""

from __future__ import annotations

import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.packing import DTYPES


def of(tensor: torch.Tensor) -> torch.Tensor:
    """Make the header of a message."""
    return torch.tensor([tensor.nbytes, DTYPES.index(tensor.dtype)], dtype=torch.int64, device="cpu")


def check(header: torch.Tensor, tensor: torch.Tensor, src: int, rank: int, tag: int) -> None:
    """Raise `Mismatch` unless the message that follows fits into `tensor`."""
    nbytes, code = header.tolist()
    if (nbytes, DTYPES[code]) != (tensor.nbytes, tensor.dtype):
        raise Mismatch(
            f"rank {src} sent {nbytes} bytes of {DTYPES[code]} under tag {tag}, rank {rank} receives {tensor.nbytes} "
            f"of {tensor.dtype}; both sides must pass the same shape and dtype"
        )
