"""Deltas between two versions of a part, and updates by them.

They have the elements that torch finds changed, are verified, and write nothing out of place. Only what changed is read
where reads are slow, and what cannot be trusted is read whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.comms.errors import CorruptData, RegionGone
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.comms.work import Work
from holdfast.store import WeightStore
from holdfast.store.catalog.records import Catalog, DeltaOffer, Holder, Version
from holdfast.store.catalog.transitions import COUNTS_FOR, RENEWED_AFTER, has_far_readers, note_far_read
from holdfast.store.data.delta import BLOCK, WHOLE, Delta, ElementPiece, PackedDelta, diff, most_of, patch, to_eight
from holdfast.store.publication import pays
from support.children import Start
from support.mutations import damages, mutated
from support.programs.forked_programs import run_python
from support.samples.store_processes import count_reads, move_to_host
from support.weights.peers import site_of
from support.weights.state_dicts import same

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def size_of(old: torch.Tensor, new: torch.Tensor, piece: ElementPiece) -> int:
    """What a delta takes for a piece: one entry for each element that torch's comparison finds changed."""
    dtype = INTEGERS[piece.itemsize]
    changes = int((piece.of(old).view(dtype) != piece.of(new).view(dtype)).sum())
    blocks = -(-piece.nbytes // piece.itemsize // BLOCK)
    record = to_eight(4 * blocks) + to_eight(2 * changes) + to_eight(piece.itemsize * changes)
    size = record if changes else 0
    return size if size <= most_of(piece) else WHOLE


OLD, NEW = b"o" * 16, b"n" * 16


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


Case = tuple[torch.Tensor, torch.Tensor, tuple[ElementPiece, ...]]


@st.composite
def versions(draw: st.DrawFn) -> Case:
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
def test_the_new_version_is_made_bit_by_bit(case: Case) -> None:
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
def test_both_kernels_write_the_elements_that_torch_finds_changed(case: Case) -> None:
    old, new, pieces = case
    packed = diff(old, new, pieces)
    assert packed.sizes.tolist() == [size_of(old, new, piece) for piece in pieces]
    part = sum(piece.nbytes for piece in pieces)
    assert packed.nbytes <= (part - packed.whole_bytes) // 2 + 56 + 4 * len(pieces), "half of it, and its index"
    assert torch.equal(encoded(diff(old, new, pieces, portable=True)), encoded(packed))


@given(damages, st.sampled_from([1, 2, 4, 8]))
def test_a_damaged_delta_writes_nowhere_else_and_is_not_trusted(damage: tuple[str, int, int], itemsize: int) -> None:
    elements = BLOCK + 37
    piece = ElementPiece(64, elements * itemsize, itemsize)
    old = torch.zeros(piece.nbytes + 128, dtype=torch.uint8)
    new = old.clone()
    new[64 : 64 + piece.nbytes : 999] = 5
    good = encoded(diff(old, new, [piece]))
    bad = torch.tensor(list(mutated([good.numpy().tobytes()], *damage)[0]), dtype=torch.uint8)
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
def test_a_wrong_record_is_refused_before_a_byte_is_written(counts: list[int], places: list[int], values: int) -> None:
    """The piece has 65536 + 37 elements of 2 bytes."""
    piece = ElementPiece(0, 2 * (BLOCK + 37), 2)
    parts = [np.array(counts, "<u4"), np.array(places, "<u2"), np.zeros(values, "<u2")]
    data = b"".join(part.tobytes() + bytes(-part.nbytes % 8) for part in parts)
    into = torch.full((piece.nbytes,), 9, dtype=torch.uint8)
    delta = Delta((piece,), (torch.frombuffer(bytearray(data), dtype=torch.uint8),))
    with pytest.raises(CorruptData, match="record"):
        patch([torch.zeros_like(into)], [into], delta, [0])
    assert bool((into == 9).all())


def test_a_delta_of_other_parts_and_pieces_that_are_none_are_refused() -> None:
    old, new = torch.zeros(4096, dtype=torch.uint8), torch.ones(4096, dtype=torch.uint8)
    piece = piece_of(old)
    data = encoded(diff(old, new, [piece]))
    for base, later, pieces in [(NEW, NEW, [piece]), (OLD, OLD, [piece]), (OLD, NEW, [piece, piece]), (OLD, NEW, [])]:
        with pytest.raises(CorruptData, match="delta"):
            Delta.decode(data, base, later, pieces)
    for nbytes, itemsize in [(8, 3), (7, 2), (-8, 8), (1 << 31, 1)]:
        with pytest.raises(ValueError, match="not up to 1 GiB"):
            ElementPiece(0, nbytes, itemsize)
    small, large = torch.zeros(8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="outside"):
        diff(small, large, [ElementPiece(8, 8, 8)])
    delta = Delta((piece_of(large),), (None,))
    with pytest.raises(ValueError, match="lies in 8 bytes"):
        patch([small], [large], delta, [0])


def test_a_delta_is_offered_only_where_it_is_small_and_the_wire_is_slow(store: WeightStore) -> None:
    state = weights()
    store.publish(1, state)
    assert offered(store, 1) is None, "there is no version before"
    step(state, share=1.0)
    state["embedding"] += 1
    store.publish(2, state)
    assert offered(store, 2) is None, "all has changed"
    state["more"] = torch.ones(1000)
    store.publish(3, state)
    assert offered(store, 3) is None, "the layout is another one"
    step(state)
    store.publish(4, state)
    assert offered(store, 4) is not None
    store.publish(5, state)
    assert offered(store, 5) is None, "nothing has changed"
    whole, tcp, mapped = 512 << 20, 1e9, 12e9
    assert pays(whole // 50, whole, tcp)
    assert not pays(whole, whole, tcp)
    assert not pays(whole // 50, whole, mapped)
    assert not pays(100, 4096, tcp)


TRITON_DIGESTS = """
import numpy as np, pytest, torch, xxhash
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
with pytest.raises(RuntimeError, match="other checksums than xxhash"):
    DeviceDigests(Interpreted()).compile(cpu)
print("equal")
"""


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.skipif(site_of("triton") is None, reason="needs triton: make peers")
def test_the_kernel_for_checksums_gives_the_bits_of_xxhash() -> None:
    """In Triton's interpreter, which has to be chosen before triton is imported: so in a process of its own."""
    path = os.pathsep.join(filter(None, [site_of("triton"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TRITON_INTERPRET": "1"} | ({"PYTHONPATH": path} if path else {})
    assert run_python("-c", TRITON_DIGESTS, environ=environment, timeout=880.0) == "equal\n"


# -- updates by delta


def at(catalog: Catalog, number: int) -> Catalog:
    """The catalogue when `number` is the newest version."""
    version = Version(number, 1, 1, None, True, ())
    return Catalog.decode(replace(catalog, versions=(version,)).encode())


def test_a_process_that_reads_every_version_counts_and_a_holder_of_another_host_without_a_note() -> None:
    catalog, changes = Catalog(), 0
    for number in range(1, 10 * RENEWED_AFTER + 1):
        before = at(catalog, number)
        catalog = note_far_read(before, number)
        changes += catalog != before
        assert has_far_readers(catalog, "north")
        assert note_far_read(catalog, max(1, number - 5)) is catalog, "one that is late"
    assert changes == 10
    assert not has_far_readers(at(catalog, number + COUNTS_FOR), "north")
    anew = note_far_read(at(catalog, 3), 3)
    assert anew.far_read == 3 and has_far_readers(anew, "north"), "numbers began anew"
    catalog = Catalog(holders=(Holder("a", Peer("north", 1, 1)),))
    assert has_far_readers(catalog, "south") and not has_far_readers(catalog, "north")


ELEMENTS = 4 << 20


@pytest.fixture
def store(unmapped: None, store: WeightStore) -> WeightStore:
    """A store of which nothing is mapped."""
    return store


def weights() -> dict[str, torch.Tensor]:
    return {
        "large": torch.randn(ELEMENTS, dtype=torch.bfloat16),
        "embedding": torch.randn(1 << 20),
        "small": torch.ones(17, dtype=torch.float64),
    }


def step(state: dict[str, torch.Tensor], share: float = 0.01) -> None:
    """Change a share of the elements of the large tensor, and the small one."""
    where = torch.randint(0, ELEMENTS, (int(ELEMENTS * share),))
    state["large"][where] = torch.randn(len(where), dtype=torch.bfloat16)
    state["small"] += 1


def offered(store: WeightStore, version: int) -> DeltaOffer | None:
    return store._catalog_client.read()[1].shard(version, 0).delta


def nbytes(state: dict[str, torch.Tensor]) -> int:
    return sum(each.nbytes for each in state.values())


def read_first(store: WeightStore) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Version 1, and the tensors of a reader that has got it."""
    state, into = weights(), weights()
    store.publish(1, state)
    store.get(1, into)
    return state, into


def update(store: WeightStore, version: int, state: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> int:
    """Publish `state` as the newest version, and get it; returns how many bytes are read for that."""
    sizes = count_reads(store._plane)
    store.publish(version, state)
    assert store.get("latest", into) == version
    assert same(state, into)
    return sum(sizes)


def test_a_reader_of_the_version_before_reads_what_changed_there_or_in_its_own(store: WeightStore) -> None:
    state, into = weights(), weights()
    assert update(store, 1, state, into) > nbytes(state)
    for version, share in ((2, 1 / 20), (3, 1 / 20), (4, 1 / 2)):
        if version == 4:  # the piece that its reader has changed is read whole
            into["large"][5] = 100.0
        step(state)
        assert update(store, version, state, into) < nbytes(state) * share


def test_what_is_read_through_a_copy_keeps_no_other_tensor_from_deltas(store: WeightStore) -> None:
    """Filters in `torch.channels_last` are: their copy is gone by the next read."""
    state, into = (
        {"filters": torch.randn(64, 64, 3, 3).to(memory_format=torch.channels_last)} | weights() for _ in range(2)
    )
    for version in (1, 2, 3):
        step(state)
        state["filters"] += 1
        read = update(store, version, state, into)
        assert (read < into["filters"].nbytes + nbytes(state) / 20) == (version > 1)


def test_a_reader_that_has_no_whole_piece_of_the_base_reads_no_delta(store: WeightStore) -> None:
    """Small tensors share a piece, and the copy of the filters is gone."""
    filters = torch.randn(400, 400, 3, 3).to(memory_format=torch.channels_last)
    state = {"filters": filters, "one": torch.ones(17), "two": torch.ones(17)}
    into = {name: torch.zeros_like(each) for name, each in state.items()}
    for version in (1, 2):
        state["filters"][:, 0] += 1
        assert nbytes(state) < update(store, version, state, into) < nbytes(state) + filters.nbytes / 20
    assert offered(store, 2) is not None


def test_targets_that_are_not_dense_are_filled_where_nothing_is_mapped(store: WeightStore) -> None:
    state = {"rows": torch.randn(2, 1 << 20), "one": torch.tensor([3.0])}
    update(store, 1, state, {"rows": torch.zeros(2, 1 << 21)[:, : 1 << 20], "one": torch.zeros(5)[::5]})


def test_a_target_whose_storage_was_resized_counts_as_freed(store: WeightStore) -> None:
    """FSDP frees the memory of parameters so."""
    state, into = read_first(store)
    into["large"].untyped_storage().resize_(0)
    step(state)
    large = state["large"].nbytes
    assert large < update(store, 2, state, weights()) < large + nbytes(state) / 20


def test_of_several_readers_of_the_base_the_one_with_most_of_it_left_serves(store: WeightStore) -> None:
    state, whole = read_first(store)
    part = weights()
    store.get(1, part)
    del part["large"]
    step(state)
    assert update(store, 2, state, weights()) < nbytes(state) / 20 and whole


def test_a_reader_that_has_freed_the_base_gets_the_whole(store: WeightStore) -> None:
    state, into = read_first(store)
    into = weights()
    step(state)
    assert update(store, 2, state, into) > nbytes(state)
    assert offered(store, 2) is not None


def test_a_prefetching_reader_makes_the_next_version_beside_the_one_it_serves(store: WeightStore) -> None:
    state, first = read_first(store)
    buffers = [first, weights()]
    for version in (2, 3, 4):
        served = {name: each.clone() for name, each in buffers[version % 2].items()}
        step(state)
        assert update(store, version, state, buffers[1 - version % 2]) < nbytes(state) / 20
        assert same(buffers[version % 2], served), "the served weights have changed"


@pytest.mark.parametrize("where", [0, 60, -1000, None], ids=["header", "sizes", "records", "gone"])
def test_a_damaged_delta_is_never_taken_for_the_new_version(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, where: int | None
) -> None:
    state, into = read_first(store)
    step(state)
    store.publish(2, state)

    delta, read = offered(store, 2).handle, store._plane.read

    def damaged(handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30) -> Work:
        work = read(handle, into, offset, timeout=timeout)
        if handle == delta and where is None:
            raise RegionGone("the holder has closed it")
        if handle == delta:
            into[where] ^= 1
        return work

    monkeypatch.setattr(store._plane, "read", damaged)
    store.get(2, into)
    assert same(state, into)


def test_no_delta_is_made_where_parts_are_mapped() -> None:
    with WeightStore("memory://mapped-parts") as store:
        state, into = read_first(store)
        step(state)
        store.publish(2, state)
        assert offered(store, 2) is None
        store.get(2, into)
        assert same(state, into)


@pytest.mark.parametrize("hold", [True, False], ids=["holds", "reads"])
def test_another_host_gets_what_changed(start: Start, url: str, monkeypatch: pytest.MonkeyPatch, hold: bool) -> None:
    """One that only reads is noted in the catalogue by its first get, so the next version has a delta for it."""

    def be_far_away(pipe: Connection) -> None:
        """Get each version that the pipe asks for; sends how many bytes its replica and the get have read."""
        move_to_host("south")
        pipe.recv()
        with WeightStore(url, plane="ucx", hold=hold) as store:
            into, sizes = weights(), count_reads(store._plane)
            pipe.send("open")
            while (version := pipe.recv()) != "end":
                store.get(version, into)
                pipe.send((sum(sizes), into["large"].float().sum().item()))
                sizes.clear()

    monkeypatch.setenv("UCX_TLS", "tcp,self")
    far = start(be_far_away)
    with WeightStore(url, plane="ucx", replicas=2 if hold else 1) as store:
        far.tell("open")
        assert far.hear() == "open"
        state = weights()
        for version in (1, 2, 3):
            step(state)
            store.publish(version, state)
            assert (offered(store, version) is None) == (version == 1)
            far.tell(version)
            read, total = far.hear()
            assert total == state["large"].float().sum().item()
            assert read > nbytes(state) if version == 1 else read < nbytes(state) / 10
        far.tell("end")
        far.end()


# -- memory


def test_deltas_count_towards_the_limit_and_go_with_their_version(unmapped: None, tmp_path: Path) -> None:
    with WeightStore(f"memory://{tmp_path}", limit=1 << 30) as store:
        state = weights()
        store.publish(1, state)
        before = store._replica_holder.pool.used
        step(state)
        store.publish(2, state)
        offer = offered(store, 2)
        (shown,) = store.inspect().report().holders
        parts = sum(store.inspect().report().versions[number].nbytes for number in (0, 1))
        assert shown.nbytes == parts + offer.handle.nbytes
        assert store._replica_holder.pool.used >= 2 * before + offer.handle.nbytes
        store.delete(2)
        store.publish(3, weights())  # nothing of it is as it was
        assert offered(store, 3) is None
        assert store._replica_holder.pool.used == 2 * before


def test_a_part_takes_the_room_of_deltas(unmapped: None, tmp_path: Path) -> None:
    """The limit has room for the parts alone: each publish goes well, and readers read what has no delta whole."""
    state, into = weights(), weights()
    room = 3 * (nbytes(state) + (1 << 20))
    with WeightStore(f"memory://{tmp_path}", limit=room) as store:
        for version in range(1, 7):
            step(state)
            store.publish(version, state, timeout=5.0)
            assert store._replica_holder.pool.used <= room
            store.get(version, into)
            assert same(state, into)
