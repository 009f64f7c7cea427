"""`ExposedMemory`: keeps exposed memory valid, whatever the owner does to its tensor (`t.data = ...`, `resize_`).

Other processes have the address of the memory, not the tensor. So the memory is kept while it is exposed, and torch is
told not to resize it (`resize_` raises RuntimeError, as for memory that numpy shares). If the tensor gets other memory
nevertheless, its address or size differs at the owner's next call; other processes would read stale data.
"""

from __future__ import annotations

import torch

from holdfast.comms.errors import RegionGone


class ExposedMemory:
    """The memory that `tensor` has now: `nbytes` at `address`. `held` keeps it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        with torch._C.DisableTorchFunctionSubclass():
            self.held = tensor.detach()
            self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
            refuse_resize(tensor)

    @property
    def moved(self) -> bool:
        """Whether the tensor has other memory now, or another size."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.data_ptr() != self.address or self.tensor.nbytes != self.nbytes

    def vacate(self) -> torch.Tensor:
        """Copy the tensor to other memory, unless it has other memory already. Return a tensor that keeps the old."""
        held, self.held = self.held, torch.empty(0, device="cpu")
        if self.tensor.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
            self.tensor.data = self.tensor.data.clone()
        return held


def refuse_resize(tensor: torch.Tensor) -> None:
    """Make torch refuse to resize the tensor's storage from now on."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def moved_error(what: str) -> RegionGone:
    """The error that the owner gets after its tensor left the exposed memory."""
    return RegionGone(
        f"the tensor of {what} has other memory than when that was made (t.data = ..., set_ or resize_): it is closed; "
        "copy into the tensor in place (copy_), or expose it again"
    )
