"""Mappings of files that need no descriptor once they are made, and what processes have mapped.

Python's `mmap` keeps a duplicate of the descriptor, and closes its number whatever file that names by then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHAREABLE_MEMORY = "holdfast-memory"
"""The name of the memfds that processes of this host map from each other."""
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (?P<access>\S{4}) \S+ \S+ \d+ *(?P<name>.*)")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(slots=True)
class Mapping:
    """A mapping of shareable memory in this process. `before_unmap` is called before it goes.

    `registered` says whether devices were told of it; None before that was tried.
    """

    nbytes: int
    writable: bool
    before_unmap: Callable[[], object] = bool
    registered: bool | None = None


_mappings: dict[tuple[int, int], Mapping] = {}
"""By process and address: a forked child has the mappings of its parent, not what these were registered with."""


def mapping_at(address: int) -> Mapping | None:
    """The mapping of shareable memory that begins at an address; None if none does, or a fork made it."""
    return _mappings.get((os.getpid(), address))


def own_mapping(memory: object, address: int, mapping: Mapping) -> None:
    """Unmap what lies at an address once the object `memory` is gone."""
    key = os.getpid(), address
    _mappings[key] = mapping
    weakref.finalize(memory, _unmap, key, mapping.nbytes).atexit = False


def _unmap(key: tuple[int, int], nbytes: int) -> None:
    mapping = _mappings.pop(key, None)
    if mapping is not None and key[0] == os.getpid():
        mapping.before_unmap()
    _libc.munmap(key[1], nbytes)


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


@dataclass(frozen=True, slots=True)
class TouchedPages:
    """The shareable memory of a process that has pages: its bytes, and how many of them are on huge pages."""

    nbytes: int
    huge: int


def touched_pages(pid: int) -> TouchedPages | None:
    """What the kernel says of the shareable memory of a process of this host; None if it does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    nbytes = huge = 0
    own = False
    for line in lines:
        if mapping := _MAPPING.match(line):
            own = mapping["access"] == "rw-s" and mapping["name"].startswith(f"/memfd:{SHAREABLE_MEMORY} ")
        elif own and line.startswith(("Rss:", "ShmemPmdMapped:", "FilePmdMapped:")):
            size = int(line.split()[1]) << 10
            nbytes, huge = (nbytes + size, huge) if line.startswith("Rss:") else (nbytes, huge + size)
    return TouchedPages(nbytes, huge)
