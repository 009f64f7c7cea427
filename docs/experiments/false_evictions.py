"""How often is a healthy rank evicted by mistake? `python docs/experiments/false_evictions.py FOLDER`.

Heartbeats are lost in bursts: each path between a node and one of its observers loses everything for a while, again and
again. A suspicion needs a burst that loses several heartbeats in a row, an eviction most of a node's observers at once.
So the sufficiently long bursts are drawn for the whole time; only where those of three paths of a node overlap are
heartbeats sent one by one, through the production detectors and core.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.comms.transport.base import Peer
from holdfast.ft.detectors.heartbeat import SilenceTracker
from holdfast.ft.membership.events import Started, Suspicion, ViewRead
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.topology import Shape, observers
from holdfast.ft.membership.view import Job, Member, Timeouts, View
from holdfast.harness.report.plot import Chart, light

HOSTS = 128
NODES = 1000
BURSTS = ((0.05, 0.0), (0.02, 0.0), (0.01, 0.1))
"""Pairs: the mean length of a burst of loss, and the share of loss that hits all paths of a node at once."""
AROUND = 1.0
LOOKS = 0.025


class Soak(msgspec.Struct, frozen=True):
    """The result for `hours` of node time with a share `loss` of heartbeats lost.

    Losses come in bursts of `burst` seconds on average; `shared` is the share of loss that hits all paths of a node at
    once. `long_bursts` could have led to a suspicion, `windows` were simulated, in which there were `suspicions`.
    `false_evictions` is the result that matters.
    """

    hours: float
    loss: float
    burst: float
    shared: float
    heartbeat: float
    suspect: float
    long_bursts: int
    windows: int
    suspicions: int
    false_evictions: int


PATHS = 3
"""Heartbeats are sent where bursts overlap on so many paths of a node: an eviction takes over half of 8 observers."""

Burst = tuple[float, float, int]
"""Begin, end, and the path; -1 for all paths of a node."""
Bursts = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]


def soak(hours: float, loss: float, burst: float, shared: float, timeouts: Timeouts, seed: int) -> Soak:
    """Simulate `hours` node-hours. Every node has the same number of observers, each on a path of its own."""
    rng = np.random.default_rng(seed)
    bench = _SoakNode(timeouts, seed)
    seconds = hours * 3600 / NODES
    shortest = timeouts.suspect - 2 * timeouts.heartbeat
    paths = len(bench.observers)
    counts = [0, 0, 0, 0]
    for _ in range(NODES):
        bursts = _merged(
            _long_bursts(rng, seconds, loss * (1 - shared), burst, shortest, paths),
            _long_bursts(rng, seconds, loss * shared, burst, shortest, 0),
        )
        counts[0] += len(bursts[0])
        for window in _overlapping(bursts, timeouts.heartbeat):
            suspicions, evicted = bench.play(window)
            counts[1] += 1
            counts[2] += suspicions
            counts[3] += evicted
    return Soak(hours, loss, burst, shared, timeouts.heartbeat, timeouts.suspect, *counts)


def _long_bursts(
    rng: np.random.Generator, seconds: float, loss: float, burst: float, shortest: float, paths: int
) -> Bursts:
    """Draw the bursts of at least `shortest` seconds on each of `paths` paths; 0: on all paths at once."""
    count = int(rng.poisson(loss / burst * math.exp(-shortest / burst) * max(1, paths) * seconds)) if loss else 0
    begins = rng.uniform(0.0, seconds, count)
    which = rng.integers(0, paths, count) if paths else np.full(count, -1)
    return begins, begins + shortest + rng.exponential(burst, count), which


def _merged(first: Bursts, second: Bursts) -> Bursts:
    """Both lists, in the order of their begin."""
    begins, ends, paths = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    order = np.argsort(begins)
    return begins[order], ends[order], paths[order]


def _overlapping(bursts: Bursts, slack: float) -> Iterator[list[Burst]]:
    """Groups of bursts in which at least `PATHS` paths, or all, are silent at about the same time."""
    begins, ends, paths = bursts
    if not len(begins):
        return
    apart = np.flatnonzero(begins[1:] > np.maximum.accumulate(ends)[:-1] + slack) + 1
    firsts, lasts = np.concatenate(([0], apart)), np.concatenate((apart, [len(begins)]))
    common = np.add.reduceat(paths < 0, firsts) > 0
    for index in np.flatnonzero((lasts - firsts >= PATHS) | common):
        first, last = firsts[index], lasts[index]
        group = list(
            zip(begins[first:last].tolist(), ends[first:last].tolist(), paths[first:last].tolist(), strict=True)
        )
        if len({path for *_, path in group}) >= PATHS or common[index]:
            yield group


class _SoakNode:
    """One node of a large job, its observers with their detectors, and the proposer that gets their reports."""

    def __init__(self, timeouts: Timeouts, seed: int) -> None:
        members = tuple(Member(f"p{n}", f"h{n}:1", Peer(f"h{n}", n + 1, 1)) for n in range(HOSTS))
        self._view = View(1, "running", members, Job("job", HOSTS, 1, HOSTS, ("gloo",), "gloo"), "soak")
        self._node, self._timeouts = members[HOSTS // 2], timeouts
        self.observers = observers(self._view, self._node, Shape())
        self._rng = random.Random(seed)

    def play(self, bursts: list[Burst]) -> tuple[int, int]:
        """Simulate heartbeats around these bursts.

        Returns the number of suspicions, and 1 if the node counted as lost, else 0.
        """
        rng, beat = self._rng, self._timeouts.heartbeat
        begin, end = bursts[0][0] - AROUND, max(until for _, until, _ in bursts) + AROUND
        head = Membership(self._view.members[0], self._view.job, self._timeouts)
        head = head.on(ViewRead(self._view), begin)[0].on(Started(), begin)[0]
        watches = [SilenceTracker(member, self._timeouts, lambda pid: False) for member in self.observers]
        happenings: list[tuple[float, int, int]] = []
        at = begin + rng.random() * beat
        while at < end:
            arriving = at + 0.0002 * rng.lognormvariate(0.0, 0.5)
            lost = {path for since, until, path in bursts if since <= at < until}
            happenings += [(arriving, 0, path) for path in range(len(self.observers)) if not lost & {path, -1}]
            at += beat
        for path in range(len(self.observers)):
            phase = rng.random() * LOOKS
            happenings += [(begin + phase + n * LOOKS, 1, path) for n in range(int((end - begin) / LOOKS))]
        suspicions = 0
        for watch in watches:
            watch.follow([self._node], begin)
        for now, looks, path in sorted(happenings):
            watch = watches[path]
            for finding in watch.look(now) if looks else watch.hear(self._node.id, now):
                suspicions += isinstance(finding, Suspicion)
                head, _ = head.on(finding, now)
                if self._node.id in head.evidence.lost:
                    return suspicions, 1
        return suspicions, 0


def draw(path: Path, soaks: Sequence[Soak]) -> None:
    """Write the picture."""
    chart = Chart(560, 320)
    axes = chart.axes
    names = [f"bursts of {1e3 * one.burst:.0f} ms,\n{one.shared:.0%} on all paths" for one in soaks]
    places = np.arange(len(soaks))
    label = "suspicions, where three paths were silent at once"
    axes.bar(places - 0.2, [one.suspicions for one in soaks], 0.4, label=label, color=light("s0"))
    evicted = [one.false_evictions for one in soaks]
    bars = axes.bar(places + 0.2, evicted, 0.4, label="false evictions", color=light("s1"))
    axes.bar_label(bars)
    axes.set_xticks(places, names)
    axes.set_yscale("symlog")
    axes.set_title(f"{soaks[0].hours:.0e} simulated node-hours, {soaks[0].loss:.0%} of heartbeats lost", fontsize=11)
    axes.legend(fontsize=10, frameon=False)
    path.write_text(chart.svg("false evictions", standalone=True) + "\n", encoding="utf-8")


def main() -> None:
    """Print the results, and write them and a picture to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for false-evictions.json and the picture")
    parser.add_argument("--hours", type=float, default=1e6, help="node-hours of heartbeats")
    parser.add_argument("--loss", type=float, default=0.01, help="the share of heartbeats that is lost")
    parser.add_argument("--bursts", type=float, nargs="+", help="mean lengths of bursts, if not those of the figure")
    parser.add_argument(
        "--shared", type=float, default=0.0, help="with --bursts: the share of loss on all paths at once"
    )
    parser.add_argument("--suspect", type=float, default=0.4, help="seconds of silence before a member is suspected")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    bursts = [(burst, asked.shared) for burst in asked.bursts] if asked.bursts else BURSTS
    timeouts = Timeouts(suspect=asked.suspect)
    soaks = [soak(asked.hours, asked.loss, burst, shared, timeouts, asked.seed) for burst, shared in bursts]
    for one in soaks:
        print(
            f"{one.false_evictions} false evictions in {one.hours:.3g} node-hours at {one.loss:.1%} loss in bursts of "
            f"{1e3 * one.burst:.0f} ms, {one.shared:.0%} of it on all paths of a node ({one.suspicions:,} suspicions)"
        )
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = msgspec.json.format(msgspec.json.encode(soaks), indent=2)
    (asked.folder / "false-evictions.json").write_bytes(found + b"\n")
    draw(asked.folder / "simulate-false-evictions.svg", soaks)


if __name__ == "__main__":
    main()
