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
from collections.abc import Callable
from functools import partial

import msgspec

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.ft.console.console import print_json
from holdfast.store.catalog.fan_out import LEAD, LEADERS, ReaderGroup, announce_copy, group_of, request_copy
from holdfast.store.catalog.records import Holder, PartKey


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
    of one part that one process served at a time; `changes` and `retries` are those of all groups' cells, `group_bytes`
    is the largest value of one.
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
    retries: int
    group_bytes: int


def measure(spec: FanOutSpec) -> FanOutResult:
    """Simulate the way of one version from its replicas to all readers."""
    return _Simulation(spec).run()


class _Cell:
    """A register cell: a change fails, and is tried again, if another one was made meanwhile."""

    def __init__(self, simulation: _Simulation) -> None:
        self._simulation = simulation
        self.value = ReaderGroup()
        self.version = self.retries = self.largest = 0
        self.watchers: list[Callable[[], None]] = []

    def change(self, transition: Callable[[ReaderGroup], ReaderGroup], done: Callable[[], None]) -> None:
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
        self._leaders = simulation.group(LEADERS)
        self._group.watchers.append(self._look)
        self._leads: set[int] = set()
        self._parts = list(range(simulation.spec.parts))
        simulation.dice.shuffle(self._parts)
        self._reading = False

    def next(self, complete: int | None = None) -> None:
        """Announce the part that is complete, and ask the group for the next one, in one change."""

        def transition(now: ReaderGroup) -> ReaderGroup:
            if complete is not None:
                now = announce_copy(now, key(complete), self.holder.id, handle(self.holder.id))
            return request_copy(now, key(self._parts[-1]), self.holder) if self._parts else now

        self._group.change(transition, self._look)

    def _look(self) -> None:
        """Read from the source that the group has assigned; the leader asks in the group of leaders."""
        if self._reading or not self._parts:
            return
        part = self._parts[-1]
        for group in (self._group, self._leaders):
            copies = group.value.part(key(part)).copies
            mine = next((each for each in copies if each.reader == self.holder.id), None)
            if mine is not None and mine.source not in ("", LEAD):
                self._reading = True
                self._simulation.read(part, mine.source, self.holder.id, self._has)
            elif mine is not None and mine.source == LEAD and part not in self._leads:
                if not self._leads:
                    self._leaders.watchers.append(self._look)
                self._leads.add(part)
                seeds = self._simulation.seeds
                self._leaders.change(partial(request_copy, key=key(part), reader=self.holder, seeds=seeds), self._look)

    def _has(self) -> None:
        self._reading = False
        part = self._parts.pop()
        if part in self._leads:
            self._leaders.change(
                lambda now: announce_copy(now, key(part), self.holder.id, handle(self.holder.id)), self._look
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
        self.seeds = [f"holder{number}" for number in range(spec.replicas)]
        self._groups: dict[int, _Cell] = {}
        self.finished: list[float] = []
        self._serving: Counter[tuple[str, int]] = Counter()
        self._at_once = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, action))

    def delay(self) -> float:
        """The time of one exchange with a register."""
        return self.spec.register * self.dice.uniform(0.75, 1.25)

    def group(self, number: int) -> _Cell:
        return self._groups.setdefault(number, _Cell(self))

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
        publishers = [sent.get(each, 0.0) for each in self.seeds]
        others = [sent.get(reader.holder.id, 0.0) for reader in readers]
        cells = self._groups.values()
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
            retries=sum(cell.retries for cell in cells),
            group_bytes=max(cell.largest for cell in cells),
        )


def key(part: int) -> PartKey:
    return 1, part, part.to_bytes(16, "big")


def handle(holder: str) -> Handle:
    """A handle of the size of a real one of another host."""
    return Handle("ucx", holder.encode().ljust(96), 0)


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
