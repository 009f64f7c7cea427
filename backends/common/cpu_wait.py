"""What a wait and an atomic on this processor are made of."""

from __future__ import annotations

import ctypes

from holdfast.comms._native import Words

yield_cpu = ctypes.CDLL(None).sched_yield
"""Let another thread have the processor. Lets go of the GIL, which os.sched_yield does not."""


def words_at(address: int, count: int) -> Words:
    """The words that lie at an address, which must stay mapped as long as they are used."""
    return Words((ctypes.c_uint64 * count).from_address(address))


def change(address: int, itemsize: int, add: bool, first: int, second: int) -> int:
    """Add `first` to an integer of 4 or 8 bytes, wrapping around, or else swap `first` for `second`; what it was.

    Atomic with regard to those alone who hold the same lock.
    """
    place = (ctypes.c_int32 if itemsize == 4 else ctypes.c_int64).from_address(address)
    old = int(place.value)
    if add:
        place.value = old + first
    elif old == first:
        place.value = second
    return old
