"""The weight store across hosts, which are network namespaces here: cut and healed. Needs root."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.harness.testbed import netns
from holdfast.harness.testbed.etcd import EtcdCluster
from holdfast.harness.testbed.netns import Network
from support.samples.stores_on_hosts import OLD, StoreOnHost
from support.waiting import eventually

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}"),
]

MIB = 1 << 20
PATIENCE = 60.0
"""Several times as long as it takes to notice that a host is away."""
Open = Callable[..., StoreOnHost]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as hosts:
        yield hosts


@pytest.fixture(params=["ucx", "nixl"])
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_on(network: Network, url: str, plane: str, tmp_path: Path) -> Iterator[Open]:
    """A function that opens a store on a host, given by its number. The processes end with the test."""
    stores: list[StoreOnHost] = []

    def opened(host: int, url: str = url, **options: object) -> StoreOnHost:
        output = tmp_path / f"store{len(stores)}.log"
        stores.append(StoreOnHost(network.entry(host), url, output, plane=plane, **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.kill()


@pytest.mark.parametrize("plane", ["ucx"], indirect=True)
def test_updates_of_a_model_arrive_whole_and_by_delta(open_on: Open, plane: str) -> None:
    """1% of 64 MiB of bf16 changes in each. `pytest -s` shows the least times of publish and get, after the first."""
    size = 64 * MIB
    publisher, _, reader = open_on(0), open_on(1), open_on(2, hold=False)
    for share, what in ((1.0, "whole"), (0.01, "1% changed")):
        times = []
        for round_ in range(3):
            version = round_ + (10 if share < 1 else 0)
            published, sent = publisher.ask("step", version, size, share).value
            seconds, got = reader.ask("follow", version, size).value
            assert got == sent
            times.append((published, seconds))
        publish, get = (min(each) for each in zip(*times[1:], strict=True))
        print(f"\n{plane}, {what}: publish {publish:.3f} s, get {get:.3f} s, {size / get / 1e9:.2f} GB/s")


# -- cut


def test_a_get_goes_on_from_another_host_when_one_is_cut_off(network: Network, open_on: Open) -> None:
    """Each host with a replica is cut in turn, before a get and during one. The reader began with one of them."""
    size = 16 * MIB
    publisher, holder, reader = open_on(0), open_on(1), open_on(2, hold=False)
    assert publisher.publish(1, 5.0, size).error == ""
    assert reader.hosts(1) == {publisher.host, holder.host}
    for cut in (0, 1):
        network.cut(cut)
        got = reader.get(1, size)
        assert (got.error, got.found) == ("", (5.0,)), got
        network.heal(cut)
    network.throttle(2, 200_000_000)
    for cut in (0, 1):
        reader.begin("get", 1, size, atomic=True)
        time.sleep(0.3)
        network.cut(cut)
        got = reader.end()
        assert (got.error, got.found) == ("", (5.0,)), got
        network.heal(cut)


def test_a_reader_that_is_cut_off_fails_by_its_deadline_and_reads_again_once_it_is_back(
    network: Network, open_on: Open
) -> None:
    size = 16 * MIB
    publisher, _, reader = open_on(0), open_on(1), open_on(2, hold=False)
    assert publisher.publish(1, 5.0, size).error == ""
    for atomic in (True, False):
        network.throttle(2, 100_000_000)
        reader.begin("get", 1, size, atomic=atomic, timeout=2.0)
        time.sleep(0.4)
        network.cut(2)
        got = reader.end()
        assert got.error == "StoreTimeout" and got.seconds < 20.0, got
        if atomic:
            assert got.found == (OLD,) and got.mixed == (), "nothing is changed"
        else:
            assert set(got.mixed) == {"large", "small"} and set(got.found) <= {OLD, 5.0}
        network.heal(2)
        assert reader.get(1, size).found == (5.0,)


def test_a_publisher_that_is_cut_off_does_not_hold_up_the_others(network: Network, open_on: Open) -> None:
    """The holder is copying its version when that happens; it gives up, copies others, and comes back to it."""
    cut_off, holder = open_on(0), open_on(1)
    network.throttle(0, 100_000_000)
    cut_off.begin("publish", 1, 1.0, 32 * MIB, timeout=5.0)
    time.sleep(0.5)
    network.cut(0)
    assert cut_off.end().error == "StoreTimeout"
    other = open_on(2)
    published = other.publish(2, 2.0, 16 * MIB)
    assert published.error == "" and other.hosts(2) == {holder.host, other.host}, published
    assert holder.get(2, 16 * MIB, timeout=10.0).found == (2.0,)
    network.heal(0)
    assert cut_off.publish(3, 3.0, 16 * MIB).error == ""
    assert other.get(3, 16 * MIB).found == (3.0,)


def test_replicas_are_made_again_when_a_host_is_back(network: Network, open_on: Open) -> None:
    """While one of three hosts is cut off, the version lies on the two others."""
    publisher, holder = open_on(0), open_on(1)
    network.cut(1)
    assert publisher.publish(1, 1.0, MIB, timeout=3.0).error == "StoreTimeout", "a publish does not return unsafe"
    network.heal(1)
    assert publisher.publish(1, 1.0, MIB).error == ""
    holder.kill()
    again = open_on(1)
    eventually(lambda: publisher.hosts(1) == {publisher.host, again.host})
    publisher.close()
    assert again.get(1, MIB).found == (1.0,)


# -- away: a host that no longer beats in the register


@pytest.mark.parametrize("plane", ["ucx"], indirect=True)
def test_publishing_goes_on_when_all_processes_of_a_host_are_killed(open_on: Open) -> None:
    """The failure domains fall to one, which is an event. A store that is opened on the host raises them again."""
    publisher, mate, gone = open_on(0), open_on(0), open_on(1)
    assert publisher.publish(1, 1.0, MIB).error == ""
    assert publisher.hosts(1) == {publisher.host, gone.host}
    gone.kill()
    published = publisher.publish(2, 2.0, MIB, timeout=PATIENCE)
    assert published.error == "" and publisher.hosts(2) == {publisher.host}, published
    told = [fields for store in (publisher, mate) for kind, fields in store.ask("events").value if kind == "host_away"]
    assert [fields["hosts"] for fields in told] == [1]
    eventually(lambda: publisher.hosts(1) == {publisher.host}, PATIENCE)
    again = open_on(1)
    eventually(lambda: again.hosts(2) == {publisher.host, again.host}, PATIENCE)
    assert again.get(1, MIB).found == (1.0,)


@pytest.mark.parametrize("plane", ["ucx"], indirect=True)
def test_a_host_that_is_cut_off_from_register_and_stores_comes_back(
    network: Network, open_on: Open, tmp_path: Path
) -> None:
    """What only it has stays in the catalogue meanwhile."""
    with EtcdCluster(1, tmp_path / "etcd", host=network.addresses[0], enter=network.entry(0)) as etcd:
        url = f"{etcd.url}/job"
        publisher, mate = open_on(0, url, keep=8), open_on(0, url)
        cut_off = open_on(1, url, replicas=1, spread="processes", keep=8)
        assert cut_off.publish(1, 1.0, MIB).error == "" and publisher.hosts(1) == {cut_off.host}
        network.cut(1)
        published = publisher.publish(2, 2.0, MIB, timeout=PATIENCE)
        assert published.error == "" and publisher.hosts(2) == {publisher.host}, published
        assert publisher.ask("versions").value == [1, 2], "the host with version 1 may come back"
        assert publisher.get(1, MIB, timeout=1.0).error == "StoreTimeout"
        network.heal(1)
        eventually(
            lambda: publisher.hosts(2) == {publisher.host, cut_off.host}, PATIENCE
        )  # the host has a replica again
        assert publisher.get(1, MIB).found == (1.0,)
        for store in (mate, publisher, cut_off):
            store.close()
