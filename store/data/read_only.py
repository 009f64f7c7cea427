"""Finds tensors in memory that this process cannot write.

A copy to such memory would end the process, not raise an error.
"""

from __future__ import annotations

import errno
import fcntl
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from holdfast.comms.tensors.overlap import span
from holdfast.comms.tensors.plain_tensors import PlainTensors

Span = tuple[int, int]
MAPS = Path("/proc/self/maps")
MOST_KNOWN = 1 << 17
_NOT_WRITABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .[^w]", re.MULTILINE)

_QUERY = struct.Struct("9Q4I2Q")
"""`struct procmap_query` of linux/fs.h: size, flags, an address; first byte, end and flags of a mapping; ..."""
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17  # since Linux 6.11
_WRITABLE, _COVERING_OR_NEXT = 0x02, 0x10

_writable: dict[int, int] = {0: 0}
"""Addresses, and how many bytes from there were writable when they were looked up. The memory map of a process takes a
millisecond to read, and readers fill the same tensors again and again."""


def read_only(tensors: Mapping[str, torch.Tensor], plain: PlainTensors | None = None) -> set[str]:
    """The names of tensors on the CPU with memory that is mapped without the right to write.

    `plain` describes them, if all are plain.
    """
    known = _writable.get
    spans = _spans(tensors) if plain is None else plain.located
    fresh = {name: (first, first + nbytes) for name, first, nbytes in spans if known(first, -1) < nbytes}
    if not fresh:
        return set()
    ranges = _asked(fresh.values())
    if ranges is None:
        ranges = read_only_ranges()
    starts = [start for start, _ in ranges]
    found = {name for name, where in fresh.items() if _meets(where, starts, ranges)}
    if len(_writable) + len(fresh) > MOST_KNOWN:
        _writable.clear()
    _writable.update((first, end - first) for name, (first, end) in fresh.items() if name not in found)
    return found


def _spans(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, int, int]]:
    """Name, address and size of each tensor on the CPU."""
    for name, tensor in tensors.items():
        if tensor.is_cpu:
            first = tensor.data_ptr()
            yield name, first, tensor.numel() * tensor.itemsize if tensor.is_contiguous() else span(tensor)[1] - first


def read_only_ranges() -> list[Span]:
    """The addresses that are mapped without the right to write, ascending."""
    return [(int(start, 16), int(end, 16)) for start, end in _NOT_WRITABLE.findall(MAPS.read_bytes())]


def _asked(spans: Iterable[Span]) -> list[Span] | None:
    """Those of `read_only_ranges` that spans lie in, ascending; None if the kernel answers no questions about them."""
    found: list[Span] = []
    at = 0
    with MAPS.open("rb", buffering=0) as maps:
        for first, end in sorted(spans):
            at = max(at, first)
            while at < end:
                answer = bytearray(_QUERY.pack(_QUERY.size, _COVERING_OR_NEXT, at, *[0] * 12))
                try:
                    fcntl.ioctl(maps, _PROCMAP_QUERY, answer)
                except OSError as error:
                    if error.errno != errno.ENOENT:
                        return None
                    return found  # nothing is mapped from there on
                start, stop, flags = _QUERY.unpack(answer)[3:6]
                if not flags & _WRITABLE and start < end:
                    found.append((start, stop))
                at = stop
    return found


def _meets(where: Span, starts: list[int], ranges: list[Span]) -> bool:
    at = bisect_right(starts, where[1] - 1) - 1
    return at >= 0 and ranges[at][1] > where[0]
