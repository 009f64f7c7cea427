"""Renders the page: the pictures, then the template, into one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.charts import draw_curve, draw_histogram, draw_rate
from holdfast.harness.report.model import FaultRecord, Learning, RunReport
from holdfast.harness.report.scene import activities, draw_scene
from holdfast.harness.report.timeline import draw_timeline

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE = "report.html.j2"


def environment(*folders: Path) -> Environment:
    """The jinja2 environment of the templates in `folders` and here.

    Raises ModuleNotFoundError, naming what to install, without jinja2.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reports need jinja2: pip install 'holdfast[report]'") from error
    made = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["duration"] = coarse_seconds
    return made


def draw_learning(learning: Learning, faults: Sequence[FaultRecord], seconds: float) -> dict[str, Any]:
    """The pictures of `learning.html.j2`, by name."""
    from markupsafe import Markup

    return {
        "curve": Markup(draw_curve(learning.curve, faults)),
        "staleness": Markup(draw_histogram(learning.staleness, "Groups by staleness")),
        "latencies": Markup(draw_histogram(learning.latencies, "Versions by the time until they were served")),
        "tokens": Markup(draw_rate(learning.tokens, faults, seconds, "Policy tokens a second")),
    }


def render(report: RunReport) -> str:
    """The page as text. Raises ModuleNotFoundError, naming what to install, without jinja2."""
    template = environment().get_template(TEMPLATE)
    from markupsafe import Markup

    scenes = [
        Markup(draw_scene(fault, number, report.lanes, report.spans))
        for number, fault in enumerate(report.faults, start=1)
    ]
    page = template.render(
        report=report,
        roles=list(dict.fromkeys(lane.role for lane in report.lanes)),
        pictures=draw_learning(report.learning, report.faults, report.seconds),
        timeline=Markup(draw_timeline(report.lanes, report.spans, report.faults, report.seconds)),
        scenes=scenes,
        activities=[activities(fault, report.spans) for fault in report.faults],
        columns=max((len(fault.stages) for fault in report.faults), default=0),
    )
    return page + "\n"


def write(report: RunReport, path: Path) -> None:
    """Write the page to `path`, in an existing folder."""
    path.write_text(render(report), encoding="utf-8")
