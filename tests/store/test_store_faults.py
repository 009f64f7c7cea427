"""The weight store when processes close or die, at the worst moments, and when its register is away.

A register that is away for less than a store's timeout costs waiting, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import start_time, this_host
from holdfast.ft.registers import RegisterAway, open_cell, sqlite
from holdfast.ft.registers.etcd import OtherCluster
from holdfast.store import NoSuchVersion, StoreTimeout, WeightStore
from holdfast.store.catalog.client import UNKNOWN_SECONDS, Cancellation
from holdfast.store.catalog.records import Catalog
from holdfast.store.errors import CallCancelled
from holdfast.store.holding.watchers import DeathWatcher
from support.children import Start, register_lock
from support.samples.store_processes import Holders, a_publisher
from support.waiting import PATIENCE, eventually
from support.weights.state_dicts import value_in, weights


def pids(store: WeightStore, version: int) -> set[int]:
    return {holder.pid for holder in store.holders(version)}


def test_a_death_is_reported_where_descriptors_run_out() -> None:
    """The watcher gets one descriptor for two processes: it looks at both."""
    reported: queue.Queue[frozenset[Peer]] = queue.Queue()
    with contextlib.ExitStack() as stack:
        sleepers = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2)]
        for sleeper in sleepers:
            stack.callback(sleeper.kill)
        watcher = DeathWatcher(reported.put)
        stack.callback(watcher.close)
        peers = [Peer(this_host(), sleeper.pid, start_time(sleeper.pid)) for sleeper in sleepers]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        watcher.start()
        watcher.watch(peers)
        for sleeper, peer in zip(sleepers, peers, strict=True):
            sleeper.kill()
            eventually(lambda peer=peer: peer in reported.get(timeout=PATIENCE))


def test_a_publisher_that_dies_leaves_nothing_to_the_next(url: str, holders: Holders, start: Start) -> None:
    """The publisher asks for more replicas than there are processes, so it dies before the version is visible."""
    holders(1)
    with WeightStore(url) as store:
        publisher = start(partial(a_publisher, replicas=4), url, 3, weights, "announced")
        assert publisher.hear() == "announced"
        publisher.kill()
        with pytest.raises(NoSuchVersion):
            value_in(store, 3)
        store.publish(3, weights(2.0))
        assert store.versions() == [3] and value_in(store, 3) == 2.0


def kill_later(_: Connection, pid: int, seconds: float) -> None:
    """The body of a process that sends SIGKILL after a while: threads of the reader would delay it."""
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)


def test_a_read_survives_the_death_of_a_holder(url: str, holders: Holders, start: Start) -> None:
    size = 8 << 20
    living = holders(2)
    with WeightStore(url, hold=False) as store:
        store.publish(1, weights(3.0, size))
        into = weights(-1, size)
        preferred = holders(2)
        for holder in living:
            began = time.monotonic()
            store.get(1, into)
            seconds = time.monotonic() - began
            killer = start(kill_later, holder.pid, 0.4 * seconds)
            for tensor in into.values():
                tensor.fill_(-1)
            store.get(1, into)
            killer.end()
            assert all(bool((tensor == 3.0).all()) for tensor in into.values())
            eventually(lambda dead=holder.pid: len(pids(store, 1) - {dead}) == 2)
        assert pids(store, 1) == {holder.pid for holder in preferred}


def test_a_stopped_holder_can_still_be_read_and_the_next_in_turn_makes_the_replica(url: str, holders: Holders) -> None:
    with WeightStore(url) as store:
        living = holders(3)
        for holder in living:
            holder.stop(url)
        living[1].resume()
        for version in range(4):
            store.publish(version, weights(version))
            assert living[1].pid in pids(store, version)
        living[1].stop(url)
        with WeightStore(url, hold=False) as reader:
            assert value_in(reader, 3) == 3.0
        for holder in living:
            holder.resume()


def test_wrong_bytes_are_found_and_the_replica_is_made_anew(url: str, holders: Holders) -> None:
    happened: list[tuple[str, dict[str, object]]] = []
    (holder,) = holders(1)
    with WeightStore(url, observe=lambda kind, fields: happened.append((kind, fields))) as store:
        store.publish(1, weights(4.0))
        (mine,) = (each for each in store.holders(1) if each.pid == os.getpid())
        for kept in store._replica_holder._kept.values():
            kept.memory[100:104] = 99
        assert value_in(store, 1) == 4.0, "a process reads its own replica first, and then the other one"
        assert ("replica_corrupt", {"version": 1, "part": 0, "holder": mine.id}) in happened
        eventually(lambda: pids(store, 1) == {holder.pid, os.getpid()})
        holder.kill()
        assert value_in(store, 1) == 4.0, "what was wrong was copied anew"


def test_a_dead_process_pins_nothing(url: str, start: Start) -> None:
    def pinner(pipe: Connection) -> None:
        with WeightStore(url, hold=False) as mine:
            mine.pin(1)
            pipe.send("pinned")
            pipe.recv()

    with WeightStore(url, replicas=1) as store:
        store.publish(1, weights(1))
        child = start(pinner)
        child.hear()
        for version in (2, 3, 4):
            store.publish(version, weights(version))
        assert store.versions() == [1, 3, 4]
        child.kill()
        store.publish(5, weights(5))
        eventually(lambda: store.versions() == [4, 5])


def test_one_of_several_publishers_that_disagree_about_a_version_wins(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        rivals = [stack.enter_context(WeightStore(f"memory://{tmp_path}")) for _ in range(3)]
        together = threading.Barrier(3)

        def publish(number: int) -> Iterator[int]:
            for version in range(10):
                together.wait(PATIENCE)
                with contextlib.suppress(Mismatch):
                    rivals[number].publish(version, weights(number))
                    yield version

        with ThreadPoolExecutor(3) as pool:
            won = list(pool.map(lambda number: set(publish(number)), range(3)))
        assert sum(map(len, won)) == 10 and set.union(*won) == set(range(10))
        for version in rivals[0].versions():
            assert version in won[int(value_in(rivals[0], version))]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_holders_die_at_random_and_no_version_is_lost(url: str, holders: Holders, start: Start, seed: int) -> None:
    """Holders are killed and replaced at random moments while versions are published and read.

    Published versions stay, and are never a mixture.
    """
    dice = random.Random(seed)
    living = holders(3)
    size = 1 << 19
    with WeightStore(url, hold=False) as store:
        for version in range(8):
            victim = living.pop(dice.randrange(3))
            killer = start(kill_later, victim.pid, dice.random() * 0.01)
            store.publish(version, weights(version, size), timeout=10)
            assert value_in(store, version, size) == version
            killer.end()
            assert value_in(store, version, size) == version
            living += holders(1)
            eventually(lambda number=version: len(pids(store, number)) >= 2)
            assert store.latest() == version


def test_a_publish_that_times_out_is_withdrawn_and_says_what_it_lacks(url: str, holders: Holders) -> None:
    holders(1)
    with WeightStore(url, spread="hosts") as store:
        with pytest.raises(StoreTimeout, match=r"1 of 2 processes keep part 0.*on 1 host, and spread='hosts' needs 2"):
            store.publish(1, weights(1), timeout=1.0)
        assert store.versions() == []
    with WeightStore(url, replicas=3) as store:
        with pytest.raises(StoreTimeout, match=r"2 of 3 processes keep part 0.*open it in more"):
            store.publish(1, weights(1), timeout=3.0)
        with pytest.raises(NoSuchVersion, match="nobody published"):
            value_in(store, 1)
        holders(1)
        store.publish(1, weights(2))
        assert value_in(store, 1) == 2.0


def test_a_publish_whose_part_goes_each_time_it_is_announced_ends_by_its_deadline(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.publication.transitions.announce", lambda catalog, *_: catalog)
    with WeightStore(url, replicas=1) as store:
        with pytest.raises(StoreTimeout, match="part 0 is not in the catalogue"):
            store.publish(1, weights(1), timeout=0.2)
        monkeypatch.undo()
        store.publish(1, weights(2))
        assert value_in(store, 1) == 2.0


def test_listeners_are_told_of_versions_that_are_superseded_deleted_or_lost(url: str, holders: Holders) -> None:
    """The end of a store is no loss."""
    ended: list[tuple[str, object]] = []

    def observe(kind: str, fields: dict[str, object]) -> None:
        if kind in ("retired", "lost"):
            ended.append((kind, fields["version"]))

    with WeightStore(url, replicas=1, observe=observe) as store:
        for version in (1, 2, 3):
            store.publish(version, weights(version))
        store.delete(3)
    assert ended == [("retired", 1), ("retired", 3)]
    ended.clear()
    living = holders(2)
    with WeightStore(url, hold=False, observe=observe) as store:
        for version in (4, 5, 6):
            store.publish(version, weights(version))
        assert "lost" not in dict(ended)
        ended.clear()
        for holder in living:
            holder.kill()
        with pytest.raises(NoSuchVersion, match="all its holders are gone"):
            value_in(store, 6)
        assert ended == [("lost", 5), ("lost", 6)] and store.versions() == [] and store.latest() is None


def test_leases_can_be_released_again_and_a_closed_store_has_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise RegisterAway(url, "it is locked")

    with WeightStore(url, replicas=1) as holder:
        holder.publish(1, weights(1))
        with WeightStore(url, hold=False) as reader:
            lease, other = reader.pin(1), holder.pin(1)
        lease.release()
        with monkeypatch.context() as broken:
            broken.setattr(holder._catalog_client, "change", away)
            with pytest.raises(RegisterAway):
                other.release()
        with pytest.raises(Mismatch, match="pinned"):
            holder.delete(1)
        other.release()
        other.release()
        holder.delete(1)


def test_bytes_published_anew_as_soon_as_they_are_deleted_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder has read that they are deleted, and acts on it after they were announced anew."""
    has_read, announced, has_acted = threading.Event(), threading.Event(), threading.Event()

    def observe(kind: str, _: dict[str, object]) -> None:
        if kind == "announced" and has_read.is_set():
            announced.set()
            has_acted.wait(5.0)

    with WeightStore(f"memory://{tmp_path}", observe=observe) as store:
        store.publish(1, weights(4.0))
        let_go = store._replica_holder._let_go

        def late(at: int, catalog: Catalog) -> None:
            if threading.current_thread() is store._replica_holder._thread and not catalog.versions:
                has_read.set()
                announced.wait(5.0)
                let_go(at, catalog)
                has_acted.set()
            else:
                let_go(at, catalog)

        monkeypatch.setattr(store._replica_holder, "_let_go", late)
        store.delete(1)
        assert has_read.wait(5.0)
        store.publish(1, weights(4.0))
        assert has_acted.is_set()
        assert value_in(store, 1) == 4.0


STATE = {"a": torch.ones(8)}


class Register:
    """A register in files, which can be moved away and back."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite://{folder}/job.sqlite"
        self._folder, self._away = folder, folder.with_name(folder.name + "-away")

    def leave(self) -> None:
        self._away.mkdir()
        for file in self._folder.iterdir():
            file.rename(self._away / file.name)

    def come_back(self) -> None:
        for file in self._away.iterdir():
            file.rename(self._folder / file.name)


@pytest.fixture
def register(tmp_path: Path) -> Register:
    folder = tmp_path / "register"
    folder.mkdir(mode=0o700)
    return Register(folder)


@pytest.fixture
def store(register: Register) -> Iterator[WeightStore]:
    with WeightStore(register.url, replicas=1, timeout=60.0) as opened:
        opened.publish(1, STATE)
        yield opened


CALLS: dict[str, Callable[[WeightStore], Any]] = {
    "latest": lambda store: store.latest(),
    "get": lambda store: store.get(1, {"a": torch.zeros(8)}),
    "publish": lambda store: store.publish(2, STATE),
    "pin": lambda store: store.pin(1).release(),
    "wait": lambda store: store.wait(1),
}


def test_every_call_goes_on_once_the_register_is_back(register: Register, store: WeightStore) -> None:
    register.leave()
    with ThreadPoolExecutor(len(CALLS)) as pool:
        running: dict[str, Future[Any]] = {name: pool.submit(call, store) for name, call in CALLS.items()}
        eventually(lambda: store._catalog_client._reads.since is not None)
        assert not any(each.done() for each in running.values())
        register.come_back()
        for each in running.values():
            each.result(30.0)
    assert store.versions() == [1, 2]


def test_an_outage_long_ago_is_over(register: Register, store: WeightStore, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing asked it meanwhile, so no answer has ended the outage."""
    with WeightStore(register.url, hold=False, timeout=60.0) as reader, ThreadPoolExecutor(1) as pool:
        outage = reader._catalog_client._reads
        outage.since = outage.failed = before = time.monotonic() - 10 * UNKNOWN_SECONDS
        register.leave()
        running = pool.submit(reader.latest)
        eventually(lambda: outage.failed > before)
        register.come_back()
        assert running.result(PATIENCE) == 1
    assert "waits for its register, up to 60 s" in caplog.text


def test_a_store_that_closes_or_cannot_open_leaves_no_descriptor_and_no_thread(url: str, holders: Holders) -> None:
    """The memory that it shares lies behind descriptors."""
    holders(1)
    broken = f"{url}-of-another-release"
    with contextlib.closing(open_cell(broken, "store")) as cell:
        assert cell.compare_and_set(0, b"of another release")

    def use() -> None:
        with WeightStore(url) as store:
            store.publish(store.latest() or 1, weights(3))
            store.get("latest", weights())
        with pytest.raises(CorruptData):
            WeightStore(broken, expect=4 << 20)

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    use()
    before, threads = descriptors(), set(threading.enumerate())
    for _ in range(3):
        use()
    eventually(lambda: descriptors() <= before and set(threading.enumerate()) <= threads)


def test_a_publish_whose_part_is_safe_is_no_failure_if_the_register_goes_then(
    register: Register, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that does not hold parts leaves its own to others; it keeps it if it cannot say so."""
    drop = Mock(side_effect=HoldfastError("the register is away"))
    with WeightStore(register.url, replicas=1, hold=False) as publisher:
        monkeypatch.setattr("holdfast.store.publication.transitions.drop_replica", drop)
        publisher.publish(2, {"a": torch.full((8,), 2.0)})
        (kept,) = publisher._replica_holder._kept.values()
        assert drop.called and not kept.bringing
    into = {"a": torch.zeros(8)}
    assert store.get(2, into) == 2 and into["a"].sum() == 16


def test_a_longer_outage_is_a_typed_error(register: Register) -> None:
    with WeightStore(register.url, replicas=1, timeout=0.3) as store:
        register.leave()
        for call in CALLS.values():
            with pytest.raises(RegisterAway):
                call(store)
        register.come_back()
        assert store.latest() is None


def test_changes_are_given_up_while_another_has_the_lock(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.01)
    with WeightStore(register.url, replicas=1, timeout=0.5) as store, ThreadPoolExecutor(1) as pool:
        store.publish(1, STATE)
        with register_lock(register.url):
            pinning = pool.submit(store.pin, 1)
            while not pinning.done():
                assert store.latest() == 1
        with pytest.raises(RegisterAway, match="held its lock"):
            pinning.result()
        store.pin(1).release()


def test_no_call_waits_for_the_register_past_its_own_timeout_and_a_closed_one_is_not_away(
    register: Register, store: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    client = store.open_catalog()
    client.close()
    with pytest.raises(RegisterAway, match="closed"):
        client.read()
    assert not caplog.records
    register.leave()
    with pytest.raises(RegisterAway):
        store.get(1, {"a": torch.zeros(8)}, timeout=0.1)
    with pytest.raises(RegisterAway):
        store.switch(1, ["reader"], timeout=0.1)
    with pytest.raises(StoreTimeout, match="is away"):
        store.wait(2, 0.1)
    assert not store._catalog_client.gave_up
    register.come_back()


def test_a_call_that_is_cancelled_or_that_waiting_cannot_mend_does_not_wait_for_its_register(
    register: Register, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancellation = Cancellation("latest")

    def ask() -> int | None:
        with cancellation.scope():
            return store.latest()

    register.leave()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask)
        eventually(lambda: store._catalog_client._reads.since is not None)
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            running.result(PATIENCE)
    register.come_back()

    def other(*_: object) -> None:
        raise OtherCluster(store.url, "another cluster")

    with monkeypatch.context() as patched:
        patched.setattr(store._catalog_client._cell, "read", other)
        with pytest.raises(OtherCluster):
            store.latest()


def test_a_store_that_closes_does_not_wait_for_its_register(register: Register) -> None:
    store = WeightStore(register.url, replicas=1, timeout=600.0)
    register.leave()
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()
    register.come_back()


# -- every order of publishing, closing and dying


def a_part(number: int) -> dict[str, torch.Tensor]:
    return {f"part {number}": torch.full((300,), float(number))}


def publish_and_reach(start: Start, url: str, point: str, hold: bool) -> None:
    """Let a process publish part 0 of version 1, and reach a point of its end."""
    publisher = start(partial(a_publisher, parts=2, hold=hold), url, 1, partial(a_part, 0), point)
    assert publisher.hear() == point
    if point != "closed":
        publisher.kill()


@pytest.mark.parametrize(
    ("point", "hold"),
    [
        ("closed", True),
        ("leaving", True),
        ("gone", False),
        pytest.param("leaving", False, marks=pytest.mark.thorough),
        pytest.param("gone", True, marks=pytest.mark.thorough),
    ],
)
def test_a_published_part_outlives_its_store(url: str, holders: Holders, start: Start, point: str, hold: bool) -> None:
    holders(2)
    publish_and_reach(start, url, point, hold)
    with WeightStore(url, hold=False) as store:
        with pytest.raises(Mismatch, match=r"part 0 is published with other bytes.*use a new number, or a fence"):
            store.publish(1, a_part(2), part=0, parts=2)
        store.publish(1, a_part(1), part=1, parts=2)
        into = {"part 0": torch.zeros(300), "part 1": torch.zeros(300)}
        assert store.get(1, into) == 1
        assert all(bool((into[f"part {number}"] == number).all()) for number in (0, 1))


def test_a_part_without_a_publisher_outlives_its_holders_in_turn(url: str, holders: Holders, start: Start) -> None:
    """A replica that dies leaves one, which is copied before the version is complete."""
    living = holders(2)
    publish_and_reach(start, url, "returned", hold=False)
    for _ in range(3):
        with WeightStore(url, hold=False) as store:
            read = store._catalog_client.remove_dead_holders
            eventually(lambda read=read: len((now := read()[1]).keeping(now.shard(1, 0))) == 2)
        living.pop(0).kill()
        living += holders(1)
    with WeightStore(url) as store:
        store.publish(1, a_part(1), part=1, parts=2)
        eventually(lambda: store.versions() == [1])


def test_a_part_being_published_is_withdrawn_when_its_store_closes(url: str, holders: Holders, start: Start) -> None:
    """The publishing thread must not announce the part after that: no process could retract it."""
    announced = threading.Event()
    holders(1)
    publishing = WeightStore(url, replicas=3, observe=lambda kind, _: announced.set() if kind == "announced" else None)
    with ThreadPoolExecutor(1) as pool:
        publish = pool.submit(publishing.publish, 1, a_part(0))
        assert announced.wait(10)
        publishing.close()
        assert isinstance(publish.exception(10), HoldfastError)
    with WeightStore(url) as store:
        assert store._catalog_client.read()[1].versions == ()
        store.publish(1, a_part(2))
        assert store.versions() == [1]
