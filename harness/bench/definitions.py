"""What is measured: the operations, their sizes, and the definitions of algorithm and bus bandwidth.

The definitions are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
with S the size in bytes and t the time of an op, algbw = S / t, and busbw = algbw x a factor that makes the
figure comparable with the speed of the hardware whatever the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Factor = Literal["1", "(n-1)/n", "2(n-1)/n"]
Layout = Literal["in_place", "scatter", "gather", "exchange", "shift", "none"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One op of the bench.

    `size` says what S counts. `layout` fixes the buffers of a rank, with c elements a block and n ranks:
    in_place (c, which is both), scatter (n x c into c), gather (c into n x c), exchange (n x c into n x c),
    shift (c into c).
    """

    name: str
    factor: Factor
    layout: Layout
    size: str

    def bus_factor(self, ranks: int) -> float:
        """busbw / algbw on `ranks` ranks."""
        match self.factor:
            case "(n-1)/n":
                return (ranks - 1) / ranks
            case "2(n-1)/n":
                return 2 * (ranks - 1) / ranks
            case _:
                return 1.0

    def block(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Elements c of a block so that S is `nbytes`, rounded down, and at least one element."""
        blocks = ranks if self.layout in ("scatter", "gather", "exchange") else 1
        return 0 if self.layout == "none" else max(1, nbytes // (itemsize * blocks))

    def lengths(self, block: int, ranks: int) -> tuple[int, int]:
        """Elements of the input and of the output of a rank; the output of an op in place is its input."""
        many = block * ranks
        return {
            "in_place": (block, block),
            "scatter": (many, block),
            "gather": (block, many),
            "exchange": (many, many),
            "shift": (block, block),
            "none": (0, 0),
        }[self.layout]

    def nbytes(self, block: int, itemsize: int, ranks: int) -> int:
        """S: the bytes that algbw counts, the larger of a rank's input and output."""
        return max(self.lengths(block, ranks)) * itemsize


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", "2(n-1)/n", "in_place", "the tensor of a rank"),
        Operation("reduce_scatter", "(n-1)/n", "scatter", "the whole input of a rank"),
        Operation("all_gather", "(n-1)/n", "gather", "the whole output of a rank"),
        Operation("broadcast", "1", "in_place", "the tensor of a rank; rank 0 is the source"),
        Operation("all_to_all", "(n-1)/n", "exchange", "the whole input of a rank"),
        Operation("send_recv", "1", "shift", "what a rank sends to the next while it receives from the one before"),
        Operation("barrier", "1", "none", "nothing: only its time counts"),
        Operation(
            "copy",
            "1",
            "shift",
            "what a rank copies in its own memory; no communication: the machine's bound",
        ),
    )
}

DTYPES = ("float32", "float64", "int32", "int64")

SMALL = 64 * 1024
"""Up to this S (bytes) an op is timed in blocks without a barrier in between, as one op is near the clock's noise."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of `8`, `64K`, `1M`, `2G` (powers of 1024)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write a number of bytes with K, M or G, such as 64K")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes of `8,4K,1M`, of the range `8:64M` (each 8 times the one before, and the end), or of `8:64M:2`
    (2 times).
    """
    sizes: set[int] = set()
    for part in text.split(","):
        ends = part.split(":")
        if len(ends) == 1:
            sizes.add(parse_size(part))
            continue
        if len(ends) > 3 or (len(ends) == 3 and (not ends[2].isdigit() or int(ends[2]) < 2)):
            raise ValueError(f"{part!r} is not a range of sizes: write first:last or first:last:factor, factor >= 2")
        size, last = parse_size(ends[0]), parse_size(ends[1])
        factor = int(ends[2]) if len(ends) == 3 else 8
        if size > last:
            raise ValueError(f"{part!r} is empty: {ends[0]} is larger than {ends[1]}")
        while size < last:
            sizes.add(size)
            size *= factor
        sizes.add(last)
    return tuple(sorted(sizes))


def parse_counts(text: str, least: int = 1) -> tuple[int, ...]:
    """Numbers of ranks, as `2,4`."""
    counts: Sequence[str] = text.split(",")
    if not all(count.strip().isdigit() and int(count) >= least for count in counts):
        raise ValueError(f"{text!r} is not a list of numbers of ranks, each {least} or more, such as 2,4")
    return tuple(dict.fromkeys(int(count) for count in counts))


def show_size(nbytes: int) -> str:
    """`nbytes` as people say it: 8 B, 64 KiB, 1 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
