"""The record of a torchstore store: its keys, volumes and shards, and its memory, as pure changes."""

from __future__ import annotations

from contextlib import closing, suppress
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.errors import NoSuchKey
from holdfast.store.torchstore import record
from support.mutations import damages, mutated

_urls = map("torchstore-directory-{}".format, count())
keys = st.lists(st.sampled_from(["", "a", "b", "ab", "v0"]), min_size=1, max_size=3).map(".".join)
WHOLE, OBJECT = record.Form("tensor", (1,), "uint8"), record.Form("object", (0,))


def shard(place: int, mesh: int, dtype: str = "uint8") -> record.Form:
    return record.Form("shard", (mesh,), dtype, (place,), (mesh,))


def part(forms: dict[str, record.Form], volume: str = "0", grant: int = 0, value: bytes = b"") -> record.KeyPart:
    kinds = tuple(dict.fromkeys(forms.values()))
    numbers = {key: kinds.index(form) for key, form in forms.items()}
    return record.KeyPart(volume, kinds, numbers, b"digest", 0, len(value), grant, value)


def after(*changes: record.KeyPart | record.Deleted) -> record.Directory:
    """The directory after changes, each of which is checked, by way of a snapshot."""
    directory = record.Directory(record.Snapshot())
    for each in changes:
        if isinstance(each, record.KeyPart):
            directory.check(each)
        directory.apply(each)
    return record.Directory(directory.snapshot())


def values(directory: record.Directory, key: str) -> list[bytes]:
    return [each.inline for each in directory.find([key])[key]]


@given(st.lists(keys, unique=True, min_size=1), keys)
def test_a_prefix_finds_the_keys_that_begin_with_its_parts(there: list[str], prefix: str) -> None:
    directory = after(part(dict.fromkeys(there, WHOLE)))
    assert directory.keys() == there
    assert directory.keys(prefix) == [key for key in there if f"{key}.".startswith(f"{prefix}.")]


def test_readers_get_the_value_of_the_volume_that_was_first_and_a_put_replaces_that_of_its_own() -> None:
    one, other = part({"k": WHOLE}, "1", value=b"1"), part({"k": WHOLE}, "0", value=b"2")
    assert values(after(one, other), "k") == [b"1"]
    directory = after(one, other, part({"k": WHOLE}, "1", value=b"3"))
    assert values(directory, "k") == [b"3"]
    directory.apply(record.Deleted(("k",)))
    assert directory.keys() == [] and directory.grants == set()
    directory = after(part({"k": WHOLE, "other": WHOLE}, grant=1), part({"k": WHOLE}, grant=2))
    assert directory.grants == {1, 2}
    assert after(part({"k": WHOLE}, grant=1), part({"k": WHOLE}, grant=2)).grants == {2}


def test_a_tensor_that_is_put_anew_with_another_dtype_is_there_once_all_shards_have_it() -> None:
    parts = [part({"k": shard(rank, 2)}, str(rank)) for rank in range(2)]
    anew = [part({"k": shard(rank, 2, "int8")}, str(rank)) for rank in range(2)]
    with pytest.raises(NoSuchKey, match="different shapes or dtypes"):
        after(*parts, anew[0]).find(["k"])
    assert after(*parts, *anew).has("k")


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (WHOLE, shard(0, 1), "a whole tensor, this is shards"),
        (shard(0, 2), WHOLE, "shards of a DTensor, this is a whole tensor"),
        (OBJECT, WHOLE, "an object, this is a whole tensor"),
        (shard(0, 2), shard(0, 3), r"mesh of \(2,\), this is one of a mesh of \(3,\)"),
    ],
)
def test_a_key_keeps_its_kind_and_its_mesh(first: record.Form, second: record.Form, why: str) -> None:
    with pytest.raises(Mismatch, match=why):
        after(part({"k": first}), part({"new": WHOLE, "k": second}, "1"))
    after(part({"k": first}), record.Deleted(("k",)), part({"k": second}, "1"))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.sets(st.integers(0, 90), min_size=1)), max_size=20))
def test_processes_that_look_at_different_times_see_what_a_dict_would(steps: list[tuple[bool, int, set[int]]]) -> None:
    url = f"memory://{next(_urls)}"
    with (
        closing(record.RecordClient(url)) as one,
        closing(record.RecordClient(url)) as other,
        closing(record.RecordClient(url)) as late,
    ):
        expected = dict[str, bytes]()
        for number, (puts, which, names) in enumerate(steps):
            chosen = dict.fromkeys(sorted(f"k{name}" for name in names), number.to_bytes(2, "big"))
            change = (
                part(dict.fromkeys(chosen, WHOLE), value=number.to_bytes(2, "big"))
                if puts
                else record.Deleted((*chosen,))
            )
            (one, other)[which].commit(change, lambda _: None)
            gone = {} if puts else chosen
            expected = {key: value for key, value in (expected | chosen).items() if key not in gone}
        for client in (one, other, late):
            found = client.read(lambda now: now.find(expected))
            assert {key: held.inline for key, (held,) in found.items()} == expected
            assert sorted(client.read(lambda now: now.keys())) == sorted(expected)


def test_a_change_that_is_refused_changes_nothing() -> None:
    with closing(record.RecordClient(f"memory://{next(_urls)}")) as client:
        client.commit(part({"k": WHOLE}), lambda _: None)
        refused = part({"new": WHOLE, "k": OBJECT})
        with pytest.raises(Mismatch):
            client.commit(refused, lambda now: now.check(refused))
        assert client.read(lambda now: now.keys()) == ["k"]


@given(damages)
def test_damaged_changes_are_refused_or_are_other_changes(damage: tuple[str, int, int]) -> None:
    changes = (part({"a": WHOLE, "b": shard(1, 2)}, value=b"value"), record.Deleted(("c",)))
    (damaged,) = mutated([replace(record.EMPTY, base=3, changes=changes).encode()], *damage)
    with suppress(CorruptData):
        assert isinstance(record.StoreRecord.decode(damaged), record.StoreRecord)


ME = Peer("host", 1, 1)


def granted(now: record.StoreRecord, nbytes: int) -> record.StoreRecord:
    """The memory after the owner has added a slab for a claim."""
    size, count = record.sizes(nbytes)
    first = max((each.first + each.count for each in now.slabs), default=1)
    return record.add(now, record.Slab(first, Handle("shm", b"", size * count), size, count))


def grant_of(now: record.StoreRecord, claim: int) -> int | None:
    """The memory that a claim fills; None while it waits."""
    found = now.claim_of(claim)
    return found.grants[0] if found and found.grants else None


class _Puts(RuleBasedStateMachine):
    """Puts and reads, each a claim. `used` is what the directory has: the grants in which values lie."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.used, self.last = record.EMPTY, set[int](), 0
        self.filling, self.reading = dict[int, int](), dict[int, set[int]]()

    @rule(nbytes=st.sampled_from([1000, 100_000, 1 << 20]))
    def begin_a_put(self, nbytes: int) -> None:
        self.last += 1
        self.claim(self.last, nbytes)

    def claim(self, id_: int, nbytes: int, ahead: bool = False) -> None:
        self.now = record.claim(self.now, id_, ME, nbytes, self.used, ahead)
        if grant_of(self.now, id_) is None:
            self.now = granted(self.now, nbytes)
        found = grant_of(self.now, id_)
        assert found is not None and self.now.slab_of(found).size >= nbytes
        assert found not in {*self.used, *self.filling.values()}.union(*self.reading.values())
        self.filling[id_] = found

    @precondition(lambda self: self.filling)
    @rule(commits=st.booleans(), goes_on=st.booleans(), data=st.data())
    def end_a_put(self, commits: bool, goes_on: bool, data: Any) -> None:
        """Its claim ends, or is one on memory for the next put."""
        claim = data.draw(st.sampled_from(sorted(self.filling)))
        grant = self.filling.pop(claim)
        if commits:
            self.used.add(grant)
        if goes_on:
            self.claim(claim, 100_000, ahead=True)
        else:
            self.now = record.release(self.now, {claim})

    @precondition(lambda self: self.used)
    @rule()
    def begin_a_read(self) -> None:
        self.last += 1
        self.reading[self.last] = set(self.used)
        self.now = record.lease(self.now, self.last, ME, sorted(self.used))

    @precondition(lambda self: self.reading)
    @rule()
    def end_a_read(self) -> None:
        claim, _ = self.reading.popitem()
        self.now = record.release(self.now, {claim})

    @precondition(lambda self: self.used)
    @rule()
    def delete_a_value(self) -> None:
        self.used.pop()

    @rule()
    def let_go_what_is_too_much(self) -> None:
        self.now = record.without_surplus(self.now, self.used)

    @invariant()
    def what_is_needed_is_there(self) -> None:
        there = {grant for slab in self.now.slabs for grant in slab.grants}
        assert there >= {*self.used, *self.filling.values()}.union(*self.reading.values())


TestPuts = _Puts.TestCase


def test_free_memory_serves_the_next_value_of_about_its_size_and_goes_beyond_what_is_in_use() -> None:
    now = record.release(granted(record.claim(record.EMPTY, 1, ME, 8 << 20, ()), 8 << 20), {1})
    for nbytes, found in ((8 << 20, 1), (5 << 20, 1), (1000, None), (9 << 20, None)):
        assert grant_of(record.claim(now, 2, ME, nbytes, ()), 2) == found, nbytes
    assert grant_of(record.claim(now, 2, ME, 8 << 20, {1}), 2) is None, "a value lies in it"
    now = record.EMPTY
    for number in range(1, 5):
        now = granted(record.claim(now, number, ME, record.SPARE_BYTES, ()), record.SPARE_BYTES)
    assert record.without_surplus(now, ()) == now, "all are claimed"
    now = record.release(now, {1, 2, 3, 4})
    assert [each.first for each in record.without_surplus(now, {1, 2}).slabs] == [1, 2, 3, 4]
    assert [each.first for each in record.without_surplus(now, {1}).slabs] == [1, 4]
    assert [each.first for each in record.without_surplus(now, ()).slabs] == [4]
