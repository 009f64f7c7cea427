"""Choose between the layers and the flat transport, by the bytes that cross the busiest link of a host.

A link of a host carries what all of its ranks send to other hosts, and as much may come the other way. How many bytes
that is follows from the algorithm's messages and from where the ranks are. For h hosts of r ranks, n = h r, and an op
on b bytes (the result of an all_gather, the input of a reduce_scatter), the busiest link carries at least

    2 (h-1)/h b    all_reduce
    (h-1)/h b      all_gather, reduce_scatter
    b              broadcast
    r (h-1)/h b    all_to_all, where each rank has b bytes

and the layers carry just that. A flat ring over neighbours carries (n-1)/n in the place of (h-1)/h, and r times that if
ranks are on the hosts in turns. A flat all_to_all carries the least, so it has no layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.comms.algorithms.message_passing import cost
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.transport.base import Link, Peer

Message = tuple[int, int, float]
"""A sender, a receiver, and the bytes that go from one to the other during an op."""

WITHIN = Link(50e-6, 4e9)
"""The cost of a message within a host, with the wake-up of its receiver, on an unmeasured machine."""
WITHIN_DEVICES = Link(8e-6, 100e9)
"""The same between the GPUs of a host over NVLink: from data sheets, not measured."""

_SEGMENTS, _SEGMENT_SECONDS = 4, 0.02
"""The most segments of a broadcast between hosts, and how long each is on the wire at least: a call costs as well."""

MEGABITS = Hint("megabits", int, "the rate of each host's link, in Mbit/s: on slow ones more ops go in layers", least=1)

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
"""The ops that have layers."""

_GAIN, _GAIN_UNTOLD = 1.1, 1.5
"""How many times as fast the layers must look, with a told rate, and without: a faster link makes them gain less."""

_OF_LIBRARIES = {
    "gloo": {"all_reduce": "ring", "broadcast": "binomial", "all_gather": "ring", "reduce_scatter": "pairwise"},
    "nccl": {"all_reduce": "ring", "broadcast": "pipeline", "all_gather": "ring", "reduce_scatter": "ring"},
}
"""The algorithms of transports that do not choose theirs by `message_passing.cost`."""
_ORDERS_ITS_RINGS = ("nccl",)
"""Transports that order their rings by hosts, however the ranks are numbered."""


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Which ranks are on which host, in the order of the hosts' first ranks."""

    hosts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(peers: Sequence[Peer]) -> HostLayout:
        hosts: dict[str, list[int]] = {}
        for rank, peer in enumerate(peers):
            hosts.setdefault(peer.host, []).append(rank)
        return HostLayout(tuple(map(tuple, hosts.values())))

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def rails(self) -> int:
        return min(map(len, self.hosts))

    @property
    def even(self) -> bool:
        return len({len(host) for host in self.hosts}) == 1

    @property
    def layered(self) -> bool:
        """Whether there are several hosts, and several ranks on one."""
        return 1 < len(self.hosts) < self.size

    @property
    def as_neighbours(self) -> HostLayout:
        """The same hosts, with their ranks numbered one host after the other."""
        ranks = iter(range(self.size))
        return HostLayout(tuple(tuple(next(ranks) for _ in host) for host in self.hosts))

    def place(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its number there."""
        host = next(index for index, ranks in enumerate(self.hosts) if rank in ranks)
        return host, self.hosts[host].index(rank)

    def busiest_link(self, messages: Iterable[Message]) -> float:
        """The most bytes that a host sends to others, or receives from them."""
        host_of = {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}
        sent, received = [0.0] * len(self.hosts), [0.0] * len(self.hosts)
        for sender, receiver, nbytes in messages:
            if (here := host_of[sender]) != (there := host_of[receiver]):
                sent[here] += nbytes
                received[there] += nbytes
        return max(sent + received)


@dataclass(frozen=True, slots=True)
class Traffic:
    """An op's messages one after the other, and its bytes on the busiest link of a host."""

    steps: int
    link_bytes: float

    def seconds(self, latency: float, rate: float) -> float:
        return self.steps * latency + self.link_bytes / rate


@dataclass(frozen=True, slots=True)
class Choice:
    """Flat or in layers, for the ops of one communicator. The same on all ranks, if `link` is.

    `outer` is the name of the transport between hosts, `link` the cost of a message over it, by which it chooses its
    algorithms; `within` that of a message inside a host. The ranks of a host share its link, of `told_rate` bytes a
    second (None: that of a message).
    """

    outer: str
    layout: HostLayout
    link: Link
    within: Link
    told_rate: float | None

    @property
    def rate(self) -> float:
        return self.told_rate or self.link.bandwidth

    def in_layers(self, op: str, nbytes: int, root: int = 0) -> bool:
        """Whether the layers take less time for an op on `nbytes`."""
        if op in ("all_gather", "reduce_scatter") and not self.layout.even:
            return False
        flat, between = (
            traffic.seconds(self.link.latency, self.rate)
            for traffic in (self.flat(op, nbytes, root), self.layers(op, nbytes))
        )
        gain = _GAIN_UNTOLD if self.told_rate is None else _GAIN
        return gain * (between + self._inside(op, nbytes)) < flat

    def flat(self, op: str, nbytes: int, root: int = 0) -> Traffic:
        """The traffic of the outer transport over all ranks."""
        layout = self.layout.as_neighbours if self.outer in _ORDERS_ITS_RINGS else self.layout
        return self._traffic(op, layout, nbytes, root)

    def layers(self, op: str, nbytes: int) -> Traffic:
        """The traffic of the rails: each joins one rank of each host, and moves its share of the bytes."""
        hosts, rails = len(self.layout.hosts), self.layout.rails
        if op == "broadcast" and (segments := self.segments(nbytes)):
            return Traffic(segments + 1, nbytes)
        of_rail = self._traffic(op, HostLayout(tuple((host,) for host in range(hosts))), math.ceil(nbytes / rails))
        return Traffic(of_rail.steps, rails * of_rail.link_bytes)

    def _traffic(self, op: str, layout: HostLayout, nbytes: int, root: int = 0) -> Traffic:
        """The traffic of the outer transport between the ranks of a layout."""
        algorithm = self._algorithm(op, layout.size, nbytes)
        steps, messages = _messages(op, algorithm, layout.size, nbytes, root)
        return Traffic(steps, layout.busiest_link(messages))

    def segments(self, nbytes: int) -> int:
        """In how many segments a broadcast goes along the rails; 0: by the outer transport's own broadcast.

        That sends the same bytes to several hosts, unless there are two hosts, or it is a pipeline.
        """
        if len(self.layout.hosts) == 2 or self._algorithm("broadcast", len(self.layout.hosts), nbytes) == "pipeline":
            return 0
        return min(_SEGMENTS, int(nbytes / self.rate / _SEGMENT_SECONDS))

    def _inside(self, op: str, nbytes: int) -> float:
        """Seconds of the ops within a host: two on all bytes, or one on the share of each host."""
        most = max(map(len, self.layout.hosts))
        match op:
            case "all_reduce":
                times, copied = 2, 2 * nbytes
            case "broadcast":
                times, copied = 2, 4 * nbytes  # the source's host writes and reads them twice
            case _:
                times, copied = len(self.layout.hosts), nbytes
        return self.within.seconds(times * most, copied * (most - 1) / most)

    def _algorithm(self, op: str, size: int, nbytes: int) -> str:
        """What the outer transport runs between `size` ranks."""
        if (known := _OF_LIBRARIES.get(self.outer)) is not None:
            return known[op]
        if op == "reduce_scatter":
            return "pairwise"
        return cost.choose(cost.OPS[op](self.link, size, nbytes // size if op == "all_gather" else nbytes))


def _messages(op: str, algorithm: str, size: int, nbytes: int, root: int) -> tuple[int, list[Message]]:
    """The messages of an algorithm, and how many of them one rank sends or awaits one after the other."""
    rounds = max(size - 1, 0).bit_length()
    match algorithm:
        case "ring":
            passes = 2 if op == "all_reduce" else 1
            each = passes * nbytes * (size - 1) / size
            return passes * (size - 1), [(rank, (rank + 1) % size, each) for rank in range(size)]
        case "pairwise":
            return size - 1, [(a, b, nbytes / size) for a in range(size) for b in range(size) if a != b]
        case "pipeline":
            steps = size - 2 + math.ceil(nbytes / cost.PIPELINE_BYTES)
            return steps, [((root + at) % size, (root + at + 1) % size, nbytes) for at in range(size - 1)]
        case "binomial":  # a rank's parent is where its highest bit is not set
            places = ((at - (1 << (at.bit_length() - 1)), at) for at in range(1, size))
            return rounds, [((root + above) % size, (root + at) % size, nbytes) for above, at in places]
        case "bruck":
            far = {1 << at: nbytes / size * min(1 << at, size - (1 << at)) for at in range(rounds)}
            return rounds, [(rank, (rank - by) % size, each) for by, each in far.items() for rank in range(size)]
        case _:  # doubling and halving: ranks above a power of two use a partner below it
            ranks, passes = 1 << (size.bit_length() - 1), 2 if algorithm == "halving" else 1
            far = {
                1 << at: 2 * nbytes * (1 << at) / ranks if passes == 2 else nbytes
                for at in range(ranks.bit_length() - 1)
            }
            outer = [(rank, rank - ranks, nbytes) for rank in range(ranks, size)]
            inner = [(rank, rank ^ by, each) for by, each in far.items() for rank in range(ranks)]
            back = [(receiver, sender, size_of) for sender, receiver, size_of in outer]
            return passes * len(far) + (2 if outer else 0), [*inner, *outer, *back]
