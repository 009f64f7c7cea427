"""How does a new version reach thousands of readers? Simulated: `python docs/experiments/fan_out.py`.

It gives the source and the time of each read, and how much each source sends. The rules are those of the store
(`fan_out`), with the records that it keeps in registers. Simulated are the links of the hosts, which
share their bandwidth among transfers, and the registers, in which concurrent changes fail and are tried again. Readers
of a host map its one copy, so only the first reader of each host takes part.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

import msgspec

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.ft.console.console import print_json
from holdfast.store.catalog import transitions
from holdfast.store.catalog.fan_out import (
    ABOVE,
    ReaderGroup,
    announce_copy,
    announce_in_group,
    group_of,
    request_copy,
    request_in_group,
    source_of,
)
from holdfast.store.catalog.records import Catalog, Holder, Replica, Shard, Version

Value = TypeVar("Value", Catalog, ReaderGroup)


class FanOutSpec(msgspec.Struct, frozen=True):
    """What is simulated.

    `register` is the time of one change of a register, in seconds; a link carries `bandwidth` bytes a second each way.
    """

    readers: int
    hosts: int
    parts: int = 8
    part_bytes: int = 2 << 30
    replicas: int = 2
    bandwidth: float = 12.5e9
    register: float = 0.002
    seed: int = 0


class FanOutResult(msgspec.Struct, frozen=True):
    """One run. Times are simulated seconds.

    `alone` is the time of one reader if there are no others, `seconds` the time until the last of all has every part,
    `direct` that time if all read from the replicas. Copies are counts of whole versions that a process sent: the
    holder of replicas and the reader that sent most, and readers on average. `at_once` is the largest number of readers
    of one part that one process served at a time; `changes` and `retries` are those of all registers,
    `catalog_changes` those of the catalogue; `catalog_bytes` and `group_bytes` are the largest values of a cell.
    """

    readers: int
    hosts: int
    alone: float
    seconds: float
    direct: float
    publisher_copies: float
    reader_copies: float
    mean_copies: float
    at_once: int
    changes: int
    catalog_changes: int
    retries: int
    catalog_bytes: int
    group_bytes: int


def measure(spec: FanOutSpec) -> FanOutResult:
    """Simulate the way of one version from its replicas to all readers."""
    return _Simulation(spec).run()


class _Cell(Generic[Value]):
    """A register cell: a change fails, and is tried again, if another one was made meanwhile."""

    def __init__(self, simulation: _Simulation, value: Value) -> None:
        self._simulation = simulation
        self.value: Value = value
        self.version = self.retries = self.largest = 0
        self.watchers: list[Callable[[], None]] = []

    def change(self, transition: Callable[[Value], Value], done: Callable[[], None]) -> None:
        version, before = self.version, self.value

        def commit() -> None:
            if self.version != version:
                self.retries += 1
                self.change(transition, done)
                return
            after = transition(before)
            if after != before:
                self.version += 1
                self.value = after
                self.largest = max(self.largest, len(after.encode()))
                for watcher in self.watchers:
                    self._simulation.after(self._simulation.delay(), watcher)
            done()

        self._simulation.after(self._simulation.delay(), commit)


class _PartTransfer:
    def __init__(self, source: str, target: str, left: float, done: Callable[[], None]) -> None:
        self.source, self.target, self.left, self.done = source, target, left, done
        self.rate = self.since = 0.0
        self.number = 0


class _Network:
    """Links that the transfers at either end share equally."""

    def __init__(self, simulation: _Simulation, bandwidth: float) -> None:
        self._simulation, self._bandwidth = simulation, bandwidth
        self._sending: defaultdict[str, set[_PartTransfer]] = defaultdict(set)
        self._receiving: defaultdict[str, set[_PartTransfer]] = defaultdict(set)
        self.sent: Counter[str] = Counter()

    def start(self, source: str, target: str, nbytes: int, done: Callable[[], None]) -> None:
        transfer = _PartTransfer(source, target, nbytes, done)
        transfer.since = self._simulation.now
        self.sent[source] += nbytes
        self._sending[source].add(transfer)
        self._receiving[target].add(transfer)
        self._share(transfer)

    def _share(self, changed: _PartTransfer) -> None:
        now = self._simulation.now
        for each in self._sending[changed.source] | self._receiving[changed.target]:
            each.left -= each.rate * (now - each.since)
            ends = max(len(self._sending[each.source]), len(self._receiving[each.target]))
            each.rate, each.since = self._bandwidth / ends, now
            each.number += 1
            self._simulation.after(max(each.left, 0.0) / each.rate, partial(self._end, each, each.number))

    def _end(self, transfer: _PartTransfer, number: int) -> None:
        if transfer.number != number:
            return
        transfer.number = -1
        self._sending[transfer.source].discard(transfer)
        self._receiving[transfer.target].discard(transfer)
        self._share(transfer)
        transfer.done()


class _SimulatedReader:
    """The first reader of a host: copies the parts one by one in random order, and serves them."""

    def __init__(self, simulation: _Simulation, host: int) -> None:
        self._simulation = simulation
        self.holder = Holder(f"reader{host:06}", Peer(f"host{host:06}", 1000 + host, 1), leaving=True)
        self._group = simulation.group(group_of(self.holder.peer.host))
        self._group.watchers.append(self._look)
        self._parts = list(range(simulation.spec.parts))
        simulation.dice.shuffle(self._parts)
        self._leads: set[int] = set()
        self._reading = False

    def next(self, complete: int | None = None) -> None:
        """Announce the part that is complete, and ask the group for the next one, in one change."""

        def transition(now: ReaderGroup) -> ReaderGroup:
            if complete is not None:
                now = announce_in_group(now, 1, complete, digest(complete), self.holder.id, handle(self.holder.id))
            if self._parts:
                now = request_in_group(now, 1, self._parts[-1], digest(self._parts[-1]), self.holder)
            return now

        self._group.change(transition, self._look)

    def _look(self) -> None:
        """Read from the source that the group has assigned; the leader asks in the catalogue."""
        if self._reading or not self._parts:
            return
        part = self._parts[-1]
        source = source_of(self._group.value.part(1, part, digest(part)), self.holder.id)
        if isinstance(source, Replica):
            self._read(part, source.holder)
        elif source == ABOVE and part not in self._leads:
            self._leads.add(part)
            if len(self._leads) == 1:
                self._simulation.catalog.watchers.append(self._look_above)
            self._simulation.catalog.change(
                lambda now: request_copy(now, 1, part, digest(part), self.holder), self._look_above
            )

    def _look_above(self) -> None:
        if self._reading or not self._parts or self._parts[-1] not in self._leads:
            return
        shard = self._simulation.catalog.value.shard(1, self._parts[-1])
        mine = next((each for each in shard.copies if each.reader == self.holder.id), None) if shard else None
        if mine is not None and mine.source:
            self._read(self._parts[-1], mine.source)

    def _read(self, part: int, source: str) -> None:
        self._reading = True
        self._simulation.read(part, source, self.holder.id, self._has)

    def _has(self) -> None:
        self._reading = False
        part = self._parts.pop()
        if part in self._leads:
            self._simulation.catalog.change(
                lambda now: announce_copy(now, 1, part, digest(part), self.holder.id, handle(self.holder.id)),
                self._look_above,
            )
        self.next(part)
        if not self._parts:
            self._simulation.finished.append(self._simulation.now)


class _Simulation:
    def __init__(self, spec: FanOutSpec) -> None:
        self.spec, self.now = spec, 0.0
        self.dice = random.Random(spec.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.network = _Network(self, spec.bandwidth)
        self.catalog = _Cell(self, _published(spec))
        self._groups: dict[int, _Cell[ReaderGroup]] = {}
        self.finished: list[float] = []
        self._serving: Counter[tuple[str, int]] = Counter()
        self._at_once = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, action))

    def delay(self) -> float:
        """The time of one exchange with a register."""
        return self.spec.register * self.dice.uniform(0.75, 1.25)

    def group(self, number: int) -> _Cell[ReaderGroup]:
        return self._groups.setdefault(number, _Cell(self, ReaderGroup()))

    def read(self, part: int, source: str, target: str, done: Callable[[], None]) -> None:
        self._serving[source, part] += 1
        self._at_once = max(self._at_once, self._serving[source, part])

        def ended() -> None:
            self._serving[source, part] -= 1
            done()

        self.network.start(source, target, self.spec.part_bytes, ended)

    def run(self) -> FanOutResult:
        spec = self.spec
        readers = [_SimulatedReader(self, host) for host in range(spec.hosts)]
        for reader in readers:
            reader.next()
        while self._events and len(self.finished) < len(readers):
            self.now, _, action = heapq.heappop(self._events)
            action()
        if len(self.finished) < len(readers):
            raise RuntimeError(f"{len(readers) - len(self.finished)} readers wait for ever: {spec}")
        whole = spec.parts * spec.part_bytes
        alone = whole / spec.bandwidth
        sent = {each: nbytes / whole for each, nbytes in self.network.sent.items()}
        publishers = [sent.get(f"holder{number}", 0.0) for number in range(spec.replicas)]
        others = [sent.get(reader.holder.id, 0.0) for reader in readers]
        cells: Iterable[_Cell[Catalog] | _Cell[ReaderGroup]] = [self.catalog, *self._groups.values()]
        return FanOutResult(
            readers=spec.readers,
            hosts=spec.hosts,
            alone=alone,
            seconds=self.now,
            direct=alone * spec.hosts / spec.replicas,
            publisher_copies=max(publishers),
            reader_copies=max(others),
            mean_copies=sum(others) / len(others),
            at_once=self._at_once,
            changes=sum(cell.version for cell in cells),
            catalog_changes=self.catalog.version,
            retries=sum(cell.retries for cell in cells),
            catalog_bytes=self.catalog.largest,
            group_bytes=max(cell.largest for cell in self._groups.values()),
        )


def digest(part: int) -> bytes:
    return part.to_bytes(16, "big")


def handle(holder: str) -> Handle:
    """A handle of the size of a real one of another host."""
    return Handle("ucx", holder.encode().ljust(96), 0)


def _published(spec: FanOutSpec) -> Catalog:
    """A catalogue with version 1. Its replicas are on hosts without readers."""
    catalog = Catalog()
    ids = [f"holder{number}" for number in range(spec.replicas)]
    for name in ids:
        catalog = transitions.join(catalog, Holder(name, Peer(f"host of {name}", 1, 1)))
    for part in range(spec.parts):
        shard = Shard(part, digest(part), 0, ids[0], (Replica(ids[0], handle(ids[0])),))
        catalog = transitions.announce(catalog, Version(1, spec.parts, spec.replicas, None, False, ()), shard, 2)
        for name in ids[1:]:
            catalog = transitions.replicated(catalog, 1, part, digest(part), Replica(name, handle(name)))
    return catalog


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[8, 100, 1000, 10_000])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for readers in asked.readers:
        hosts = readers if readers <= 8 else -(-readers // 8)
        print_json(measure(FanOutSpec(readers, hosts, asked.parts, seed=asked.seed)))


if __name__ == "__main__":
    main()
