"""Measures by simulation how the protocol's costs grow with the job, and its false alarms; fits and draws both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from holdfast.ft.console.units import counted
from holdfast.harness.simulate.scale import exchange
from holdfast.harness.simulate.scale.exchange import ExchangeResult
from holdfast.harness.simulate.scale.scale import ScaleResult, measure
from holdfast.harness.simulate.search.scenarios import RANKS_A_HOST, scenario
from holdfast.harness.simulate.search.soak import Soak, soak

SIZES = (1_000, 10_000, 100_000)
BURSTS = ((0.05, 0.0), (0.02, 0.0), (0.01, 0.1))
"""Pairs: the mean length of a burst of loss, and the share of loss that hits all paths of a node at once."""


class Fit(msgspec.Struct, frozen=True):
    """y = constant + slope * log10(ranks), by least squares; `error` is the largest deviation relative to y."""

    what: str
    constant: float
    slope: float
    error: float


class Study(msgspec.Struct, frozen=True):
    """All results. Times are protocol results in simulated time."""

    host_loss: tuple[ScaleResult, ...]
    crash: tuple[ScaleResult, ...]
    exchanges: tuple[ExchangeResult, ...]
    fits: tuple[Fit, ...]
    soaks: tuple[Soak, ...]


def study(
    seed: int,
    progress: Callable[[float, str], None] = lambda share, note: None,
    sizes: Sequence[int] = SIZES,
    hours: float = 1e6,
) -> Study:
    """Do all measurements. Takes minutes for the largest size."""
    done: dict[str, list[ScaleResult]] = {"host-loss": [], "crash": []}
    for index, ranks in enumerate(sizes):
        for name, scales in done.items():
            progress(0.9 * (index + 0.5 * (name == "crash")) / len(sizes), f"{name}, {counted(ranks, 'rank')}")
            scales.append(measure(scenario(name, ranks, ranks // RANKS_A_HOST, seed)))
    exchanges = []
    for ranks in sizes:
        progress(0.9, f"the exchange before a communicator, {counted(ranks, 'rank')}")
        exchanges.append(exchange.measure(ranks, seed))
    progress(0.95, "heartbeats under loss")
    soaks = tuple(soak(hours, burst=burst, shared=shared, seed=seed) for burst, shared in BURSTS)
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
    return Study(tuple(losses), tuple(done["crash"]), tuple(exchanges), fits, soaks)


def _fit(what: str, sizes: Sequence[int], values: Sequence[float]) -> Fit:
    x, y = np.log10(np.array(sizes, dtype=float)), np.array(values)
    slope, constant = np.polyfit(x, y, 1)
    error = float(np.max(np.abs(constant + slope * x - y) / np.maximum(y, 1e-12)))
    return Fit(what, float(constant), float(slope), error)


def sentences(result: Study) -> Iterator[str]:
    """The results in words."""
    for fit in result.fits:
        yield f"{fit.what}: {fit.constant:.4g} {fit.slope:+.4g} * log10(ranks), within {fit.error:.1%}"
    for one in result.soaks:
        yield (
            f"{one.false_evictions} false evictions in {one.hours:.3g} node-hours at {one.loss:.1%} loss in bursts of "
            f"{1e3 * one.burst:.0f} ms, {one.shared:.0%} of it on all paths of a node ({one.suspicions:,} suspicions)"
        )


def draw(result: Study, directory: Path) -> None:
    """Write plots as SVG files: recovery, messages, bytes, detection and false alarms."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "holdfast"
    mpl.rcParams["svg.fonttype"] = "none"
    sizes = [scale.ranks for scale in result.host_loss]

    def values(scales: Sequence[ScaleResult], name: str, factor: float = 1.0) -> list[float]:
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
    _bars(directory / "simulate-false-evictions.svg", result.soaks)


def _plot(path: Path, sizes: Sequence[int], curves: dict[str, list[float]], label: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, values in curves.items():
        axes.plot(sizes, values, marker="o", label=name)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel(label)
    axes.set_title("protocol results in simulated time", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _bars(path: Path, soaks: Sequence[Soak]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    names = [f"bursts of {1e3 * one.burst:.0f} ms,\n{one.shared:.0%} on all paths" for one in soaks]
    places = np.arange(len(soaks))
    axes.bar(
        places - 0.2, [one.suspicions for one in soaks], 0.4, label="suspicions, where three paths were silent at once"
    )
    bars = axes.bar(places + 0.2, [one.false_evictions for one in soaks], 0.4, label="false evictions")
    axes.bar_label(bars)
    axes.set_xticks(places, names)
    axes.set_yscale("symlog")
    axes.set_title(f"{soaks[0].hours:.0e} simulated node-hours, {soaks[0].loss:.0%} of heartbeats lost", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
