"""Yield the processor, and access words at an address: the parts of waits and atomics on the CPU."""

from __future__ import annotations

import ctypes

from holdfast.comms._native import Words

yield_cpu = ctypes.CDLL(None).sched_yield
"""Yield the processor. Releases the GIL, which os.sched_yield does not."""


def words_at(address: int, count: int) -> Words:
    """The words at an address; it must stay mapped while they are used."""
    return Words((ctypes.c_uint64 * count).from_address(address))


def change(address: int, itemsize: int, add: bool, first: int, second: int) -> int:
    """Add `first` to an integer of `itemsize` bytes, or swap `first` for `second`; returns the old value.

    `itemsize` is 4 or 8; an addition wraps around. Atomic only among callers that hold the same lock.
    """
    place = (ctypes.c_int32 if itemsize == 4 else ctypes.c_int64).from_address(address)
    old = int(place.value)
    if add:
        place.value = old + first
    elif old == first:
        place.value = second
    return old
