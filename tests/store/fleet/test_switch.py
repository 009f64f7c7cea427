"""Switches of a fleet of processes, which are killed and stopped at each step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from holdfast.comms.errors import HoldfastError
from holdfast.store import WeightStore
from holdfast.store.catalog.records import SwitchRecord
from holdfast.store.follow.staging import StagedVersions, StagingState
from support.children import Child
from support.samples.store_processes import move_to_host
from support.waiting import eventually
from support.weights.state_dicts import value_of, weights


def a_reader(pipe: Connection, url: str, name: str, dies: str = "", version: int = 0) -> None:
    """Follow as `name`, and answer orders.

    "swap" and "catch up" are answered with what is served then, "ready N" once it is.

    Dies while it stages `version` if `dies` is "staging", with its bytes but before it says so if "staged".
    """
    into, told = weights(-1), threading.Event()
    die_at(pipe, dies, version, told)
    with WeightStore(url, hold=False) as store, store.follow(into, reader=name) as follower:
        pipe.send("follows")
        told.set()
        while (order := pipe.recv()) != "end":
            try:
                if order.startswith("ready"):
                    follower.wait_ready(int(order.split()[1]), 15.0)
                    pipe.send("ready")
                else:
                    served = follower.swap() if order == "swap" else follower.catch_up(15.0)
                    assert value_of(into) == served
                    pipe.send(served)
            except HoldfastError as error:
                pipe.send(type(error).__name__)


def die_at(pipe: Connection, dies: str, version: int, told: threading.Event) -> None:
    complete, fill = StagedVersions.complete, StagedVersions.fill

    def die() -> None:
        told.wait()  # a thread of the follower may be here before the test has been told that it follows
        pipe.send("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    def filled(self: StagedVersions, found: StagingState, number: int, *more: Any) -> None:
        fill(self, found, number, *more)
        if dies == "staging" and number == version:
            die()

    def completed(self: StagedVersions, found: StagingState) -> None:
        if dies == "staged" and found.version == version:
            die()
        complete(self, found)

    StagedVersions.fill, StagedVersions.complete = filled, completed  # type: ignore[method-assign]


def a_proposer(
    pipe: Connection,
    url: str,
    version: int,
    readers: list[str] | None = None,
    dies: str = "",
    timeout: float = 15.0,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Switch the fleet, and send the result; at the store's event `dies` send its name and die by SIGKILL."""
    prepare()

    def observe(kind: str, fields: dict[str, object]) -> None:
        if kind == dies:
            pipe.send(kind)
            os.kill(os.getpid(), signal.SIGKILL)

    with WeightStore(url, hold=False, observe=observe) as store:
        pipe.send(store.switch(version, readers, timeout=timeout))


@pytest.fixture
def store(url: str) -> Iterator[WeightStore]:
    """The store of a trainer, with version 1."""
    with WeightStore(url, replicas=1) as opened:
        opened.publish(1, weights(1))
        yield opened


def a_fleet(store: WeightStore, start: Callable[..., Child], *names: str) -> list[Child]:
    """Readers that serve version 1; version 2 is published."""
    readers = [start(a_reader, store.url, name) for name in names]
    for reader in readers:
        assert reader.hear() == "follows"
    assert store.switch(1).committed
    for reader in readers:
        assert said(reader, "swap") == 1
    store.publish(2, weights(2))
    return readers


def said(child: Child, order: str) -> object:
    child.tell(order)
    return child.hear()


def newest(store: WeightStore) -> SwitchRecord:
    return store._catalog_client.read()[1].switches[-1]


@pytest.mark.parametrize("dies", ["staging", "staged"])
def test_a_reader_that_dies_before_it_is_ready_is_counted_out(
    store: WeightStore, start: Callable[..., Child], dies: str
) -> None:
    one, _ = a_fleet(store, start, "g0", "g1")
    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(store.switch, 2, ["g0", "g1", "g2"])
        eventually(lambda: newest(store).state == "preparing")
        dying = start(a_reader, store.url, "g2", dies, 2)
        assert dying.hear() == "follows" and dying.hear() == "dies"
        result = switching.result()
    assert result.committed and result.ready == ("g0", "g1") and result.missing == ("g2",)
    assert said(one, "swap") == 2
    eventually(lambda: {each.id for each in store.readers()} == {"g0", "g1"})


def test_a_proposer_that_dies_after_it_proposed_leaves_the_fleet_as_it_was(
    store: WeightStore, start: Callable[..., Child]
) -> None:
    readers = a_fleet(store, start, "g0", "g1")
    proposer = start(a_proposer, store.url, 2, ["g0", "g1", "absent"], "switch_proposed")
    assert proposer.hear() == "switch_proposed"
    proposer.kill()
    eventually(lambda: newest(store).state == "aborted")
    assert f"process {proposer.pid}, died" in newest(store).reason
    for reader in readers:
        assert said(reader, "ready 2") == "ready" and said(reader, "swap") == 1
    assert store.switch(2).committed
    assert [said(reader, "swap") for reader in readers] == [2, 2]


def test_a_proposer_that_dies_after_the_switch_was_committed_is_not_needed(
    store: WeightStore, start: Callable[..., Child]
) -> None:
    readers = a_fleet(store, start, "g0", "g1")
    proposer = start(a_proposer, store.url, 2, ["g0", "g1"], "switch_committed")
    assert proposer.hear() == "switch_committed"
    proposer.kill()
    assert [said(reader, "swap") for reader in readers] == [2, 2]


def test_readers_settle_a_switch_of_another_host_that_went_silent(
    store: WeightStore, start: Callable[..., Child]
) -> None:
    """The readers wait as long as the proposer wanted to, then abort.

    Nothing proves the death of a process of another host.
    """
    readers = a_fleet(store, start, "g0", "g1")
    proposer = start(
        a_proposer, store.url, 2, ["g0", "absent"], "switch_proposed", 0.5, partial(move_to_host, "another")
    )
    assert proposer.hear() == "switch_proposed"
    proposer.kill()
    eventually(lambda: newest(store).state == "aborted", 10.0)
    assert "did not decide it" in newest(store).reason
    assert [said(reader, "swap") for reader in readers] == [1, 1]


def test_a_quorum_decides_without_a_stopped_reader_which_catches_up_before_it_serves(
    store: WeightStore, start: Callable[..., Child]
) -> None:
    one, other = a_fleet(store, start, "g0", "g1")
    store.publish(3, weights(3))
    other.stop()
    waits = store.switch(3, ["g0", "g1"], timeout=0.5)
    if not waits.committed:  # else it was ready before it was stopped
        assert "g1" in waits.missing and said(one, "swap") == 1
        assert store.switch(3, ["g0", "g1"], 1).committed
    assert said(one, "swap") == 3
    other.tell("swap")
    other.resume()
    assert other.hear() in (3, "NotCaughtUp"), "it does not serve version 1 again"
    assert said(other, "catch up") == 3


def test_a_reader_that_restarts_catches_up_with_its_fleet_before_it_serves(
    store: WeightStore, start: Callable[..., Child]
) -> None:
    one, other = a_fleet(store, start, "g0", "g1")
    assert store.switch(2).committed and said(one, "swap") == 2
    other.kill()
    store.publish(3, weights(3))
    again = start(a_reader, store.url, "g1")
    assert again.hear() == "follows"
    assert said(again, "swap") in (2, "NotCaughtUp")
    assert said(again, "catch up") == 2, "not version 3, which was never committed"
    assert {each.id: each.served for each in store.readers()} == {"g0": 2, "g1": 2}
