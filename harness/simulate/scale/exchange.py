"""Simulates how the members of a view exchange what they build its communicator from.

The tree and the relays are those of production. A batch stands for the keys of one member, so that a simulated member
holds counts and no table. Simulated are the latencies of `NetworkModel` and the time that a member takes for a message.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.comms.transport.base import Peer
from holdfast.ft.membership import relay_tree
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.rendezvous.relay import TreeRelay
from holdfast.harness.simulate.core.schedule import NetworkModel
from holdfast.harness.simulate.search.scenarios import RANKS_A_HOST

WORK = 20e-6
"""Seconds that a member takes for a message, sent or received."""
SPREAD = 0.005
"""The members begin within this many seconds."""
VALUE_BYTES = 120
"""Bytes of the key and the value of one member."""


class ExchangeResult(msgspec.Struct, frozen=True):
    """One exchange: `seconds` from the first member's begin until the last has all, in simulated time.

    `messages` and `bytes` are those that a member sends and receives; each message has the batches of many members.
    """

    ranks: int
    seconds: float
    depth: int
    messages_mean: float
    messages_max: int
    bytes_mean: float
    bytes_max: int


def measure(ranks: int, seed: int) -> ExchangeResult:
    """Simulate one exchange between `ranks` members, `RANKS_A_HOST` on each host."""
    return _Exchange(ranks, seed).run()


class _Exchange:
    def __init__(self, ranks: int, seed: int) -> None:
        self._view = _view_of(ranks)
        self._dice = random.Random(seed)
        self._network = NetworkModel()
        self._neighbours = [relay_tree.neighbours(self._view, rank) for rank in range(ranks)]
        pauses = ranks > relay_tree.ARITY + 1
        self._relays: list[TreeRelay[int]] = [TreeRelay(map(str, each), pauses) for each in self._neighbours]
        self._events: list[tuple[float, int, int, str | None, int]] = []
        """(time, number, rank, neighbour, count): keys of `count` members arrive, or if 0 the relay is to send."""
        self._number = 0
        self._busy = np.zeros(ranks)
        self._held = np.zeros(ranks, dtype=np.int64)
        self._messages = np.zeros(ranks, dtype=np.int64)
        self._keys = np.zeros(ranks, dtype=np.int64)

    def run(self) -> ExchangeResult:
        ranks = len(self._relays)
        for rank in range(ranks):
            self._at(self._dice.uniform(0.0, SPREAD), rank, None, 1)
        last = 0.0
        while self._events:
            now, _, rank, neighbour, count = heapq.heappop(self._events)
            if not count:
                self._send(rank, now)
                continue
            if neighbour is not None:
                now = self._work(rank, now, count)
            self._held[rank] += count
            if self._held[rank] == ranks:
                last = max(last, now)
            idle = self._relays[rank].wake_at(now) is None
            self._relays[rank].add(count, neighbour)
            if idle and (at := self._relays[rank].wake_at(now)) is not None:
                self._at(at, rank, None, 0)
        if int(self._held.min()) < ranks:
            raise RuntimeError(f"a member has the keys of {self._held.min()} of {ranks} members")
        nbytes = self._keys * VALUE_BYTES
        return ExchangeResult(
            ranks=ranks,
            seconds=last,
            depth=self._depth(),
            messages_mean=float(self._messages.mean()),
            messages_max=int(self._messages.max()),
            bytes_mean=float(nbytes.mean()),
            bytes_max=int(nbytes.max()),
        )

    def _at(self, time: float, rank: int, neighbour: str | None, count: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, rank, neighbour, count))

    def _work(self, rank: int, now: float, count: int) -> float:
        """The time at which the member has dealt with a message."""
        self._messages[rank] += 1
        self._keys[rank] += count
        self._busy[rank] = max(self._busy[rank], now) + WORK
        return float(self._busy[rank])

    def _send(self, rank: int, now: float) -> None:
        members, network = self._view.members, self._network
        for neighbour, counts in self._relays[rank].take(now):
            count, other = sum(counts), int(neighbour)
            now = self._work(rank, now, count)
            same = members[rank].peer.host == members[other].peer.host
            latency = network.local if same else self._dice.lognormvariate(math.log(network.latency), network.spread)
            self._at(now + latency, other, str(rank), count)

    def _depth(self) -> int:
        depth, deepest = [0] * len(self._relays), 0
        for rank, next_to in enumerate(self._neighbours[1:], 1):
            depth[rank] = depth[next_to[0]] + 1
            deepest = max(deepest, depth[rank])
        return deepest


def _view_of(ranks: int) -> View:
    names = [f"h{rank // RANKS_A_HOST}" for rank in range(ranks)]
    members: Sequence[Member] = [Member(f"p{rank}", "", Peer(host, rank, 1)) for rank, host in enumerate(names)]
    return View(1, "running", tuple(members), Job("job", ranks, 1, ranks, ("gloo",), "gloo"), "simulated")
