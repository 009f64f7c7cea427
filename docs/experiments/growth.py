"""How do the protocol's costs grow with the job? Simulated.

`python docs/experiments/growth.py FOLDER` fits and draws both. It also simulates how the members of a view exchange
what they build its communicator from: the tree and the relays are those of production. A batch stands for the keys of
one member, so that a simulated member holds counts and no table. Simulated are the latencies of `NetworkModel` and the
time that a member takes for a message.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from holdfast.comms.transport.base import Peer
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.node.table_sharing import ARITY, TreeRelay, neighbour_ranks
from holdfast.harness.report.plot import Chart, light
from holdfast.harness.simulate.core.schedule import NetworkModel
from holdfast.harness.simulate.draw import RANKS_A_HOST, scenario
from holdfast.harness.simulate.run import SimulationResult, simulate

SIZES = (1_000, 10_000, 100_000)

# The exchange before a communicator ---------------------------------------------------------------------------------

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


def exchange(ranks: int, seed: int) -> ExchangeResult:
    """Simulate one exchange between `ranks` members, `RANKS_A_HOST` on each host."""
    return _Exchange(ranks, seed).run()


class _Exchange:
    def __init__(self, ranks: int, seed: int) -> None:
        self._view = _view_of(ranks)
        self._dice = random.Random(seed)
        self._network = NetworkModel()
        self._neighbours = [neighbour_ranks(self._view, rank) for rank in range(ranks)]
        pauses = ranks > ARITY + 1
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


# The study ------------------------------------------------------------------------------------------------------------


class Fit(msgspec.Struct, frozen=True):
    """y = constant + slope * log10(ranks), by least squares; `error` is the largest deviation relative to y."""

    what: str
    constant: float
    slope: float
    error: float


class Study(msgspec.Struct, frozen=True):
    """All results. Times are protocol results in simulated time."""

    host_loss: tuple[SimulationResult, ...]
    crash: tuple[SimulationResult, ...]
    exchanges: tuple[ExchangeResult, ...]
    fits: tuple[Fit, ...]


def study(seed: int, sizes: Sequence[int]) -> Study:
    """Do all measurements. Takes minutes for the largest size."""
    done: dict[str, list[SimulationResult]] = {"host-loss": [], "crash": []}
    for ranks in sizes:
        for name, scales in done.items():
            scales.append(simulate(scenario(name, ranks, ranks // RANKS_A_HOST, seed)))
    exchanges = [exchange(ranks, seed) for ranks in sizes]
    losses = done["host-loss"]
    fits = (
        _fit("seconds from first evidence to the last installation", sizes, [s.recovery() or 0.0 for s in losses]),
        _fit("hops from the proposer to the last rank", sizes, [float(s.depth) for s in losses]),
        _fit("messages a rank, mean", sizes, [s.messages_mean for s in losses]),
        _fit("messages of the busiest rank", sizes, [float(s.messages_max) for s in losses]),
        _fit("bytes a rank, mean", sizes, [s.bytes_mean for s in losses]),
        _fit("bytes of the busiest rank", sizes, [float(s.bytes_max) for s in losses]),
        _fit("seconds of the exchange before a communicator", sizes, [e.seconds for e in exchanges]),
        _fit("messages of the busiest rank in it", sizes, [float(e.messages_max) for e in exchanges]),
    )
    return Study(tuple(losses), tuple(done["crash"]), tuple(exchanges), fits)


def _fit(what: str, sizes: Sequence[int], values: Sequence[float]) -> Fit:
    x, y = np.log10(np.array(sizes, dtype=float)), np.array(values)
    slope, constant = np.polyfit(x, y, 1)
    error = float(np.max(np.abs(constant + slope * x - y) / np.maximum(y, 1e-12)))
    return Fit(what, float(constant), float(slope), error)


def sentences(result: Study) -> Iterator[str]:
    """The results in words."""
    for fit in result.fits:
        yield f"{fit.what}: {fit.constant:.4g} {fit.slope:+.4g} * log10(ranks), within {fit.error:.1%}"


def draw(result: Study, directory: Path) -> None:
    """Write plots as SVG files: recovery, messages, bytes and detection."""
    sizes = [scale.ranks for scale in result.host_loss]

    def values(scales: Sequence[SimulationResult], name: str, factor: float = 1.0) -> list[float]:
        return [factor * float(getattr(scale, name) or 0.0) for scale in scales]

    _plot(
        directory / "simulate-recovery.svg",
        sizes,
        {
            "a host is lost: first evidence to last installation": [
                1e3 * (s.recovery() or 0) for s in result.host_loss
            ],
            "a process ends: SIGKILL to last installation": values(result.crash, "installed", 1e3),
        },
        "ms, simulated",
    )
    _plot(
        directory / "simulate-detection.svg",
        sizes,
        {
            "a host is lost: until the first observer suspects": values(result.host_loss, "detected", 1e3),
            "a host is lost: until the register has the next view": values(result.host_loss, "agreed", 1e3),
            "a process ends: until the first of its host knows": values(result.crash, "detected", 1e3),
        },
        "ms, simulated",
    )
    _plot(
        directory / "simulate-messages.svg",
        sizes,
        {
            "mean": values(result.host_loss, "messages_mean"),
            "busiest rank": values(result.host_loss, "messages_max"),
            "hops": values(result.host_loss, "depth"),
        },
        "messages a rank, loss of a host",
    )
    _plot(
        directory / "simulate-bytes.svg",
        sizes,
        {
            "mean": values(result.host_loss, "bytes_mean", 1 / 1024),
            "busiest rank": values(result.host_loss, "bytes_max", 1 / 1024),
        },
        "KiB a rank, loss of a host",
    )


def _plot(path: Path, sizes: Sequence[int], curves: dict[str, list[float]], label: str) -> None:
    chart = Chart(560, 320)
    axes = chart.axes
    for index, (name, values) in enumerate(curves.items()):
        axes.plot(sizes, values, marker="o", label=name, color=light(f"s{index}"))
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel(label)
    axes.set_title("protocol results in simulated time", fontsize=11)
    axes.grid(axis="y")
    axes.legend(fontsize=10, frameon=False)
    path.write_text(chart.svg(label, standalone=True) + "\n", encoding="utf-8")


def main() -> None:
    """Print the results, and write them and their plots to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for simulate.json and the plots")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks, two or more")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    result = study(asked.seed, asked.sizes)
    print(*sentences(result), sep="\n")
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "simulate.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    draw(result, asked.folder)


if __name__ == "__main__":
    main()
