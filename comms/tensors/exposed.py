"""Memory that others may reach, whatever its owner does to the tensor (`t.data = ...`, `set_`, `resize_`).

Others have the address of the memory, not the tensor. So the memory is held as long as they do, and torch is told not
to resize it (it raises RuntimeError, as for memory that numpy shares). A tensor that was given other memory all the
same is found out by its address and size at the owner's next call: others would read what the owner no longer writes.
"""

from __future__ import annotations

import torch

from holdfast.comms.errors import RegionGone


class ExposedMemory:
    """The memory that `tensor` has now, at `address`, of `nbytes`; `held` keeps it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        with torch._C.DisableTorchFunctionSubclass():
            self.held = tensor.detach()
            self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
            fix_size(tensor)

    @property
    def moved(self) -> bool:
        """Whether the tensor has other memory now, or another size."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.data_ptr() != self.address or self.tensor.nbytes != self.nbytes

    def vacate(self) -> torch.Tensor:
        """Give the tensor other memory, with what it holds, unless it has left this already. What keeps this memory
        from now on.
        """
        held, self.held = self.held, torch.empty(0, device="cpu")
        if self.tensor.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
            self.tensor.data = self.tensor.data.clone()
        return held


def fix_size(tensor: torch.Tensor) -> None:
    """Let torch refuse to resize the tensor's storage from now on."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def moved_away(what: str) -> RegionGone:
    """What the owner gets whose tensor has left the memory that is exposed."""
    return RegionGone(
        f"the tensor of {what} has other memory than when that was made (t.data = ..., set_ or resize_): it is closed; "
        "copy into the tensor in place (copy_), or expose it again"
    )
