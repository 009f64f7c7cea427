"""Copies and checksums in one pass, and copies of rows: what moves the bytes of the store."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.data.digests import CALL_BYTES, calls, copy_and_digest
from holdfast.store.read import targets
from holdfast.store.read.read_plan import Rows, dense_strides, rows_of


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    source_shift=st.integers(0, 65),
    target_shift=st.integers(0, 65),
    copied=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_pieces_are_copied_and_have_the_checksums_of_xxhash(
    sizes: list[int], source_shift: int, target_shift: int, copied: list[bool]
) -> None:
    source = torch.randint(0, 256, (sum(sizes) + source_shift,), dtype=torch.uint8)[source_shift:]
    target = torch.zeros(sum(sizes) + target_shift + 8, dtype=torch.uint8)
    jobs, at = np.zeros((len(sizes), 5), np.uint64), 0
    expected = target.clone()
    for job, size, whole in zip(jobs, sizes, copied, strict=False):
        job[:3] = source.data_ptr() + at, size, (target.data_ptr() + target_shift + at) * whole
        if whole:
            expected[target_shift + at : target_shift + at + size] = source[at : at + size]
        at += size
    sums = copy_and_digest(jobs)
    assert torch.equal(target, expected)
    ends = np.cumsum([0, *sizes])
    pieces = [source[first:last].numpy() for first, last in itertools.pairwise(ends)]
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(piece.tobytes()) for piece in pieces]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_copies_are_right_with_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
        target = torch.zeros_like(source)
        jobs = np.zeros((20, 5), np.uint64)
        jobs[:, 0] = source.data_ptr() + np.arange(20) * (2 << 20)
        jobs[:, 1] = 2 << 20
        jobs[:, 2] = target.data_ptr() + np.arange(20) * (2 << 20)
        sums = copy_and_digest(jobs)
        assert torch.equal(source, target)
        assert sums.tolist() == [xxhash.xxh3_64_intdigest(piece.numpy().data) for piece in source.chunk(20)]
    finally:
        torch.set_num_threads(before)


def test_calls_move_about_a_gigabyte_each() -> None:
    jobs = np.zeros((9, 5), np.uint64)
    jobs[:, 1] = [CALL_BYTES // 2] * 4 + [3 * CALL_BYTES] + [1] * 4
    assert [(each.start, each.stop) for each in calls(jobs)] == [(0, 2), (2, 4), (4, 5), (5, 9)]


boxes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4)), min_size=0, max_size=4)


@given(box=boxes, itemsize=st.sampled_from([1, 2, 4, 8]), transposed=st.booleans(), cuts=st.lists(st.integers(0, 9999)))
def test_rows_copy_a_box_out_of_pieces_in_any_division(
    box: list[tuple[int, int, int]], itemsize: int, transposed: bool, cuts: list[int]
) -> None:
    """`box` has, along each dimension, a size, and what source and target have besides."""
    sizes = [size for size, _, _ in box]
    there = [size + more for size, more, _ in box]
    here = [size + more for size, _, more in box]
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[itemsize]
    source = np.arange(math.prod(there), dtype=dtype).reshape(there)
    target = np.zeros(here[::-1] if transposed else here, dtype)
    view = target.T if transposed else target
    rows = list(rows_of(sizes, dense_strides(there, itemsize), view.strides, itemsize))
    edges = sorted({0, source.nbytes, *(cut % (source.nbytes + 1) for cut in cuts)})
    flat_source, flat_target = source.reshape(-1).view(np.uint8), memoryview(target).cast("B")
    for first, last in itertools.pairwise(edges):
        for each in rows:
            for part in each.between(first, last):
                _copy(part, flat_source, flat_target, first, last)
    region = tuple(slice(0, size) for size in sizes)
    expected = np.zeros(here, dtype)
    expected[region] = source[region]
    assert np.array_equal(view, expected)


def _copy(rows: Rows, source: np.ndarray, target: memoryview, first: int, last: int) -> None:
    for number in range(rows.rows):
        begin = rows.source + number * rows.source_stride
        assert first <= begin and begin + rows.row_bytes <= last, "a row lies in the piece that it is copied from"
        at = rows.target + number * rows.target_stride
        target[at : at + rows.row_bytes] = source[begin : begin + rows.row_bytes].data


@pytest.mark.parametrize("is_cuda", [False, True])
def test_what_is_read_for_a_device_is_read_into_pinned_memory(monkeypatch: pytest.MonkeyPatch, is_cuda: bool) -> None:
    """A stand-in for a tensor on a device: this machine need not have one, and cannot pin memory without."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **keywords: asked.append(keywords))
    tensor: Any = SimpleNamespace(shape=(3,), dtype=torch.float32, is_cuda=is_cuda)
    targets._copy_of(tensor)
    monkeypatch.undo()
    assert asked == [{"dtype": torch.float32, "device": "cpu", "pin_memory": is_cuda}]
