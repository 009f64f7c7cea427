"""The network between simulated hosts: decides when and how often a message arrives, or that it is lost."""

from __future__ import annotations

import math
import random

from holdfast.harness.simulate.core.schedule import NetworkModel


class Bursts:
    """The bursts of loss on one path: good times and times of total loss in turn, generated on demand."""

    def __init__(self, rng: random.Random, share: float, burst: float) -> None:
        self._rng, self._bad, self._good = rng, 1 / burst, share / (burst * (1 - share))
        self._losing = rng.random() < share
        self._until = rng.expovariate(self._bad if self._losing else self._good)

    def losing(self, now: float) -> bool:
        """Whether the path loses everything at `now`. Calls must not go back in time."""
        while self._until <= now:
            self._losing = not self._losing
            self._until += self._rng.expovariate(self._bad if self._losing else self._good)
        return self._losing


class Paths:
    """All paths between hosts, numbered from 0, and the faults that hold on them."""

    def __init__(self, options: NetworkModel, rng: random.Random) -> None:
        self.options = options
        self._rng = rng
        self._median = math.log(options.latency)
        self._bursts: dict[object, Bursts] = {}
        self._cuts: dict[tuple[int, int], int] = {}
        self._isolated: list[frozenset[int]] = []
        self._registerless: list[frozenset[int]] = []
        self._clogs: dict[tuple[int, int], list[float]] = {}
        self._connecting: dict[int, float] = {}

    # Faults ---------------------------------------------------------------------------------------------------

    def cut(self, source: int, target: int, by: int) -> None:
        """Add a cut (`by` 1), or remove one (-1)."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + by

    def isolate(self, hosts: frozenset[int], register: bool, on: bool) -> None:
        for groups in (self._isolated, *(() if register else (self._registerless,))):
            if on:
                groups.append(hosts)
            else:
                groups.remove(hosts)

    def clog(self, source: int, target: int, delay: float, on: bool) -> None:
        delays = self._clogs.setdefault((source, target), [])
        if on:
            delays.append(delay)
        else:
            delays.remove(delay)

    def slow_connecting(self, host: int, by: float) -> None:
        """Let connections that a host dials from now on stand later by `by` seconds more."""
        self._connecting[host] = self._connecting.get(host, 0.0) + by

    # Messages -------------------------------------------------------------------------------------------------

    def is_cut(self, source: int, target: int) -> bool:
        if source == target:
            return False
        if self._cuts and self._cuts.get((source, target), 0) > 0:
            return True
        return any((source in group) != (target in group) for group in self._isolated)

    def connect_delay(self, host: int) -> float:
        """By how much a connection that a host dials is late."""
        return self._connecting.get(host, 0.0)

    def reaches_register(self, host: int) -> bool:
        return not any(host in group for group in self._registerless)

    def latency(self, source: int, target: int, ordered: bool = False) -> float:
        """The latency of a message that is not lost. `ordered`: that of a communicator, which keeps the order."""
        if source == target:
            return self.options.local
        delay = math.exp(self._rng.gauss(self._median, self.options.spread))
        if self._clogs:
            delay += sum(self._clogs.get((source, target), ()))
        if self.options.reorder and not ordered and self._rng.random() < self.options.reorder:
            delay += self._rng.random() * self.options.reorder_delay
        return delay

    def register_latency(self) -> float:
        """The latency of a message to or from the register, one way."""
        return self.options.register / 2 * math.exp(self._rng.gauss(0.0, self.options.spread))

    def loses(self, source: int, target: int, now: float) -> bool:
        """Whether a message that is sent now is lost."""
        loss, shared = self.options.loss, self.options.shared
        if not loss or source == target:
            return False
        lost = self._losing((source, target), loss * (1 - shared), now)
        if shared:
            lost |= self._losing(source, loss * shared / 2, now) | self._losing(target, loss * shared / 2, now)
        return lost

    def copies(self) -> int:
        """How often a message that is not lost arrives."""
        return 2 if self.options.duplicate and self._rng.random() < self.options.duplicate else 1

    def _losing(self, path: object, share: float, now: float) -> bool:
        if not share:
            return False
        bursts = self._bursts.get(path)
        if bursts is None:
            bursts = self._bursts[path] = Bursts(self._rng, share, self.options.burst)
        return bursts.losing(now)
