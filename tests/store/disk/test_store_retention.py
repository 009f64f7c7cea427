"""Copies of versions on disk: which are written and by which process, what a death leaves, and what comes back."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport.base import Peer
from holdfast.store import WeightStore
from holdfast.store.catalog import disk_copies, transitions
from holdfast.store.catalog.records import Catalog, Holder, Retainer
from holdfast.store.interop.disk_copy import read_record
from holdfast.store.interop.safetensors import export_version
from holdfast.store.retention import DiskRetention, copies, copy_path, restore
from support.children import Start
from support.waiting import eventually
from support.weights.catalogs import announced
from support.weights.state_dicts import value_in, weights


class Events:
    """The events of a retention: (kind, version)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, object]]] = []

    def __call__(self, kind: str, fields: dict[str, object]) -> None:
        self.all.append((kind, fields))

    def versions(self, kind: str) -> list[object]:
        return [fields["version"] for each, fields in self.all if each == kind]


# -- which versions


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_kth_version_is_on_disk_whole(store: WeightStore, other: WeightStore, tmp_path: Path, kind: Any) -> None:
    happened = Events()
    with DiskRetention(store, tmp_path / "copies", every=3, format=kind, observe=happened):
        for version in range(8):
            store.publish(version, weights(version))
            if version % 3 == 1:
                eventually(lambda: not disk_copies.due(store._read()))
    assert list(copies(tmp_path / "copies")) == [0, 3, 6]
    assert happened.versions("disk_copied") == [0, 3, 6]
    assert restore(other, tmp_path / "copies") == 6
    assert other.versions() == [6] and value_in(other, 6) == 6.0


def test_old_copies_are_removed(store: WeightStore, tmp_path: Path) -> None:
    happened = Events()
    with DiskRetention(store, tmp_path / "copies", keep=2, observe=happened):
        for version in range(5):
            store.publish(version, weights(version))
            eventually(lambda version=version: version in happened.versions("disk_copied"))  # type: ignore[misc]
    assert list(copies(tmp_path / "copies")) == [3, 4]
    assert happened.versions("disk_removed") == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == [
        copy_path(tmp_path, version).name for version in (3, 4)
    ]


# -- failures


def test_a_directory_of_another_run_is_not_overwritten_and_a_copy_that_is_right_is_kept(
    store: WeightStore, other: WeightStore, tmp_path: Path
) -> None:
    with WeightStore(f"memory://{tmp_path}/before") as before:
        before.publish(0, weights(7.0))
        before.publish(1, weights(2.0))
        for version in (0, 1):
            export_version(before, version, copy_path(tmp_path / "copies", version))
    written = copy_path(tmp_path / "copies", 1).stat().st_ino
    happened = Events()
    with DiskRetention(store, tmp_path / "copies", observe=happened):
        store.publish(0, weights(1.0))
        eventually(lambda: happened.versions("disk_failed") == [0])
        store.publish(1, weights(2.0))
        eventually(lambda: happened.versions("disk_copied") == [1])
    assert copy_path(tmp_path / "copies", 1).stat().st_ino == written
    (why,) = (fields["why"] for kind, fields in happened.all if kind == "disk_failed")
    assert "it exists already" in str(why)
    copy_path(tmp_path / "copies", 1).rename(tmp_path / "gone")
    assert restore(other, tmp_path / "copies") == 0 and value_in(other, 0) == 7.0


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"keep": 0}, {"format": "zip"}, {"timeout": float("nan")}],
    ids=lambda value: next(iter(value)),
)
def test_wrong_arguments_are_refused_and_start_nothing(
    store: WeightStore, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DiskRetention(store, tmp_path, **wrong)


# -- several processes


def retains(pipe: Connection, url: str, directory: Path, slow: bool) -> None:
    """Hold replicas, and copy versions to disk until the parent says so; a `slow` process stops in the middle."""

    def observe(kind: str, fields: dict[str, object]) -> None:
        pipe.send((kind, fields["version"]))

    if slow:

        def wait_for_ever(self: DiskRetention) -> None:
            pipe.send(("writing", None))
            threading.Event().wait()

        DiskRetention._check_abort = wait_for_ever  # type: ignore[method-assign]
    with WeightStore(url) as store, DiskRetention(store, directory, every=10, observe=observe):
        pipe.send("ready")
        pipe.recv()


def test_one_of_several_processes_writes_each_copy(url: str, tmp_path: Path, start: Start) -> None:
    children = [start(retains, url, tmp_path / "copies", False) for _ in range(3)]
    for child in children:
        assert child.hear() == "ready"
    with WeightStore(url) as store:
        for version in range(31):
            store.publish(version, weights(version))
            if version % 10 == 0:
                eventually(lambda version=version: version in copies(tmp_path / "copies"), 20.0)  # type: ignore[misc]
        eventually(lambda: all(copy.done for copy in store._read().disk))
    said = []
    for child in children:
        child.tell("end")
        child.end()
        with suppress(EOFError):
            while True:
                said.append(child.pipe.recv())
    assert sorted(said) == [("disk_copied", version) for version in (0, 10, 20, 30)]


def test_a_writer_is_killed_in_the_middle_and_another_one_writes_the_copy(
    url: str, other: WeightStore, tmp_path: Path, start: Start
) -> None:
    directory = tmp_path / "copies"
    first = start(retains, url, directory, True)
    assert first.hear() == "ready"
    with WeightStore(url) as store:
        store.publish(0, weights(0.0))
        assert first.hear() == ("writing", None)
        assert copies(directory) == {} and len(list(directory.iterdir())) == 1
        second = start(retains, url, directory, False)
        assert second.hear() == "ready"
        for version in range(1, 6):
            store.publish(version, weights(version))
        assert copies(directory) == {} and store.versions() == [0, 4, 5], "what waits for the disk stays"
        first.kill()
        assert second.hear() == ("disk_copied", 0)
        second.tell("end")
        second.end()
    assert [path.name for path in directory.iterdir()] == [copy_path(directory, 0).name]
    assert restore(other, directory) == 0 and value_in(other, 0) == 0.0


def test_a_process_that_closes_leaves_its_unfinished_copy_to_another(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    held, check = threading.Event(), DiskRetention._check_abort

    def wait_for_abort(self: DiskRetention) -> None:
        held.set()
        self._abort.wait(20.0)
        check(self)

    happened = Events()
    with WeightStore(url, replicas=1) as store:
        monkeypatch.setattr(DiskRetention, "_check_abort", wait_for_abort)
        first = DiskRetention(store, tmp_path / "copies")
        store.publish(0, weights(3.0))
        assert held.wait(20.0)
        first.close(0.05)
        monkeypatch.setattr(DiskRetention, "_check_abort", check)
        assert not list((tmp_path / "copies").iterdir())
        with DiskRetention(store, tmp_path / "copies", observe=happened):
            eventually(lambda: happened.versions("disk_copied") == [0])


# -- coming back


def test_restore_takes_the_newest_copy_that_is_whole_and_raises_if_there_is_none(
    store: WeightStore, other: WeightStore, tmp_path: Path
) -> None:
    with WeightStore(f"memory://{tmp_path}/before", keep=5) as before:
        for version in range(3):
            before.publish(version, weights(version))
            export_version(before, version, copy_path(tmp_path / "copies", version))
    (shard,) = copy_path(tmp_path / "copies", 2).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged: list[Path] = []
    assert restore(store, tmp_path / "copies", damaged=lambda path, error: damaged.append(path)) == 1
    assert value_in(store, 1) == 1.0 and damaged == [copy_path(tmp_path / "copies", 2)]
    assert read_record(copy_path(tmp_path / "copies", 1)) is not None
    for version in range(3):
        (copy_path(tmp_path / "copies", version) / "holdfast.json").write_text("{}")
    with pytest.raises(CorruptData, match=r"holdfast\.json"):
        restore(other, tmp_path / "copies")


def test_restore_leaves_a_store_that_is_newer_as_it_is_and_several_processes_restore_shares(
    store: WeightStore, other: WeightStore, tmp_path: Path
) -> None:
    assert restore(store, tmp_path / "none") is None
    store.publish(3, weights(3.0))
    export_version(store, 3, copy_path(tmp_path / "copies", 3))
    store.publish(4, weights(4.0))
    assert restore(store, tmp_path / "copies") == 4
    assert store.versions() == [3, 4]
    for part in range(2):
        assert other.versions() == [] and restore(other, tmp_path / "copies", part=part, parts=2) == 3
    assert value_in(other, 3) == 3.0


# -- the catalogue

RETAINERS = [Retainer(name, Peer("host", number, 1), 2) for number, name in enumerate("abc")]
STEPS = st.tuples(st.sampled_from(["publish", "join", "claim", "finish", "give up", "leave", "die"]), st.integers(0, 2))


def published(catalog: Catalog, number: int) -> Catalog:
    """The catalogue after one part of a version was published, of which one replica is wanted."""
    return announced(transitions.join(catalog, Holder("holder", Peer("host", 99, 1))), "holder", number)


def apply(catalog: Catalog, step: str, which: int) -> Catalog:
    retainer = RETAINERS[which]
    match step:
        case "publish":
            return published(catalog, max(catalog.visible(), default=-1) + 1)
        case "join":
            return disk_copies.join(catalog, retainer)
        case "leave":
            return disk_copies.leave(catalog, retainer)
        case "die":
            return transitions.remove_dead_holders(catalog, {retainer.peer})
        case "claim":
            due = disk_copies.due(catalog)[:1]
            return disk_copies.claim(catalog, due[0], retainer) if due else catalog
    mine = disk_copies.claimed(catalog, retainer)[:1]
    change = disk_copies.finish if step == "finish" else disk_copies.give_up
    return change(catalog, mine[0], retainer) if mine else catalog


def on_disk(catalog: Catalog) -> set[int]:
    return {copy.version for copy in catalog.disk if copy.done}


@given(st.lists(STEPS, max_size=60))
def test_every_version_that_is_due_stays_until_one_process_has_copied_it(steps: list[tuple[str, int]]) -> None:
    """Whatever joins, leaves, dies and fails."""
    catalog, finished = Catalog(), list[int]()
    for step, which in steps:
        before, catalog = catalog, apply(catalog, step, which)
        assert Catalog.decode(catalog.encode()) == catalog
        finished += on_disk(catalog) - on_disk(before)
        versions = [copy.version for copy in catalog.disk]
        assert versions == sorted(set(versions)), "each once"
        for copy in catalog.disk:
            assert copy.done or copy.version in catalog.visible(), "it stays"
            assert copy.done or copy.retainer in ("", *(each.id for each in catalog.retainers)), "its writer lives"
        kept = {*catalog.visible()[-2:], *(copy.version for copy in catalog.disk if not copy.done)}
        assert set(catalog.visible()) == kept, "nothing else stays"
    assert finished == sorted(set(finished)), "none is copied again"


def test_a_second_writer_is_too_late_and_retainers_that_cannot_keep_up_leave_versions_out() -> None:
    catalog = Catalog()
    for retainer in RETAINERS[:2]:
        catalog = disk_copies.join(catalog, retainer)
    catalog = disk_copies.claim(published(catalog, 1), 1, RETAINERS[0])
    assert disk_copies.claimed(catalog, RETAINERS[0]) == (1,)
    for late in (disk_copies.claim, disk_copies.finish, disk_copies.give_up):
        assert late(catalog, 1, RETAINERS[1]) == catalog
    catalog = disk_copies.join(Catalog(), RETAINERS[0])
    for number in range(20):
        catalog = published(catalog, number)
    assert disk_copies.due(catalog) == (0, 2), "two wait for each retainer at most"
    catalog = disk_copies.finish(disk_copies.claim(catalog, 0, RETAINERS[0]), 0, RETAINERS[0])
    assert disk_copies.due(published(catalog, 20)) == (2, 20)
    catalog = disk_copies.join(Catalog(), RETAINERS[0])
    for number in range(5):
        catalog = published(catalog, number)
    assert catalog.visible() == (0, 2, 3, 4)
    assert transitions.remove_dead_holders(catalog, {RETAINERS[0].peer}).visible() == (3, 4)
