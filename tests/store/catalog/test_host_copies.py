"""Readers on many hosts: the first ones copy a version for their hosts, and serve the next."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from holdfast.comms.transport import liveness
from holdfast.comms.transport.base import Peer
from holdfast.store import WeightStore
from holdfast.store.catalog import fan_out, fleet
from holdfast.store.catalog.client import GroupClient
from holdfast.store.catalog.fan_out import FEW_HOSTS, group_of
from holdfast.store.catalog.records import Holder, Reader, ServingCopy
from holdfast.store.data.manifest import Manifest
from holdfast.store.read.part_source import PartSource
from support.children import Child
from support.waiting import eventually

SIZE = 1 << 18


def a_reader(pipe: Connection, url: str, host: str) -> None:
    """Get the versions that the pipe asks for, on a host.

    Sends the id of its store, then for each version the value and the store it came from.
    """
    os.environ.update({liveness.HOST: host, "UCX_TLS": "tcp,self"})
    liveness.this_host.cache_clear()
    sources: list[str] = []
    manifest = PartSource.manifest

    def recorded(source: PartSource) -> Manifest:
        found = manifest(source)
        sources.append(source.replica.holder)
        return found

    PartSource.manifest = recorded  # type: ignore[method-assign]
    with WeightStore(url, hold=False, plane="ucx") as store:
        pipe.send(store._replica_holder.holder.id)
        while (version := pipe.recv()) is not None:
            sources.clear()
            into = {"a": torch.zeros(SIZE)}
            store.get(version, into)
            assert len(set(into["a"].tolist())) == 1
            pipe.send((into["a"][0].item(), sources[0]))


def two_hosts(in_one_group: bool) -> tuple[str, str]:
    """Names of two hosts with readers in one group, or in two."""
    first, *others = (f"host {number}" for number in range(1000))
    group = group_of(f"{liveness.this_host()}/{first}")
    return first, next(each for each in others if (group_of(f"{liveness.this_host()}/{each}") == group) == in_one_group)


class Fleet:
    """One reader on a host, two on another; a publisher in this process."""

    def __init__(self, url: str, start: Callable[..., Child], in_one_group: bool) -> None:
        south, west = two_hosts(in_one_group)
        self.children = [start(a_reader, url, host) for host in (south, west, west)]
        self.groups = 1 if in_one_group else 2
        self.ids = [child.hear() for child in self.children]
        self.store = WeightStore(url, replicas=1, plane="ucx")
        self.publisher = self.store._replica_holder.holder.id

    def publish(self, version: int) -> None:
        self.store.publish(version, {"a": torch.full((SIZE,), float(version))})

    def get(self, number: int, version: int) -> tuple[float, str]:
        """A reader's value of a version, and the store that it was read from."""
        self.children[number].tell(version)
        value, source = self.children[number].hear()
        return value, source

    def copies(self, version: int) -> tuple[ServingCopy, ...]:
        shard = self.store._catalog_client.read()[1].shard(version, 0)
        assert shard is not None
        return shard.copies

    def follow(self, hosts: int) -> None:
        """Let followers on so many other hosts be known, so that it pays to share copies."""
        for number in range(hosts):
            peer = Peer(f"other host {number}", 1000 + number, 1)
            reader = Reader(f"reader {number}", "token", "", peer, switched=False)
            self.store._catalog_client.change(lambda now, each=reader: fleet.register(now, each))


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.thorough)], ids=["one group", "two groups"])
def fleet_of_readers(
    url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    found = Fleet(url, start, request.param)
    try:
        yield found
    finally:
        for child in found.children:
            child.kill()
        found.store.close()


@pytest.mark.parametrize("fleet_of_readers", [True, False], ids=["one group", "two groups"], indirect=True)
def test_the_first_reader_reads_from_the_publisher_and_serves_the_next(fleet_of_readers: Fleet) -> None:
    readers = fleet_of_readers
    readers.follow(FEW_HOSTS)
    readers.publish(1)
    assert readers.get(0, 1) == readers.get(1, 1) == (1.0, readers.publisher), "few read straight from the replicas"
    assert readers.copies(1) == ()
    readers.follow(FEW_HOSTS + 1)
    readers.publish(2)
    assert readers.get(0, 2) == (2.0, readers.publisher)
    assert readers.get(1, 2) == (2.0, readers.ids[0])
    assert readers.get(2, 2) == (2.0, readers.ids[1]), "its host has the copy of another process"
    assert readers.get(2, 2) == (2.0, readers.ids[1])
    listed = readers.copies(2)
    assert {each.reader for each in listed} == set(readers.ids[: readers.groups])
    assert all(each.handle is not None for each in listed)
    for version in (3, 4):
        readers.publish(version)
        assert readers.get(0, version) == (version, readers.publisher)
        assert readers.get(1, version) == (version, readers.ids[0])
    assert readers.copies(3) == (), "copies follow the newest version"


def test_a_killed_reader_is_passed_over(fleet_of_readers: Fleet) -> None:
    """No process of its host is left that could tell the others."""
    readers = fleet_of_readers
    readers.follow(FEW_HOSTS + 1)
    readers.publish(1)
    readers.get(0, 1)
    readers.children[0].kill()
    assert readers.get(1, 1)[0] == 1.0
    assert readers.ids[0] not in {each.reader for each in readers.copies(1)}
    assert readers.get(2, 1) == (1.0, readers.ids[1])


def test_a_reader_that_closes_takes_its_copies_along(fleet_of_readers: Fleet) -> None:
    readers = fleet_of_readers
    readers.follow(FEW_HOSTS + 1)
    readers.publish(1)
    readers.get(0, 1)
    readers.children[0].tell(None)
    readers.children[0].end()
    eventually(lambda: readers.copies(1) == ())
    assert readers.get(1, 1) == (1.0, readers.publisher)


def test_a_group_removes_readers_of_this_host_whose_process_has_ended(url: str) -> None:
    here, elsewhere = liveness.this_process(), Peer("elsewhere", 2**22, 1)
    dead = Peer(here.host, 2**22, 1)
    readers = [Holder(name, peer) for name, peer in (("living", here), ("dead", dead), ("elsewhere", elsewhere))]
    with contextlib.closing(GroupClient(url, "weights", here.host)) as groups:
        for part, reader in enumerate(readers):
            groups.change(
                lambda now, part=part, reader=reader: fan_out.request_in_group(now, 1, part, b"d" * 16, reader)
            )
        _, group = groups.remove_dead_readers()
        assert [reader.id for reader in group.readers] == ["living", "elsewhere"]
        assert [copy.reader for part in group.parts for copy in part.copies] == ["living", "elsewhere"]
