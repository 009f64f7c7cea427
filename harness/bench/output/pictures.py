"""The charts of a bench: bus bandwidth under the machine's roofline, time of small ops, and time over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.collectives.contestants import MEMCPY
from holdfast.harness.bench.collectives.ranks import HOLDFAST
from holdfast.harness.bench.output.chart import Series, draw_lines
from holdfast.harness.bench.output.results import Bench, BenchRow
from holdfast.harness.bench.output.show import show_time

ROOF = "copy in memory"
"""The label of `memcpy`: all ranks at once copy as many bytes in their own memory."""


def _bandwidth(value: float) -> str:
    return f"{value:.3g}"


def _ranks(value: float) -> str:
    return f"{value:.0f} ranks"


def short(contestant: str) -> str:
    """The name of a contestant in charts and tables."""
    return ROOF if contestant == MEMCPY else contestant.removeprefix(HOLDFAST)


def _order(bench: Bench) -> dict[str, int]:
    """A colour for each contestant, ours first."""
    names = dict.fromkeys(row.contestant for row in bench.rows)
    return {name: index for index, name in enumerate(sorted(names, key=lambda name: not name.startswith(HOLDFAST)))}


def _series(rows: list[BenchRow], colours: dict[str, int], over_ranks: bool, bandwidth: bool) -> list[Series]:
    found = []
    for name in sorted({row.contestant for row in rows}, key=colours.__getitem__):
        mine = sorted((row for row in rows if row.contestant == name), key=lambda row: (row.ranks, row.nbytes))
        points = tuple(
            (float(row.ranks if over_ranks else row.nbytes), row.busbw if bandwidth else row.timing.p50) for row in mine
        )
        found.append(Series(short(name), points, colours[name], name.startswith(HOLDFAST), name == MEMCPY))
    return found


def bandwidths(bench: Bench, standalone: bool = False) -> Iterator[tuple[str, str]]:
    """Yield a name and a chart of bus bandwidth over size for each op and number of ranks."""
    colours = _order(bench)
    for op, ranks in dict.fromkeys((row.op, row.ranks) for row in bench.rows if row.nbytes):
        rows = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks) and row.nbytes]
        if len({row.nbytes for row in rows}) > 1:
            series = _series(rows, colours, over_ranks=False, bandwidth=True)
            heading = f"{op}, {counted(ranks, 'rank')}"
            chart = draw_lines(heading, series, _size, _bandwidth, "bus bandwidth, GB/s", standalone)
            yield f"{op}-{ranks}", chart


def times(bench: Bench, standalone: bool = False) -> Iterator[tuple[str, str]]:
    """Yield a name and a chart of time over size, without the roofline, for each op and number of ranks."""
    colours = _order(bench)
    for op, ranks in dict.fromkeys((row.op, row.ranks) for row in bench.rows if row.nbytes):
        rows = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks) and row.contestant != MEMCPY]
        if len({row.nbytes for row in rows if row.nbytes}) > 1:
            series = _series(rows, colours, over_ranks=False, bandwidth=False)
            yield (
                f"{op}-{ranks}-time",
                draw_lines(f"{op}, {counted(ranks, 'rank')}", series, _size, show_time, "p50", standalone),
            )


def sweeps(bench: Bench, standalone: bool = False) -> Iterator[tuple[str, str]]:
    """Yield a chart of time over ranks for each op and size measured with several numbers of ranks."""
    colours = _order(bench)
    for op, size in dict.fromkeys((row.op, _nominal(row.nbytes)) for row in bench.rows):
        rows = [row for row in bench.rows if (row.op, _nominal(row.nbytes)) == (op, size) and row.contestant != MEMCPY]
        if len({row.ranks for row in rows}) > 1:
            series = _series(rows, colours, over_ranks=True, bandwidth=False)
            heading = f"{op}{f' of {format_bytes(size)}' if size else ''}"
            yield f"{op}-{size}-ranks", draw_lines(heading, series, _ranks, show_time, "p50", standalone)


def _nominal(nbytes: int) -> int:
    """The requested size: `nbytes` may be a little less, so that the ranks divide it."""
    power = 1 << max(0, nbytes - 1).bit_length()
    return power if nbytes and power - nbytes < power // 8 else nbytes


def _size(value: float) -> str:
    return format_bytes(int(value))
