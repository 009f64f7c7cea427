"""Deltas between two versions of a part: the elements that torch finds changed, verified, none out of place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.store.data.delta import (
    BLOCK,
    WHOLE,
    Delta,
    ElementPiece,
    PackedDelta,
    diff,
    most_of,
    patch,
    to_eight,
)
from holdfast.store.publication import pays
from support.mutations import mutated
from support.weights.peers import site_of

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def record_bytes(piece: ElementPiece, changes: int) -> int:
    """The size of a record of so many changes."""
    blocks = -(-piece.nbytes // piece.itemsize // BLOCK)
    return to_eight(4 * blocks) + to_eight(2 * changes) + to_eight(piece.itemsize * changes)


def size_of(old: torch.Tensor, new: torch.Tensor, piece: ElementPiece) -> int:
    """What a delta takes for a piece: one entry for each element that torch's comparison finds changed."""
    dtype = INTEGERS[piece.itemsize]
    changes = int((piece.of(old).view(dtype) != piece.of(new).view(dtype)).sum())
    size = record_bytes(piece, changes) if changes else 0
    return size if size <= most_of(piece) else WHOLE


OLD, NEW = b"o" * 16, b"n" * 16
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def piece_of(tensor: torch.Tensor) -> ElementPiece:
    return ElementPiece(0, tensor.nbytes, tensor.itemsize)


def cut(region: torch.Tensor, pieces: Sequence[ElementPiece]) -> list[torch.Tensor]:
    return [piece.of(region) for piece in pieces]


def sums(region: torch.Tensor, pieces: Sequence[ElementPiece]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(piece.of(region).numpy().data) for piece in pieces]


def encoded(delta: PackedDelta) -> torch.Tensor:
    data = torch.full((delta.nbytes,), 0xA5, dtype=torch.uint8)
    delta.write(data, OLD, NEW)
    return data


def decoded(data: torch.Tensor, pieces: Sequence[ElementPiece]) -> Delta:
    return Delta.decode(data, OLD, NEW, pieces)


@st.composite
def versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[ElementPiece, ...]]:
    """A part of one to four pieces with gaps between them, and a later version of it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pieces, offset = [], 0
    for _ in range(draw(st.integers(1, 4))):
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        elements = draw(st.sampled_from([0, 1, 3, 63, 64, 65, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 70]))
        pieces.append(ElementPiece(offset, elements * itemsize, itemsize))
        offset += -(-elements * itemsize // 64) * 64 + 64
    old = torch.from_numpy(rng.integers(0, 256, offset, np.uint8))
    new = old.clone()
    for piece in pieces:
        elements = piece.nbytes // piece.itemsize
        share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.24, 0.26, 1.0]))
        where = np.unique(np.append(rng.integers(0, max(elements, 1), int(elements * share)), [0, elements - 1]))
        if share and elements:
            byte = rng.integers(0, piece.itemsize, len(where))
            new[piece.offset + where * piece.itemsize + byte] ^= torch.from_numpy(
                rng.integers(1, 256, len(where), np.uint8)
            )
    return old, new, tuple(pieces)


@given(versions())
def test_the_new_version_is_made_bit_by_bit(case: tuple[torch.Tensor, torch.Tensor, tuple[ElementPiece, ...]]) -> None:
    old, new, pieces = case
    packed = diff(old, new, pieces)
    delta = decoded(encoded(packed), pieces)
    into, before = torch.zeros_like(old), old.clone()
    assert patch(cut(old, pieces), cut(into, pieces), delta, sums(new, pieces)) == delta.whole
    assert torch.equal(old, before), "the base has changed"
    for at, piece in enumerate(pieces):
        if at not in delta.whole:
            assert torch.equal(piece.of(into), piece.of(new))
    for _ in range(2):  # in place, and asked again by a reader that cannot know whether that came to its end
        assert patch(cut(old, pieces), cut(old, pieces), delta, sums(new, pieces)) == delta.whole
        for at, piece in enumerate(pieces):
            assert torch.equal(piece.of(old), piece.of(before if at in delta.whole else new))


@given(versions())
def test_both_kernels_write_the_elements_that_torch_finds_changed(
    case: tuple[torch.Tensor, torch.Tensor, tuple[ElementPiece, ...]],
) -> None:
    old, new, pieces = case
    packed = diff(old, new, pieces)
    assert packed.sizes.tolist() == [size_of(old, new, piece) for piece in pieces]
    assert torch.equal(encoded(diff(old, new, pieces, portable=True)), encoded(packed))


@given(versions())
def test_a_delta_is_never_larger_than_half_of_the_part_and_its_index(
    case: tuple[torch.Tensor, torch.Tensor, tuple[ElementPiece, ...]],
) -> None:
    old, new, pieces = case
    packed = diff(old, new, pieces)
    part = sum(piece.nbytes for piece in pieces)
    assert packed.nbytes <= (part - packed.whole_bytes) // 2 + 56 + 4 * len(pieces)
    for piece, size in zip(pieces, packed.sizes, strict=True):
        same = torch.equal(piece.of(old), piece.of(new))
        assert (size == 0) == same
        assert size == WHOLE or size <= most_of(piece)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    """-0.0 equals 0.0 and no NaN equals itself as numbers; NaNs have many encodings."""
    old = torch.zeros(4096, dtype=dtype)
    old[100] = float("nan")
    new = old.clone()
    new[7] = -0.0
    raw(new)[200 * dtype.itemsize : 201 * dtype.itemsize] = 0xFF
    packed = diff(raw(old), raw(new), [piece_of(old)])
    assert packed.sizes.tolist() == [record_bytes(piece_of(old), 2)]
    into = torch.empty_like(old)
    delta = decoded(encoded(packed), [piece_of(old)])
    assert patch([raw(old)], [raw(into)], delta, sums(raw(new), [piece_of(old)])) == ()
    assert torch.equal(raw(into), raw(new))


def test_a_base_with_other_bytes_is_not_taken_for_the_new_version() -> None:
    old = torch.zeros(3 * 4096, dtype=torch.uint8)
    pieces = [ElementPiece(at, 4096, 2) for at in range(0, len(old), 4096)]
    new = old.clone()
    new[5000] = 1
    delta = decoded(encoded(diff(old, new, pieces)), pieces)
    old[9000] = 7
    into = torch.empty_like(old)
    assert patch(cut(old, pieces), cut(into, pieces), delta, sums(new, pieces)) == (2,)
    assert torch.equal(into[:8192], new[:8192])


@given(
    st.sampled_from(["flip", "cut", "remove", "insert"]),
    st.integers(0, 2**20),
    st.integers(0, 2**10),
    st.sampled_from([1, 2, 4, 8]),
)
def test_a_damaged_delta_writes_nowhere_else_and_is_never_taken_for_good(
    kind: str, where: int, what: int, itemsize: int
) -> None:
    elements = BLOCK + 37
    piece = ElementPiece(64, elements * itemsize, itemsize)
    old = torch.zeros(piece.nbytes + 128, dtype=torch.uint8)
    new = old.clone()
    new[64 : 64 + piece.nbytes : 999] = 5
    good = encoded(diff(old, new, [piece]))
    bad = torch.tensor(list(mutated([good.numpy().tobytes()], kind, where, what)[0]), dtype=torch.uint8)
    into = torch.full_like(old, 9)
    left: tuple[int, ...] = (0,)
    with suppress(CorruptData):
        left = patch([piece.of(old)], [piece.of(into)], decoded(bad, [piece]), sums(new, [piece]))
    assert bool((into[:64] == 9).all()) and bool((into[64 + piece.nbytes :] == 9).all()), "written out of place"
    assert left == (0,) or torch.equal(piece.of(into), piece.of(new))


@pytest.mark.parametrize(
    "counts, places, values",
    [
        ([2, 0], [5, 5], 2),
        ([2, 0], [6, 5], 2),
        ([1, 1], [5, 37], 2),
        ([0, 38], list(range(38)), 38),
        ([1, 2], [5, 6], 2),
        ([0xFFFFFFFF, 3], [5, 6], 2),
        ([0, 0], [], 0),
        ([2, 0], [5, 6], 5),
    ],
    ids=["twice", "descending", "behind the end", "too many", "not enough", "overflow", "empty", "other values"],
)
def test_a_record_of_another_piece_is_refused_before_a_byte_is_written(
    counts: list[int], places: list[int], values: int
) -> None:
    """The piece has 65536 + 37 elements of 2 bytes."""
    piece = ElementPiece(0, 2 * (BLOCK + 37), 2)
    parts = [np.array(counts, "<u4"), np.array(places, "<u2"), np.zeros(values, "<u2")]
    data = b"".join(part.tobytes() + bytes(-part.nbytes % 8) for part in parts)
    into = torch.full((piece.nbytes,), 9, dtype=torch.uint8)
    delta = Delta((piece,), (torch.frombuffer(bytearray(data), dtype=torch.uint8),))
    with pytest.raises(CorruptData, match="record"):
        patch([torch.zeros_like(into)], [into], delta, [0])
    assert bool((into == 9).all())


def test_a_delta_of_other_parts_is_refused() -> None:
    old, new = torch.zeros(4096, dtype=torch.uint8), torch.ones(4096, dtype=torch.uint8)
    piece = piece_of(old)
    data = encoded(diff(old, new, [piece]))
    for base, later, pieces in [(NEW, NEW, [piece]), (OLD, OLD, [piece]), (OLD, NEW, [piece, piece]), (OLD, NEW, [])]:
        with pytest.raises(CorruptData, match="delta"):
            Delta.decode(data, base, later, pieces)


def test_pieces_that_are_no_pieces_are_refused() -> None:
    for nbytes, itemsize in [(8, 3), (7, 2), (-8, 8), (1 << 31, 1)]:
        with pytest.raises(ValueError, match="not up to 1 GiB"):
            ElementPiece(0, nbytes, itemsize)
    small, large = torch.zeros(8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="outside"):
        diff(small, large, [ElementPiece(8, 8, 8)])
    delta = Delta((piece_of(large),), (None,))
    with pytest.raises(ValueError, match="lies in 8 bytes"):
        patch([small], [large], delta, [0])


def test_a_delta_pays_when_it_is_small_and_the_wire_is_slow() -> None:
    whole, tcp, mapped = 512 << 20, 1e9, 12e9
    assert pays(whole // 50, whole, tcp)
    assert not pays(whole, whole, tcp)
    assert not pays(whole // 50, whole, mapped)
    assert not pays(100, 4096, tcp)


TRITON_DIGESTS = """
import numpy as np, torch, xxhash
from contextlib import nullcontext
from types import SimpleNamespace
from hypothesis import given, settings, strategies as st
from holdfast.store.data import digest_kernel
from holdfast.store.data.cuda_copies import Cuda, DeviceDigests
from holdfast.store.data.digest_kernel import begin_digests

data = torch.from_numpy(np.random.default_rng(6).integers(0, 256, 40_000, np.uint8))
near = st.builds(lambda blocks, more: max(241, 1024 * blocks + more), st.integers(0, 18), st.integers(-65, 65))
places = st.integers(0, 2500).map(lambda word: 8 * word)
pieces = st.lists(st.tuples(places, st.integers(241, 19_000) | near), min_size=1)

@settings(max_examples=30, deadline=None, database=None)
@given(pieces=pieces, copied=st.booleans())
def check(pieces, copied):
    cuts = [data[at : at + size] for at, size in pieces]
    into = [torch.zeros(size + 64, dtype=torch.uint8) for _, size in pieces]
    sources, sizes, targets = (
        np.array(each, np.uint64)
        for each in ([cut.data_ptr() for cut in cuts], [cut.nbytes for cut in cuts], [each.data_ptr() for each in into])
    )
    found = begin_digests(sources, sizes, torch.device("cpu"), targets if copied else None)()
    assert found.tolist() == [xxhash.xxh3_64_intdigest(cut.numpy().data) for cut in cuts]
    for cut, each in zip(cuts, into):
        assert torch.equal(each[: cut.nbytes], cut if copied else torch.zeros_like(cut))
        assert not each[cut.nbytes :].any()

check()

class Interpreted(Cuda):
    stream = current_stream = lambda *_, **__: SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    on = lambda *_: nullcontext()

cpu = torch.device("cpu")
DeviceDigests(Interpreted()).compile(cpu)
secret, start = digest_kernel._constants(cpu)
secret.numpy()[3] ^= 1
try:
    DeviceDigests(Interpreted()).compile(cpu)
except RuntimeError as error:
    assert "other checksums than xxhash" in str(error)
    print("equal")
"""


@pytest.mark.thorough
@pytest.mark.skipif(site_of("triton") is None, reason="needs triton: make peers")
def test_the_kernel_for_checksums_gives_the_bits_of_xxhash() -> None:
    """In Triton's interpreter, which has to be chosen before triton is imported: so in a process of its own."""
    path = os.pathsep.join(filter(None, [site_of("triton"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TRITON_INTERPRET": "1"} | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(
        [sys.executable, "-c", TRITON_DIGESTS],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
