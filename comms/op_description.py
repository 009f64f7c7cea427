"""`OpDescription`: an op's name, size and tensors, for the executor, agreement checks, journals and observers."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import msgspec
import torch

from holdfast.comms.ops import ReduceOp

OpTensors = torch.Tensor | tuple[torch.Tensor, ...] | None
"""The tensors that must agree on all ranks, in dtype and shape."""


class OpDescription(msgspec.Struct, frozen=True):
    """One op of one rank, described once. `nbytes` is the size of this rank's input.

    `agreed()` returns the text that must be equal on all ranks; it is None for point-to-point ops. `detail` tells
    journals what else must agree (a reduction, a tag). `peer` is the root or the other side, -1 if there is none.
    `inputs` and `outputs` are for hooks: the tensors that this rank reads and writes.
    """

    name: str
    nbytes: int
    agreed: Callable[[], str] | None
    tensors: OpTensors = None
    detail: Hashable = None
    peer: int = -1
    inputs: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    reduction: ReduceOp | None = None

    @property
    def collective(self) -> bool:
        """Whether all ranks issue this op alike."""
        return self.agreed is not None
