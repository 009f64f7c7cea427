"""The weight store across hosts, which are network namespaces here: cut and healed. Needs root.

The stores are in processes of these hosts, which do what the test asks for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.comms.errors import HoldfastError
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.etcd import EtcdCluster
from holdfast.harness.testbed.netns import EnterNamespace, Network
from holdfast.store import Follower, WeightStore
from support.children import Start
from support.waiting import PROGRAM_SECONDS, eventually

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}"),
]

OLD = -1.0
"""What the reader's tensors hold before a get."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of a store came to.

    `error` names the type of the error, `value` is the result of the call; `found` are the values in the reader's
    tensors after a get, `mixed` the tensors that the error calls mixed.
    """

    seconds: float
    error: str = ""
    value: Any = None
    found: tuple[float, ...] = ()
    mixed: tuple[str, ...] = ()


def filled(value: float, nbytes: int) -> dict[str, torch.Tensor]:
    """One large tensor of float32 and a small one, of equal elements."""
    return {"large": torch.full((nbytes // 4,), float(value)), "small": torch.full((7,), float(value))}


class StoreOnHost:
    """A process on a host with a store open there. Calls wait for the answer, unless it is asked for later.

    It comes from the zygote, not from the test's process: UCX keeps the routes of the network that it saw first.
    """

    def __init__(self, entry: EnterNamespace, url: str, output: Path, **options: Any) -> None:
        zygote().preload("holdfast.store")
        self._process = zygote().spawn(partial(serve, entry, url, options), name=entry.name, output=output)
        self.host = self._hear()

    def publish(self, version: int, value: float, nbytes: int, **options: Any) -> Outcome:
        return self.ask("publish", version, value, nbytes, **options)

    def get(self, version: int, nbytes: int, **options: Any) -> Outcome:
        """Get a version into tensors that hold `OLD`."""
        return self.ask("get", version, nbytes, **options)

    def hosts(self, version: int) -> set[str]:
        return set(self.ask("hosts", version).value)

    def ask(self, call: str, *arguments: Any, **options: Any) -> Outcome:
        self.begin(call, *arguments, **options)
        return self.end()

    def begin(self, call: str, *arguments: Any, **options: Any) -> None:
        """Begin a call of `Calls`; `end` waits for it."""
        self._process.channel.send((call, arguments, options))

    def end(self) -> Outcome:
        outcome: Outcome = self._hear()
        return outcome

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Idempotent."""
        self._process.close()

    def close(self) -> None:
        """Close the store, and wait for the process to end."""
        self._process.channel.send(None)
        ended = self._process.wait(PROGRAM_SECONDS)
        assert ended.status == 0, self._process.epitaph()

    def _hear(self) -> Any:
        try:
            return self._process.channel.recv(PROGRAM_SECONDS)
        except ChannelClosed:
            raise AssertionError(self._process.epitaph()) from None


def serve(entry: EnterNamespace, url: str, options: dict[str, Any], channel: ProcessChannel) -> None:
    """The body of the process: open a store on a host, and do what the test asks for."""
    entry()
    os.environ["UCX_TLS"] = "tcp,self"
    events: list[tuple[str, dict[str, object]]] = []
    with WeightStore(url, observe=lambda kind, fields: events.append((kind, fields)), **options) as store:
        calls = Calls(store, events)
        channel.send(entry.name)
        while (asked := channel.recv()) is not None:
            call, arguments, more = asked
            began, calls.into = time.monotonic(), {}
            error, value = None, None
            try:
                value = getattr(calls, call)(*arguments, **more)
            except HoldfastError as raised:
                error = raised
            channel.send(
                Outcome(
                    time.monotonic() - began,
                    "" if error is None else type(error).__name__,
                    value,
                    tuple(sorted({each for tensor in calls.into.values() for each in tensor.unique().tolist()})),
                    getattr(error, "mixed", ()),
                )
            )


class Calls:
    """What a test may ask of the process for."""

    def __init__(self, store: WeightStore, events: list[tuple[str, dict[str, object]]]) -> None:
        self.store, self._events = store, events
        self.into: dict[str, torch.Tensor] = {}
        self.model: dict[str, torch.Tensor] = {}
        """Weights that `step` changes, or `follow` or `swap` bring up to date."""
        self._follower: Follower | None = None

    def publish(self, version: int, value: float, nbytes: int, **options: Any) -> None:
        self.store.publish(version, filled(value, nbytes), **options)

    def get(self, version: int, nbytes: int, **options: Any) -> int:
        self.into = filled(OLD, nbytes)
        return self.store.get(version, self.into, **options)

    def hosts(self, version: int) -> list[str]:
        return [each.peer.host.rpartition("/")[2] for each in self.store.holders(version)]

    def versions(self) -> list[int]:
        return self.store.versions()

    def events(self) -> list[tuple[str, dict[str, object]]]:
        return list(self._events)

    def swap(self, version: int, nbytes: int) -> float:
        """Follow the store, if this process does not yet; swap a version in, and return its value."""
        if self._follower is None:
            self.model = filled(OLD, nbytes)
            self._follower = self.store.follow(self.model, timeout=60.0)
        self._follower.wait_ready(version)
        assert self._follower.swap() == version
        (value,) = {each for tensor in self.model.values() for each in tensor.unique().tolist()}
        return float(value)

    def received(self) -> int:
        """The bytes that this host has received over the network."""
        (line,) = [each for each in Path("/proc/thread-self/net/dev").read_text().splitlines() if "eth0:" in each]
        return int(line.partition(":")[2].split()[0])

    def step(self, version: int, nbytes: int, share: float) -> tuple[float, int]:
        """Change a share of bf16 weights, and publish them; returns the seconds of publish, and the sum of the bits."""
        bits = self.model.setdefault("w", torch.randn(nbytes // 2, dtype=torch.bfloat16)).view(torch.int16)
        where = torch.randint(0, len(bits), (int(len(bits) * share),))
        bits[where] ^= 1
        began = time.monotonic()
        self.store.publish(version, self.model)
        return time.monotonic() - began, int(bits.long().sum())

    def follow(self, version: int, nbytes: int) -> tuple[float, int]:
        """Get a version into the same tensors each time; returns the seconds, and the sum of the bits."""
        target = self.model.setdefault("w", torch.empty(nbytes // 2, dtype=torch.bfloat16))
        began = time.monotonic()
        self.store.get(version, self.model)
        return time.monotonic() - began, int(target.view(torch.int16).long().sum())


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
        times, received = [], [reader.ask("received").value]
        for round_ in range(3):
            version = round_ + (10 if share < 1 else 0)
            published, sent = publisher.ask("step", version, size, share).value
            seconds, got = reader.ask("follow", version, size).value
            assert got == sent
            times.append((published, seconds))
            received.append(reader.ask("received").value)
        assert (received[-1] - received[-2] < size // 2) == (share < 1)
        publish, get = (min(each) for each in zip(*times[1:], strict=True))
        print(f"\n{plane}, {what}: publish {publish:.3f} s, get {get:.3f} s, {size / get / 1e9:.2f} GB/s")


@pytest.mark.parametrize("plane", ["ucx"], indirect=True)
def test_readers_of_other_hosts_fan_out_with_one_read_of_the_wire_a_host(open_on: Open, plane: str) -> None:
    """Two of them follow on each of two hosts; the publisher is on a third."""
    size = 16 * MIB
    publisher = open_on(0, replicas=1)
    hosts = [[open_on(host, hold=False) for _ in range(2)] for host in (1, 2)]
    readers = [reader for host in hosts for reader in host]
    before = [0, 0]
    for version in (1, 2, 3):
        assert publisher.publish(version, float(version), size).error == ""
        for reader in readers:
            reader.begin("swap", version, size)
        assert [reader.end().value for reader in readers] == [float(version)] * 4
        received = [one.ask("received").value for one, _ in hosts]
        reads = [(now - then) / size for now, then in zip(received, before, strict=True)]
        if version > 1:  # before the first, not all of them follow
            assert all(0.9 < each < 1.5 for each in reads), reads
        before = received


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


def test_a_reader_that_is_cut_off_fails_in_time_and_reads_once_it_is_back(network: Network, open_on: Open) -> None:
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
    eventually(lambda: publisher.hosts(1) == {publisher.host})
    again = open_on(1)
    eventually(lambda: again.hosts(2) == {publisher.host, again.host})
    publisher.close()
    assert again.get(1, MIB).found == (1.0,)


@pytest.mark.parametrize("plane", ["ucx"], indirect=True)
def test_a_host_that_was_cut_off_from_all_comes_back(network: Network, open_on: Open, tmp_path: Path) -> None:
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
        eventually(lambda: publisher.hosts(2) == {publisher.host, cut_off.host})
        assert publisher.get(1, MIB).found == (1.0,)
        for store in (mate, publisher, cut_off):
            store.close()


# -- the catalogue in etcd


@pytest.mark.parametrize("plane", ["ucx"], indirect=True)
def test_a_store_goes_on_while_etcd_leaders_die(network: Network, open_on: Open, start: Start, tmp_path: Path) -> None:
    entry = network.entry(0)
    with EtcdCluster(3, tmp_path / "etcd", host=network.addresses[0], enter=entry) as etcd:

        def leader(pipe: Connection) -> None:
            entry()
            pipe.send(etcd.leader())

        url = f"{etcd.url}/job"
        start(leader).hear()
        publisher, holder = (open_on(host, url, keep=8) for host in (1, 2))
        reader = open_on(0, url, hold=False)
        assert publisher.publish(0, 0.0, MIB).error == ""
        for version in range(1, 5):
            victim = start(leader).hear()
            publisher.begin("publish", version, float(version), MIB)
            etcd.kill(victim)
            published = publisher.end()
            assert published.error == "", published
            got = reader.get(version, MIB)
            assert (got.error, got.found) == ("", (float(version),)), got
            assert reader.ask("versions").value == list(range(version + 1)), "no version is lost"
            etcd.start(victim)
        assert reader.hosts(4) == {publisher.host, holder.host}
        for store in (reader, publisher, holder):
            store.close()
