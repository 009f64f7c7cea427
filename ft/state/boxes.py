"""Boxes of a tensor, and their arithmetic: plain tuples, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Box = tuple[tuple[int, int], ...]
"""Along each dimension of a tensor, the first index and the one after the last."""


def whole(shape: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    return tuple([(0, length) for length in shape])  # a list: three times as fast


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def count_of(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(shape_of(box))


def common(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(low < high for low, high in both) else None


def within(part: Box, box: Box) -> Box:
    """`part` of a tensor, counted from the first corner of `box`."""
    return tuple((low - begin, high - begin) for (low, high), (begin, _) in zip(part, box, strict=True))


def moved(part: Box, start: Box, to: Box) -> Box:
    """`part` of a box that begins where `start` does, once the box is moved to begin where `to` does."""
    return tuple(
        (low - begin + at, high - begin + at) for (low, high), (begin, _), (at, _) in zip(part, start, to, strict=True)
    )


def without(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that make up `box` without `hole`, a box inside it; lower corners first."""
    below: list[Box] = []
    above: list[Box] = []
    for dim, ((low, high), (begin, end)) in enumerate(zip(box, hole, strict=True)):
        before, after = hole[:dim], box[dim + 1 :]
        if low < begin:
            below.append((*before, (low, begin), *after))
        if end < high:
            above.append((*before, (end, high), *after))
    return below + above[::-1]


def cover(wanted: Box, boxes: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Divide a box among the boxes that it overlaps with, so that each element is taken once.

    Returned are pairs of a position in `boxes` and what is taken there, and what lies in none of them. Where boxes
    overlap, the first is taken.
    """
    taken: list[tuple[int, Box]] = []
    left = [wanted] if count_of(wanted) else []
    for position, box in enumerate(boxes):
        if not left:
            break
        rest: list[Box] = []
        for piece in left:
            part = common(piece, box)
            if part is None:
                rest.append(piece)
            else:
                taken.append((position, part))
                if part != piece:
                    rest += without(piece, part)
        left = rest
    return taken, left


def stretch(part: Box, box: Box) -> tuple[int, int]:
    """The range of flat indexes in `box` that covers `part`, a box inside it.

    Returned are the first index, and the one after the last.
    """
    first = last = 0
    for (low, high), (begin, end) in zip(part, box, strict=True):
        first = first * (end - begin) + low - begin
        last = last * (end - begin) + high - 1 - begin
    return first, last + 1
