"""A published part outlives its publisher: every order of publishing, closing and dying."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.store import WeightStore
from holdfast.store.catalog.records import Shard
from support.children import Child
from support.samples.store_processes import Holders, a_publisher
from support.waiting import eventually


def a_part(number: int) -> dict[str, torch.Tensor]:
    return {f"part {number}": torch.full((300,), float(number))}


def publish_and_reach(start: Callable[..., Child], url: str, point: str, hold: bool) -> None:
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
        ("returned", True),
        pytest.param("closed", False, marks=pytest.mark.thorough),
        pytest.param("leaving", False, marks=pytest.mark.thorough),
        pytest.param("gone", True, marks=pytest.mark.thorough),
        pytest.param("returned", False, marks=pytest.mark.thorough),
    ],
)
def test_a_part_whose_publish_has_returned_outlives_its_store(
    url: str, holders: Holders, start: Callable[..., Child], point: str, hold: bool
) -> None:
    holders(2)
    publish_and_reach(start, url, point, hold)
    with WeightStore(url, hold=False) as store:
        with pytest.raises(Mismatch, match=r"part 0 is published with other bytes.*use a new number, or a fence"):
            store.publish(1, a_part(2), part=0, parts=2)
        store.publish(1, a_part(1), part=1, parts=2)
        into = {"part 0": torch.zeros(300), "part 1": torch.zeros(300)}
        assert store.get(1, into) == 1
        assert all(bool((into[f"part {number}"] == number).all()) for number in (0, 1))


@pytest.mark.parametrize("point", ["closed", "returned"])
def test_a_part_without_a_publisher_outlives_its_holders_one_after_the_other(
    url: str, holders: Holders, start: Callable[..., Child], point: str
) -> None:
    """A replica that dies leaves one, which is copied before the version is complete."""
    living = holders(2)
    publish_and_reach(start, url, point, hold=False)
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
