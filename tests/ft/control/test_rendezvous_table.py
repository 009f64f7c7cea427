"""The rendezvous table, its `torch.distributed.Store`, and the key file of the control channel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.comms.errors import OpTimeout, Revoked, Unsupported
from holdfast.comms.system.keys import KeyRefused, create_key, load_key
from holdfast.ft.control.errors import KeyTimeout, RemoteError
from holdfast.ft.node.rendezvous import Ask, RendezvousStore, RendezvousTable, ask_here, ask_remotely, handlers
from support.rpc_servers import RpcThread, rpc_server_thread
from support.waiting import PATIENCE, eventually

KEY = bytes(range(32))
EPOCH = 7


async def here(epoch: int, method: str, body: bytes) -> None:
    """Calls are answered in this process."""


class Copies:
    """Two copies of a table, each of which gets at once what is set in the other."""

    def __init__(self) -> None:
        self.first = RendezvousTable(lambda epoch, keys: self.second.receive(epoch, self.first.values(epoch, keys)))
        self.second = RendezvousTable(lambda epoch, keys: self.first.receive(epoch, self.second.values(epoch, keys)))


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def client(copies: Copies) -> Iterator[RpcThread]:
    """A client of a server of the first member's table."""
    with (
        rpc_server_thread(key=KEY, job="job", identity="host", handlers=handlers(copies.first, here)) as server,
        RpcThread(server.address, key=KEY, job="job", identity="guest") as connected,
    ):
        yield connected


@pytest.fixture(params=["first", "other"])
def seen(request: pytest.FixtureRequest, copies: Copies) -> tuple[RendezvousTable, Ask]:
    """The copy of the first member and of another one, and how each asks the first."""
    if request.param == "first":
        return copies.first, ask_here(copies.first)
    return copies.second, ask_remotely(request.getfixturevalue("client").call, 5.0)


@pytest.fixture
def store(seen: tuple[RendezvousTable, Ask]) -> RendezvousStore:
    copy, ask = seen
    return RendezvousStore(copy, EPOCH, 5.0, ask)


@pytest.mark.parametrize("prefixed", [False, True], ids=["plain", "prefixed"])
def test_the_rendezvous_store_answers_as_torchs_stores_do(store: RendezvousStore, prefixed: bool) -> None:
    answers = []
    for each in (dist.HashStore(), store):
        one: Any = dist.PrefixStore("p", each) if prefixed else each
        one.set("a", "1")
        one.set("bytes", b"\0\xff")
        one.multi_set(["m", "n"], ["x", "y"])
        one.append("a", "2")
        one.append("new", "3")
        answers.append(
            [
                one.get("a"),
                one.get("bytes"),
                one.get("new"),
                one.multi_get(["n", "m"]),
                one.add("count", 5),
                one.add("count", -7),
                one.get("count"),
                one.check(["a", "m"]),
                one.check(["a", "none"]),
                one.compare_set("c", "", "first"),
                one.compare_set("c", "wrong", "second"),
                one.compare_set("c", "first", "second"),
                one.compare_set("none", "expected", "desired"),
                one.check(["none"]),
                one.has_extended_api(),
                one.wait(["m", "n"]),
                one.wait(["m"], timedelta(seconds=1)),
            ]
        )
    assert answers[0] == answers[1]


@pytest.mark.parametrize("prefixed", [False, True], ids=["plain", "prefixed"])
def test_deletions_and_counts_of_keys_are_refused_by_name(store: RendezvousStore, prefixed: bool) -> None:
    one: Any = dist.PrefixStore("p", store) if prefixed else store
    one.set("a", "1")
    for use in (lambda: one.delete_key("a"), lambda: one.num_keys()):
        with pytest.raises(Unsupported, match="of a session's store"):
            use()
    assert one.get("a") == b"1"


@pytest.mark.parametrize("how", ["add", "append", "compare_set", "set", "multi_set"])
def test_every_way_to_set_wakes_waiting_threads(store: RendezvousStore, copies: Copies, how: str) -> None:
    table = copies.first
    ways: dict[str, Callable[[], object]] = {
        "add": lambda: table.add(EPOCH, "b", 1),
        "append": lambda: table.append(EPOCH, "b", b"1"),
        "compare_set": lambda: table.compare_set(EPOCH, "b", b"", b"1"),
        "set": lambda: table.put(EPOCH, {"b": b"1"}),
        "multi_set": lambda: table.put(EPOCH, {"b": b"1", "c": b"2"}),
    }
    store.set("a", "0")
    later = threading.Timer(0.05, ways[how])
    later.start()
    assert store.get("b") == b"1"
    assert store.multi_get(["a", "b"]) == [b"0", b"1"]
    later.join()


def test_a_wait_that_times_out_names_the_missing_keys(store: RendezvousStore) -> None:
    store.set("here", "")
    store.set_timeout(timedelta(seconds=0.2))
    for wait in (
        lambda: store.get("gone"),
        lambda: store.wait(["here", "gone"]),
        lambda: store.wait(["gone", "here"], timedelta(seconds=0.1)),
        lambda: store.multi_get(["here", "gone"]),
        lambda: dist.PrefixStore("", store).get("gone"),
    ):
        started = time.monotonic()
        with pytest.raises(OpTimeout, match="gone") as late:
            wait()
        assert isinstance(late.value, KeyTimeout)
        assert "here" not in late.value.missing
        assert 0.1 <= time.monotonic() - started < PATIENCE


def test_epochs_have_separate_keys_and_a_dropped_one_raises_revoked(
    seen: tuple[RendezvousTable, Ask], copies: Copies
) -> None:
    def drop() -> None:
        for copy in (copies.first, copies.second):
            copy.drop_before(2)

    copy, ask = seen
    old, new = RendezvousStore(copy, 1, ask=ask), RendezvousStore(copy, 2, ask=ask)
    old.set("key", "old")
    new.set("key", "new")
    assert (old.get("key"), new.get("key")) == (b"old", b"new")
    later = threading.Timer(0.1, drop)
    later.start()
    started = time.monotonic()
    with pytest.raises(Revoked) as over:
        old.get("never")
    later.join()
    assert over.value.epoch == 1
    assert time.monotonic() - started < PATIENCE
    for use in (lambda: old.get("key"), lambda: old.set("key", "x"), lambda: old.add("n", 1)):
        with pytest.raises(Revoked):
            use()
    assert new.get("key") == b"new"


def test_no_member_is_sent_an_older_value_after_a_newer_one() -> None:
    """Threads set a key and report it in any order; no sent value is older than the one before."""
    told: list[tuple[int, tuple[str, ...]]] = []
    sent: list[int] = []
    table = RendezvousTable(lambda epoch, keys: told.append((epoch, keys)))
    with ThreadPoolExecutor(4) as pool:
        adding = [pool.submit(lambda: [table.add(1, "n", 1) for _ in range(300)]) for _ in range(4)]
        while not all(each.done() for each in adding) or told:
            if told:
                sent.append(int(table.values(*told.pop(0))["n"]))
    assert sent == sorted(sent)
    assert sent[-1] == 4 * 300
    table.drop_before(2)
    with pytest.raises(Revoked):
        table.values(1, ("n",))


def test_adding_to_a_value_that_is_no_number_is_refused(store: RendezvousStore) -> None:
    store.set("word", "seven")
    with pytest.raises((ValueError, RemoteError), match="invalid literal"):
        store.add("word", 1)


def test_a_malformed_request_is_refused_and_changes_nothing(client: RpcThread, copies: Copies) -> None:
    for method in handlers(copies.first, here):
        for body in (b"", b"\x90", b"\x91\xa1x", b"\x93\1\2\3", bytes(9)):
            with pytest.raises(RemoteError, match="Error"):
                client.call(method, body)
    assert copies.first.items(EPOCH) == {}


def all_reduce(store: dist.Store, rank: int) -> list[float]:
    group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, timedelta(seconds=10))
    tensor = torch.full((3,), float(rank + 1))
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def test_gloo_builds_a_group_over_two_copies_and_fails_at_once_when_its_epoch_is_over(
    copies: Copies, client: RpcThread
) -> None:
    first, following = RendezvousStore(copies.first, EPOCH), EPOCH + 1
    other, late = (
        RendezvousStore(copies.second, each, ask=ask_remotely(client.call, 5.0)) for each in (EPOCH, following)
    )
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(all_reduce, other, 1)
        assert all_reduce(first, 0) == theirs.result(PATIENCE) == [3.0, 3.0, 3.0]
        builder = pool.submit(all_reduce, late, 1)
        eventually(lambda: bool(copies.first.items(following)))  # rank 1 has set its key, and waits for rank 0 now
        began = time.monotonic()
        copies.second.drop_before(following + 1)
        with pytest.raises(Revoked):
            builder.result(2 * PATIENCE)
        assert time.monotonic() - began < PATIENCE


# The key file.


def test_a_key_is_made_once_and_read_by_its_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    path, before = tmp_path / "job.key", os.umask(0o777)
    try:
        key = create_key(path)
    finally:
        os.umask(before)
    assert len(key) == 32
    assert load_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_key(path)
    assert load_key(path) == key
    assert create_key(tmp_path / "another.key") != key
    assert (tmp_path / "another.key").stat().st_mode & 0o777 == 0o600


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to give a file away")
    os.chown(path, 12345, -1)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


MODES = (0o640, 0o604, 0o620, 0o666)
TEXTS = ("", "ab" * 31, "ab" * 33, "ab" * 32 + "\n\n", "xy" * 32, "AB" * 32)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        *((lambda path, mode=mode: path.chmod(mode), f"{mode:04o}") for mode in MODES),
        *((lambda path, text=text: path.write_text(text), "64 hexadecimal") for text in TEXTS),
        (of_another_user, "12345"),
        (Path.unlink, "key file"),
        (fifo, "key file"),
        (folder, "key file"),
    ],
)
def test_a_key_file_that_is_none_or_not_its_owners_alone_is_refused_without_waiting(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    create_key(tmp_path / "job.key")
    spoil(tmp_path / "job.key")
    with pytest.raises(KeyRefused, match=words):
        load_key(tmp_path / "job.key")
