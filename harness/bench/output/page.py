"""A bench as one self-contained HTML page: charts, tables, the machine, how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.collectives.definitions import OPERATIONS
from holdfast.harness.bench.collectives.ranks import HOLDFAST
from holdfast.harness.bench.output import plot
from holdfast.harness.bench.output.compare import Compared
from holdfast.harness.bench.output.results import Bench
from holdfast.harness.measure.show import show_time
from holdfast.harness.report.render import environment

TEMPLATE = "page.html.j2"


def render(bench: Bench, compared: Sequence[Compared] = (), when: str = "") -> str:
    """The page. Raises ModuleNotFoundError, naming what to install, without jinja2."""
    templates = environment(Path(__file__).parent)
    templates.filters |= {"counted": counted, "size": format_bytes, "time": show_time, "short": plot.short}
    from markupsafe import Markup

    charts = [*plot.bandwidths(bench), *plot.times(bench), *plot.sweeps(bench)]
    ours = [failure for failure in (*bench.failures, *bench.unmeasured) if failure.contestant.startswith(HOLDFAST)]
    page = templates.get_template(TEMPLATE).render(
        bench=bench,
        good=not bench.wrong and not ours,
        when=when or datetime.now(UTC).strftime("%-d %B %Y, %H:%M UTC"),
        charts=[(name, Markup(chart.svg(name))) for name, chart in charts],
        pairs=list(dict.fromkeys((row.op, row.ranks) for row in bench.rows)),
        operations=OPERATIONS,
        compared=compared,
    )
    return page + "\n"


def write(bench: Bench, folder: Path, compared: Sequence[Compared] = ()) -> Path:
    """Write report.html and bench.json (which `--against` reads) into `folder`; returns the path of the page."""
    page = render(bench, compared)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(bench.json() + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page, encoding="utf-8")
    return folder / "report.html"
