"""Mappings of files that need no descriptor once they are made.

Python's `mmap` keeps a duplicate of the descriptor, and closes its number whatever file that names by then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_file(descriptor: int, nbytes: int, *, writable: bool = True) -> memoryview:
    """Map the first bytes of a file, shared, until the returned memory and all views of it are gone."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


def advise(memory: memoryview, advice: int, start: int, nbytes: int) -> None:
    """Call madvise on a part of mapped memory. Raises OSError."""
    address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory)) + start
    if _libc.madvise(address, nbytes, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
