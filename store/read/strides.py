"""Copies between two arrays, divided into rows of adjacent bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Rows(NamedTuple):
    """`rows` rows of `row_bytes` bytes: where the first begins in source and target, and how far apart they are."""

    source: int
    target: int
    rows: int
    row_bytes: int
    source_stride: int
    target_stride: int

    def between(self, first: int, last: int) -> Iterator[Rows]:
        """What is copied of the source's bytes `first` to `last` (exclusive): at most three copies."""
        if self.rows == 1 or self.row_bytes == self.source_stride == self.target_stride:
            begin, end = max(first, self.source), min(last, self.source + self.rows * self.row_bytes)
            if begin < end:
                yield Rows(begin, self.target + begin - self.source, 1, end - begin, 0, 0)
            return
        whole_from = max(0, -(-(first - self.source) // self.source_stride))
        whole_to = min(self.rows, (last - self.row_bytes - self.source) // self.source_stride + 1)
        touched_from = max(0, (first - self.row_bytes - self.source) // self.source_stride + 1)
        touched_to = min(self.rows, -(-(last - self.source) // self.source_stride))
        if whole_from >= whole_to:
            whole_from = whole_to = touched_from
        for number in (*range(touched_from, whole_from), *range(whole_to, touched_to)):
            start = self.source + number * self.source_stride
            begin, end = max(first, start), min(last, start + self.row_bytes)
            if begin < end:
                target = self.target + number * self.target_stride + begin - start
                yield Rows(begin, target, 1, end - begin, 0, 0)
        if whole_from < whole_to:
            yield Rows(
                self.source + whole_from * self.source_stride,
                self.target + whole_from * self.target_stride,
                whole_to - whole_from,
                self.row_bytes,
                self.source_stride,
                self.target_stride,
            )


def rows_of(
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    itemsize: int,
    source: int = 0,
    target: int = 0,
) -> Iterator[Rows]:
    """The rows of a copy of `sizes` elements, given strides in bytes, and the first byte in source and target.

    The last dimension of both must be dense. Nothing is copied if a size is 0.
    """
    if 0 in sizes:
        return
    run = itemsize
    dims: list[tuple[int, int, int]] = []
    for size, there, here in zip(reversed(sizes), reversed(source_strides), reversed(target_strides), strict=True):
        if size == 1:
            continue
        if not dims and there == here == run:
            run *= size
        else:
            dims.append((size, there, here))
    if not dims:
        yield Rows(source, target, 1, run, 0, 0)
        return
    (rows, source_stride, target_stride), *outer = dims
    for place in itertools.product(*(range(size) for size, _, _ in outer)):
        there = sum(at * stride for at, (_, stride, _) in zip(place, outer, strict=True))
        here = sum(at * stride for at, (_, _, stride) in zip(place, outer, strict=True))
        yield Rows(source + there, target + here, rows, run, source_stride, target_stride)


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of a row-major array."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
