"""A published part outlives its publisher: every order of publishing, closing and dying."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.store import WeightStore
from holdfast.store.catalog.records import Catalog, Shard
from support.children import Child
from support.samples.store_processes import Holders
from support.waiting import eventually


def a_part(number: int) -> dict[str, torch.Tensor]:
    return {f"part {number}": torch.full((300,), float(number))}


def a_publisher_of_a_part(pipe: Connection, url: str, point: str, hold: bool) -> None:
    """Publish part 0 of version 1, close the store, and die at `point`.

    "killed" is before closing, "leaving" is between the two steps of closing. With "closed" and no death the process
    stays, without a store.
    """
    store = WeightStore(url, hold=hold)
    store.publish(1, a_part(0), part=0, parts=2)
    if point == "killed":
        pipe.send(point)
        os.kill(os.getpid(), signal.SIGKILL)
    if point == "leaving":
        change = store._catalog_client.change

        def leave_and_die(transition: Callable[[Catalog], Catalog]) -> tuple[int, Catalog]:
            change(transition)
            pipe.send(point)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        store._catalog_client.change = leave_and_die  # type: ignore[method-assign]
    store.close()
    pipe.send(point)
    if point == "killed after closing":
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.recv()


@pytest.mark.parametrize(
    ("point", "hold"),
    [
        ("closed", True),
        ("leaving", True),
        ("killed after closing", False),
        ("killed", True),
        pytest.param("closed", False, marks=pytest.mark.thorough),
        pytest.param("leaving", False, marks=pytest.mark.thorough),
        pytest.param("killed after closing", True, marks=pytest.mark.thorough),
        pytest.param("killed", False, marks=pytest.mark.thorough),
    ],
)
def test_a_part_whose_publish_has_returned_outlives_its_store(
    url: str, holders: Holders, start: Callable[..., Child], point: str, hold: bool
) -> None:
    holders(2)
    publisher = start(a_publisher_of_a_part, url, point, hold)
    assert publisher.hear() == point
    if point != "closed":
        publisher.kill()
    with WeightStore(url, hold=False) as store:
        with pytest.raises(Mismatch, match=r"part 0 is published with other bytes.*use a new number, or a fence"):
            store.publish(1, a_part(2), part=0, parts=2)
        store.publish(1, a_part(1), part=1, parts=2)
        into = {"part 0": torch.zeros(300), "part 1": torch.zeros(300)}
        assert store.get(1, into) == 1
        assert all(bool((into[f"part {number}"] == number).all()) for number in (0, 1))


@pytest.mark.parametrize("point", ["closed", "killed"])
def test_a_part_without_a_publisher_outlives_its_holders_one_after_the_other(
    url: str, holders: Holders, start: Callable[..., Child], point: str
) -> None:
    """A replica that dies leaves one, which is copied before the version is complete."""
    living = holders(2)
    publisher = start(a_publisher_of_a_part, url, point, False)
    assert publisher.hear() == point
    for _ in range(3):
        with WeightStore(url, hold=False) as store:
            eventually(lambda: len(store._catalog_client.remove_dead_holders()[1].keeping(_part(store))) == 2)
        living.pop(0).kill()
        living += holders(1)
    with WeightStore(url) as store:
        store.publish(1, a_part(1), part=1, parts=2)
        eventually(lambda: store.versions() == [1])


def _part(store: WeightStore) -> Shard:
    found = store._catalog_client.read()[1].shard(1, 0)
    assert found is not None
    return found


def test_one_of_two_publishers_of_a_part_dies_and_the_other_has_published(
    url: str, holders: Holders, start: Callable[..., Child]
) -> None:
    def publisher(pipe: Connection) -> None:
        with WeightStore(url) as mine:
            mine.publish(1, a_part(0), part=0, parts=2)
            pipe.send("published")
            pipe.recv()

    first = start(publisher)
    with WeightStore(url) as store:
        first.hear()
        store.publish(1, a_part(0), part=0, parts=2)
        holders(1)
        first.kill()
        store.publish(1, a_part(1), part=1, parts=2)
        eventually(lambda: store.versions() == [1])


def test_a_failed_repeated_publish_withdraws_nothing(url: str, holders: Holders) -> None:
    def interrupted(kind: str, _: dict[str, object]) -> None:
        if kind == "announced" and again:
            raise KeyboardInterrupt

    again = False
    holders(1)
    with WeightStore(url, observe=interrupted) as store:
        store.publish(1, a_part(0), part=0, parts=2)
        again = True
        with pytest.raises(KeyboardInterrupt):
            store.publish(1, a_part(0), part=0, parts=2)
        again = False
        store.publish(1, a_part(1), part=1, parts=2)
        assert store.versions() == [1]


def test_a_part_that_is_still_being_published_is_withdrawn_when_its_store_closes(
    url: str, holders: Holders, start: Callable[..., Child]
) -> None:
    """The publishing thread must not announce the part after that: no process could retract it."""
    announced, failures = threading.Event(), []

    def publish() -> None:
        try:
            publishing.publish(1, a_part(0))
        except HoldfastError as error:
            failures.append(error)

    holders(1)
    publishing = WeightStore(url, replicas=3, observe=lambda kind, _: announced.set() if kind == "announced" else None)
    thread = threading.Thread(target=publish)
    thread.start()
    assert announced.wait(10)
    publishing.close()
    thread.join(10)
    assert len(failures) == 1
    with WeightStore(url) as store:
        assert store._catalog_client.read()[1].versions == ()
        store.publish(1, a_part(2))
        assert store.versions() == [1]
