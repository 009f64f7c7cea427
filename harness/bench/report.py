"""What a bench of ops measured: records and their JSON form, tables in the terminal, charts, and one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.ft.console.console import styled
from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.drivers import HOLDFAST, MEMCPY
from holdfast.harness.bench.operations import OPERATIONS
from holdfast.harness.measure.results import (
    ContestantFailure,
    Ratio,
    Row,
    Run,
    beside,
    figures,
    show_head,
    show_time,
    wrong_in,
)
from holdfast.harness.measure.stats import Timing
from holdfast.harness.report.charts import WIDTH, Series, draw_lines, draw_lines_on
from holdfast.harness.report.plot import SERIES, Chart, light
from holdfast.harness.report.render import environment


class BenchRow(Row, frozen=True, kw_only=True):
    """One op at one size on one library.

    `timing` is what the table shows: ops in blocks up to 64 KiB, ops one by one above. `single` is ops one
    by one. `algbw` and `busbw` are GB/s (1e9 bytes) at p50. `wrong` counts elements (for barrier: exits before the last
    entry).
    """

    op: str
    ranks: int
    dtype: str
    single: Timing
    algbw: float
    busbw: float


class OpRatio(Ratio, frozen=True, kw_only=True):
    """How many times as fast as `peer` was `ours`, in an op."""

    op: str
    ranks: int
    nbytes: int
    ours: str


class OpFailure(ContestantFailure, frozen=True, kw_only=True):
    """An op in which a library failed, or that it does not have, at one size and number of ranks."""

    op: str
    ranks: int
    nbytes: int


class Bench(Run, frozen=True, kw_only=True):
    """A whole run.

    `contestants` maps 'name, n ranks' to the library's details and the places of its ranks. `fresh`: ranks wrote their
    inputs anew before each op, in the time taken. `unmeasured` are ops that a library does not have: none was tried.
    """

    rows: tuple[BenchRow, ...]
    ratios: tuple[OpRatio, ...]
    failures: tuple[OpFailure, ...]
    unmeasured: tuple[OpFailure, ...] = ()
    fresh: bool = False

    @property
    def wrong(self) -> int:
        """How many elements were wrong in all rows."""
        return wrong_in(self.rows)

    def left_out(self) -> dict[str, str]:
        """Which library was left out of which op, and why: one entry for all sizes."""
        return {f"{each.contestant} left out of {each.op}": each.reason for each in self.unmeasured}


def ratios(rows: Sequence[BenchRow], ours: Sequence[str]) -> tuple[OpRatio, ...]:
    """Every one of `ours` against every other library at the same op, size and ranks, round by round."""
    return tuple(
        OpRatio(op=row.op, ranks=row.ranks, nbytes=row.nbytes, ours=row.contestant, peer=peer.contestant, **ratio)
        for row, peer, ratio in beside(rows, ours, lambda row: (row.op, row.nbytes, row.ranks))
    )


# On a terminal --------------------------------------------------------------------------------------------------------


def _wrong(count: int | None) -> Text:
    if count is None:
        return Text("?")
    return styled(count, "bold red" if count else "")


def _table(
    op: str, ranks: int, rows: list[BenchRow], ratios: dict[tuple[int, str, str], OpRatio], fresh: bool
) -> Table:
    ours = list(dict.fromkeys(name for _, name, _ in ratios))
    operation = OPERATIONS[op]
    all_right = () if any(row.wrong for row in rows) else ("#wrong",)
    speed_ups = [f"{short(name)} speed-up" for name in ours]
    table = figures(
        f"{op}, {counted(ranks, 'rank')}" + (", inputs written anew before each op" if fresh else ""),
        ("size", "library", "p50", "p99", "min", "algbw GB/s", "busbw GB/s", "#wrong", *speed_ups),
        names=("library",),
        caption=f"size: {operation.size}; busbw = algbw x {operation.factor}"
        + ("; speed-up: how many times as fast, median over the rounds" if ours else ""),
        drop=("min", "p99", "algbw GB/s", *all_right, "busbw GB/s", *reversed(speed_ups)),
    )
    before = None
    for row in sorted(rows, key=lambda row: row.nbytes):
        if before not in (None, row.nbytes):
            table.add_section()
        against = [ratios.get((row.nbytes, name, row.contestant)) for name in ours]
        table.add_row(
            "" if row.nbytes == before else format_bytes(row.nbytes),
            short(row.contestant),
            show_time(row.timing.p50),
            show_time(row.timing.p99),
            show_time(row.timing.min),
            f"{row.algbw:.3g}" if row.nbytes else "",
            f"{row.busbw:.3g}" if row.nbytes else "",
            _wrong(row.wrong),
            *("" if ratio is None else f"{ratio.median:.3g}x" for ratio in against),
        )
        before = row.nbytes
    return table


def show(bench: Bench, out: Console) -> None:
    """Print the whole bench."""
    show_head(bench, out)
    for what, reason in bench.left_out().items():
        out.print(styled(f"  {what}", "yellow") + f": {reason}")
    for op, ranks in dict.fromkeys((row.op, row.ranks) for row in bench.rows):
        chosen = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks)]
        ratios = {(r.nbytes, r.ours, r.peer): r for r in bench.ratios if (r.op, r.ranks) == (op, ranks)}
        out.print()
        out.print(_table(op, ranks, chosen, ratios, bench.fresh))
    for failure in bench.failures:
        out.print(
            styled("failed", "bold red") + f": {failure.contestant}, {failure.op}, {counted(failure.ranks, 'rank')}, "
            f"{format_bytes(failure.nbytes)}: {failure.reason}"
        )


# In pictures ----------------------------------------------------------------------------------------------------------


TEMPLATE = "page.html.j2"
ROOF = "copy in memory"
"""The label of `memcpy`: all ranks at once copy as many bytes in their own memory."""


def short(contestant: str) -> str:
    """The name of a contestant in charts and tables."""
    return ROOF if contestant == MEMCPY else contestant.removeprefix(HOLDFAST)


def _bandwidth(value: float) -> str:
    return f"{value:.3g}"


def _ranks(value: float) -> str:
    return f"{value:.0f} ranks"


def _size(value: float) -> str:
    return format_bytes(int(value))


def _colours(bench: Bench) -> dict[str, int]:
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


def _with_sizes(bench: Bench) -> Iterator[tuple[str, int, list[BenchRow]]]:
    """Each op and number of ranks, with its rows of several sizes."""
    for op, ranks in dict.fromkeys((row.op, row.ranks) for row in bench.rows if row.nbytes):
        rows = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks) and row.nbytes]
        if len({row.nbytes for row in rows}) > 1:
            yield op, ranks, rows


def bandwidths(bench: Bench) -> Iterator[tuple[str, Chart]]:
    """Yield a name and a chart of bus bandwidth over size for each op and number of ranks."""
    colours = _colours(bench)
    for op, ranks, rows in _with_sizes(bench):
        series = _series(rows, colours, over_ranks=False, bandwidth=True)
        heading = f"{op}, {counted(ranks, 'rank')}"
        yield f"{op}-{ranks}", draw_lines(heading, series, _size, _bandwidth, "bus bandwidth, GB/s")


def times(bench: Bench) -> Iterator[tuple[str, Chart]]:
    """Yield a name and a chart of time over size, without the roofline, for each op and number of ranks."""
    colours = _colours(bench)
    for op, ranks, rows in _with_sizes(bench):
        series = _series([row for row in rows if row.contestant != MEMCPY], colours, over_ranks=False, bandwidth=False)
        if series:
            heading = f"{op}, {counted(ranks, 'rank')}"
            yield f"{op}-{ranks}-time", draw_lines(heading, series, _size, show_time, "p50")


def sweeps(bench: Bench) -> Iterator[tuple[str, Chart]]:
    """Yield a chart of time over ranks for each op and size measured with several numbers of ranks."""
    colours = _colours(bench)
    for op, size in dict.fromkeys((row.op, _nominal(row.nbytes)) for row in bench.rows):
        rows = [row for row in bench.rows if (row.op, _nominal(row.nbytes)) == (op, size) and row.contestant != MEMCPY]
        if len({row.ranks for row in rows}) > 1:
            series = _series(rows, colours, over_ranks=True, bandwidth=False)
            heading = f"{op}{f' of {format_bytes(size)}' if size else ''}"
            yield f"{op}-{size}-ranks", draw_lines(heading, series, _ranks, show_time, "p50")


def _nominal(nbytes: int) -> int:
    """The requested size: `nbytes` may be a little less, so that the ranks divide it."""
    power = 1 << max(0, nbytes - 1).bit_length()
    return power if nbytes and power - nbytes < power // 8 else nbytes


def plot(bench: Bench, path: Path) -> None:
    """Write a picture: for each op and number of ranks the time, and below it the bus bandwidth.

    Raises ValueError if there is nothing to plot. `check_plot` says whether it can be written.
    """
    pairs = list(dict.fromkeys((row.op, row.ranks) for row in bench.rows if row.nbytes))
    if not pairs:
        raise ValueError("there is nothing to plot: no op with a size was measured")
    chart, colours = Chart(WIDTH, 640.0 * len(pairs), [1.0] * 2 * len(pairs)), _colours(bench)
    for index, (op, ranks) in enumerate(pairs):
        rows = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks)]
        time_axes, bandwidth_axes = chart.all_axes[2 * index : 2 * index + 2]
        without_roof = [row for row in rows if row.contestant != MEMCPY] or rows
        draw_lines_on(chart, time_axes, _series(without_roof, colours, False, False), _size, show_time)
        draw_lines_on(chart, bandwidth_axes, _series(rows, colours, False, True), _size, _bandwidth)
        time_axes.set_title(f"{op}, {counted(ranks, 'rank')}", weight="bold", loc="left")
        time_axes.set_ylabel("p50 of an op")
        bandwidth_axes.set_ylabel("bus bandwidth, GB/s")
        for name, colour in colours.items():
            if any(row.contestant == name for row in rows):
                paint = light("roof" if name == MEMCPY else f"s{colour % SERIES}")
                bandwidth_axes.plot([], [], color=paint, linewidth=3, label=short(name))
        bandwidth_axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    chart.save(path)


def render(bench: Bench, when: str = "") -> str:
    """The page. Raises ModuleNotFoundError, naming what to install, without jinja2."""
    templates = environment(Path(__file__).parent)
    templates.filters |= {"counted": counted, "size": format_bytes, "time": show_time, "short": short}
    from markupsafe import Markup

    charts = [*bandwidths(bench), *times(bench), *sweeps(bench)]
    ours = [failure for failure in (*bench.failures, *bench.unmeasured) if failure.contestant.startswith(HOLDFAST)]
    page = templates.get_template(TEMPLATE).render(
        bench=bench,
        good=not bench.wrong and not ours,
        when=when or datetime.now(UTC).strftime("%-d %B %Y, %H:%M UTC"),
        charts=[(name, Markup(chart.svg(name))) for name, chart in charts],
        pairs=list(dict.fromkeys((row.op, row.ranks) for row in bench.rows)),
        operations=OPERATIONS,
    )
    return page + "\n"


def write(bench: Bench, folder: Path) -> Path:
    """Write report.html and bench.json into `folder`; returns the path of the page."""
    page = render(bench)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(bench.json() + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page, encoding="utf-8")
    return folder / "report.html"
