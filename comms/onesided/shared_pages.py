"""The shared memory under a tensor's storage, which the peers of a window map.

torch moves a storage into shared memory whole: all views of it follow, and share its file. When the last window over a
storage ends, the storage gets another file with the same contents, at the same address. So all views go on sharing
memory, and peers keep the old file, which no tensor of this process uses any more: what a peer writes late is harmless.

The storage remains in shared memory, as after torch's `share_memory_`: the descriptor that torch keeps for it names the
new file. What a process that it was shared with before writes is no longer seen here, either.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field

import torch

from holdfast.comms.system import forks
from holdfast.comms.system.files import OwnedDescriptor, map_pages, write_all
from holdfast.comms.system.local_causes import check_shared_memory


@dataclass(slots=True)
class _Use:
    """Who needs the pages of a storage as they are, and torch's number of its file once a window shares it."""

    holders: weakref.WeakSet[HeldPages] = field(default_factory=weakref.WeakSet)
    descriptor: OwnedDescriptor | None = None


class _Storages:
    """The storages of this process whose pages are in use, by address. A holder keeps its storage."""

    def __init__(self) -> None:
        self.reset_in_child()
        forks.reset_in_children(self)

    def reset_in_child(self) -> None:
        """A child has no windows of its parent, and may have been forked while the lock was held."""
        self.lock, self.used = threading.Lock(), dict[int, _Use]()

    def hold(self, address: int, holder: HeldPages) -> _Use:
        """Add a holder. The lock is held."""
        if address in self.used and not self.used[address].holders:
            del self.used[address]  # of a storage that may be gone: nobody released its pages
        use = self.used.setdefault(address, _Use())
        use.holders.add(holder)
        return use


_storages = _Storages()
_MAP_FIXED = 0x10


class HeldPages:
    """Keeps the pages under a tensor's storage until `release`: a library knows these, and not the address alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._address = tensor.detach(), tensor.untyped_storage().data_ptr()
        with _storages.lock:
            self._use = _storages.hold(self._address, self)

    def release(self) -> None:
        """Let go; the last one for a storage that windows share leaves its file. Idempotent. Raises OSError."""
        address, use = self._address, self._use
        with _storages.lock:
            if _storages.used.get(address) is not use or self not in use.holders:  # released, or of the parent process
                return
            use.holders.discard(self)
            if not use.holders:
                del _storages.used[address]
                if use.descriptor is not None:
                    _leave_file(address, self._tensor.untyped_storage().nbytes(), use.descriptor)


class SharedPages(HeldPages):
    """The pages of a tensor with elements, in shared memory: `offset` bytes into torch's file `descriptor`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage, self._tensor = tensor.untyped_storage(), tensor.detach()
        with _storages.lock:
            if not storage.is_shared():
                check_shared_memory(
                    storage.nbytes(),
                    "a window",
                    "give the container more, or take a backend whose windows need none",
                )
            self.descriptor = OwnedDescriptor(storage._share_fd_cpu_()[0])
            self.offset = int(tensor.storage_offset()) * tensor.element_size()
            self._address = storage.data_ptr()
            self._use = _storages.hold(self._address, self)
            self._use.descriptor = self.descriptor


def _leave_file(address: int, nbytes: int, descriptor: OwnedDescriptor) -> None:
    """Give the storage at `address` another file with the same contents. Other threads may read it meanwhile."""
    fresh = os.memfd_create("holdfast-left-window", os.MFD_CLOEXEC)
    try:
        os.fchmod(fresh, 0o600)
        write_all(fresh, memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"))
        flags = mmap.MAP_SHARED | _MAP_FIXED
        map_pages(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fresh, 0)
        if descriptor.ours:
            os.dup2(fresh, descriptor, inheritable=False)
    finally:
        os.close(fresh)
