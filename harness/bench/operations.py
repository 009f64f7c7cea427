"""What is measured: the operations, their sizes, and the definitions of algorithm and bus bandwidth.

The definitions are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
with S the size in bytes and t the time of an op, algbw = S / t, and busbw = algbw x a factor that makes the
figure comparable with the speed of the hardware whatever the number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Factor = Literal["1", "(n-1)/n", "2(n-1)/n"]
Layout = Literal["in_place", "scatter", "gather", "exchange", "shift", "counter", "none"]
Kind = Literal["collective", "point to point", "object", "group", "window", "memory plane", "copy"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One op of the bench.

    `size` says what S counts. `layout` fixes the buffers of a rank, with c elements a block and n ranks:
    in_place (c, which is both), scatter (n x c into c), gather (c into n x c), exchange (n x c into n x c),
    shift (c into c), counter (one integer, which is both).

    `kind` is the part of the API it belongs to. `dtype` is the only one it works on, if not any. `once` says that its
    output after many ops is not that after one.
    """

    name: str
    factor: Factor
    layout: Layout
    size: str
    kind: Kind = "collective"
    dtype: str = ""
    once: bool = False

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
        if self.layout in SIZELESS:
            return int(self.layout == "counter")
        return max(1, nbytes // (itemsize * blocks))

    def in_a_row(self, ranks: int) -> float:
        """How many ops may run in a row on one input.

        A sum in place multiplies it by `ranks`, and the sum of an infinite float32 takes another path.
        """
        if not self.once or self.layout != "in_place":
            return math.inf
        return 96 // math.log2(max(2, ranks))

    def lengths(self, block: int, ranks: int) -> tuple[int, int]:
        """Elements of a rank's input and output; an op in place has one buffer for both."""
        many = block * ranks
        return {
            "in_place": (block, block),
            "scatter": (many, block),
            "gather": (block, many),
            "exchange": (many, many),
            "shift": (block, block),
            "counter": (block, block),
            "none": (0, 0),
        }[self.layout]

    def nbytes(self, block: int, itemsize: int, ranks: int) -> int:
        """S: the bytes that algbw counts, the larger of a rank's input and output."""
        return max(self.lengths(block, ranks)) * itemsize


SIZELESS: tuple[Layout, ...] = ("counter", "none")
"""Layouts of ops that have one size only."""

_SHIFTED = "what a rank {} the next"

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", "2(n-1)/n", "in_place", "the tensor of a rank", once=True),
        Operation("all_reduce_async", "2(n-1)/n", "in_place", "the tensor; it is issued, then waited for", once=True),
        Operation(
            "all_reduce_reproducible", "2(n-1)/n", "in_place", "the tensor; only values fix the bits", once=True
        ),
        Operation("reduce", "1", "in_place", "the tensor of a rank; rank 0 gets the sum", once=True),
        Operation("reduce_scatter", "(n-1)/n", "scatter", "the whole input of a rank"),
        Operation("all_gather", "(n-1)/n", "gather", "the whole output of a rank"),
        Operation("broadcast", "1", "in_place", "the tensor of a rank; rank 0 is the source"),
        Operation("all_to_all", "(n-1)/n", "exchange", "the whole input of a rank"),
        Operation("gather", "(n-1)/n", "gather", "the whole output of rank 0"),
        Operation("scatter", "(n-1)/n", "scatter", "the whole input of rank 0"),
        Operation("barrier", "1", "none", "nothing: only its time counts"),
        Operation(
            "send_recv", "1", "shift", "what a rank sends to the next while it receives from the one before",
            kind="point to point",
        ),
        Operation(
            "ping_pong", "1", "shift", "what an even rank sends to the next and gets back: the time is there and back",
            kind="point to point",
        ),
        Operation("broadcast_object", "1", "in_place", "the bytes of rank 0's object", kind="object"),
        Operation("all_gather_object", "(n-1)/n", "gather", "the bytes of all ranks' objects", kind="object"),
        Operation("split", "1", "none", "nothing: a communicator of all ranks is made and closed", kind="group"),
        Operation("put", "1", "shift", _SHIFTED.format("puts into the window of"), kind="window"),
        Operation("get", "1", "shift", "what a rank gets from the window of the one before", kind="window"),
        Operation(
            "fetch_add", "1", "counter", "nothing: an integer in the window of the next rank", kind="window",
            dtype="int64", once=True,
        ),
        Operation(
            "compare_swap", "1", "counter", "nothing: an integer in the window of the next rank", kind="window",
            dtype="int64",
        ),
        Operation("signal", "1", "none", "nothing: each signals the next, awaits the one before", kind="window"),
        Operation(
            "memory_read", "1", "shift", "what a rank reads of the memory of the one before", kind="memory plane"
        ),
        Operation("memory_write", "1", "shift", _SHIFTED.format("writes into the memory of"), kind="memory plane"),
        Operation(
            "copy", "1", "shift", "what a rank copies in its own memory: the machine's bound", kind="copy"
        ),
    )
}  # fmt: skip

DTYPES = ("float32", "float64", "int32", "int64")

SMALL = 64 * 1024
"""Up to this S (bytes) ops are timed in blocks without a barrier: one alone is near the noise of the clock."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of `8`, `64K`, `1M`, `2G` (powers of 1024)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write a number of bytes with K, M or G, such as 64K")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes in a list (`8,4K,1M`) or a range. `8:64M` grows by 8 times up to the end, `8:64M:2` by 2 times."""
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
    """The numbers of ranks in a list (`2,4`) or a range: `2:8` doubles up to the end."""
    counts: list[int] = []
    for part in text.split(","):
        ends: Sequence[str] = [end.strip() for end in part.split(":")]
        if (
            len(ends) > 2
            or not all(end.isdigit() and int(end) >= least for end in ends)
            or int(ends[0]) > int(ends[-1])
        ):
            raise ValueError(f"{text!r} is not a list of numbers of ranks, each {least} or more, such as 2,4 or 2:8")
        count, last = int(ends[0]), int(ends[-1])
        while count < last:
            counts.append(count)
            count *= 2
        counts.append(last)
    return tuple(dict.fromkeys(counts))
