"""The directory of a torchstore store: its keys, volumes and shards, as pure changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.store.torchstore.errors import NoSuchKey
from holdfast.store.torchstore.service.directory import Directory
from holdfast.store.torchstore.service.messages import Allocate, Commit, Locate, decode, encode
from holdfast.store.torchstore.service.records import (
    Content,
    Location,
    Piece,
    StoredBlock,
    StoredObject,
    TensorShard,
    WholeTensor,
    blocks_of,
    check_content,
)

keys = st.lists(st.sampled_from(["", "a", "b", "ab", "v0"]), min_size=1, max_size=3).map(".".join)


def block(value: int = 0) -> StoredBlock:
    return StoredBlock("uint8", (1,), bytes([value]))


def whole(value: int = 0) -> WholeTensor:
    return WholeTensor(block(value))


def shard(place: tuple[int, ...], mesh: tuple[int, ...], value: int = 0, dtype: str = "uint8") -> TensorShard:
    at = place[0]
    piece = Piece(((at, at + 1),), StoredBlock(dtype, (1,), bytes([value])))
    return TensorShard(place, mesh, (mesh[0],), (piece,))


@given(st.lists(keys, unique=True), keys)
def test_a_prefix_finds_the_keys_that_begin_with_its_parts(there: list[str], prefix: str) -> None:
    directory = Directory()
    directory.put("0", {key: whole() for key in there})
    assert directory.keys() == there
    assert directory.keys(prefix) == [key for key in there if f"{key}.".startswith(f"{prefix}.")]


def test_a_put_replaces_the_value_of_its_volume_and_names_what_it_replaced() -> None:
    directory = Directory()
    assert directory.put("0", {"k": whole(1)}) == []
    assert directory.put("0", {"k": whole(2)}) == [block(1)]
    assert directory.find(["k"]) == {"k": (whole(2),)}


def test_readers_get_the_value_of_the_volume_that_was_first() -> None:
    directory = Directory()
    directory.put("1", {"k": whole(1)})
    directory.put("0", {"k": whole(2)})
    assert directory.find(["k"]) == {"k": (whole(1),)}
    directory.put("1", {"k": whole(3)})
    assert directory.find(["k"]) == {"k": (whole(3),)}
    assert directory.delete(["k"]) == [block(3), block(2)]


def test_an_incomplete_key_says_which_shards_are_missing() -> None:
    directory = Directory()
    directory.put("0", {"k": shard((1,), (3,))})
    with pytest.raises(NoSuchKey, match=r"partially committed: 2 of its shards .* \(0,\), \(2,\) of a mesh of \(3,\)"):
        directory.find(["k"])


def test_a_tensor_that_is_put_anew_with_another_dtype_is_there_once_all_shards_have_it() -> None:
    directory = Directory()
    for rank in range(2):
        directory.put(str(rank), {"k": shard((rank,), (2,))})
    directory.put("0", {"k": shard((0,), (2,), dtype="int8")})
    with pytest.raises(NoSuchKey, match="different shapes or dtypes"):
        directory.find(["k"])
    directory.put("1", {"k": shard((1,), (2,), dtype="int8")})
    assert directory.has("k")


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (whole(), shard((0,), (1,)), "a whole tensor, this is shards"),
        (shard((0,), (2,)), whole(), "shards of a DTensor, this is a whole tensor"),
        (StoredObject(block(), ()), whole(), "an object, this is a whole tensor"),
        (shard((0,), (2,)), shard((0,), (3,)), r"mesh of \(2,\), this is one of a mesh of \(3,\)"),
    ],
)
def test_a_key_keeps_its_kind_and_its_mesh(first: Content, second: Content, why: str) -> None:
    directory = Directory()
    directory.put("0", {"k": first})
    with pytest.raises(Mismatch, match=why):
        directory.put("1", {"new": whole(), "k": second})
    assert directory.keys() == ["k"], "a batch that is refused changes nothing"
    directory.delete(["k"])
    directory.put("1", {"k": second})


def test_all_missing_keys_are_named_at_once() -> None:
    directory = Directory()
    directory.put("0", {"there": whole(), "part": shard((0,), (2,))})
    with pytest.raises(NoSuchKey, match=r"'x' is not in the store; 'part' is only partially"):
        directory.find(["x", "there", "part"])


def test_a_delete_ignores_what_is_not_there() -> None:
    directory = Directory()
    directory.put("0", {"k": whole(1)})
    assert directory.delete(["x", "k", "k"]) == [block(1)]
    assert directory.keys() == []


@pytest.mark.parametrize(
    "content",
    [
        WholeTensor(StoredBlock("no_dtype", (1,), b"1")),
        WholeTensor(StoredBlock("uint8", (-1,), b"")),
        WholeTensor(StoredBlock("uint8", (2,), b"1")),
        WholeTensor(StoredBlock("uint8", (1,))),
        WholeTensor(StoredBlock("uint8", (1,), b"1", Location(1, 0))),
        WholeTensor(StoredBlock("uint8", (1,), b"1", None, (1,))),
        WholeTensor(StoredBlock("uint8", (5 << 20,), None, Location(1, 0), (1, 2))),
        StoredObject(StoredBlock("int8", (1,), b"1"), ()),
        TensorShard((2,), (2,), (2,), ()),
        TensorShard((0,), (2, 2), (2,), ()),
        TensorShard((0,), (1,), (2,), (Piece(((0, 3),), StoredBlock("uint8", (3,), b"123")),)),
        TensorShard((0,), (1,), (2,), (Piece(((0, 2),), StoredBlock("uint8", (1,), b"1")),)),
        TensorShard((0,), (1,), (2,), (Piece(((0, 1),), block()), Piece(((1, 2),), StoredBlock("int8", (1,), b"1")))),
    ],
)
def test_a_content_that_no_client_makes_is_refused(content: Content) -> None:
    with pytest.raises(CorruptData):
        check_content(content)


@given(st.binary(max_size=200), st.sampled_from([Allocate, Commit, Locate]))
def test_arbitrary_bytes_are_no_message(data: bytes, kind: type[object]) -> None:
    with pytest.raises(CorruptData):
        decode(data, kind)


@given(st.integers(0, 400), st.integers(0, 7))
def test_a_commit_with_a_flipped_bit_is_refused_or_is_another_valid_commit(where: int, bit: int) -> None:
    contents: dict[str, Content] = {"a": whole(1), "b": shard((1,), (2,)), "c": StoredObject(block(), (block(2),))}
    data = bytearray(encode(Commit(3, "0", contents)))
    data[where % len(data)] ^= 1 << bit
    try:
        found = decode(bytes(data), Commit)
        for content in found.contents.values():
            check_content(content)
    except CorruptData:
        return
    assert all(len(each.inline or b"") == each.nbytes for c in found.contents.values() for each in blocks_of(c))
