"""Renders pages: the pictures, then the template, into one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.charts import draw_curve, draw_histogram, draw_rate
from holdfast.harness.report.lanes import activities, draw_scene, draw_timeline
from holdfast.harness.report.model import FaultRecord, Learning, RunReport

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


@dataclass(frozen=True, slots=True)
class Scene:
    """The picture of one recovery, and the activities in it. `number` is that of the fault in the timeline."""

    number: int
    fault: FaultRecord
    picture: str
    activities: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunPictures:
    """What `run.html.j2` shows of a run's processes; its table of faults has so many `columns` of stages."""

    timeline: str
    roles: Sequence[str]
    scenes: Sequence[Scene]
    columns: int


def draw_run(report: RunReport, most_scenes: int | None = None) -> RunPictures:
    """The pictures of `run.html.j2`, with scenes of the first faults that were followed by something."""
    from markupsafe import Markup

    numbered = [(number, fault) for number, fault in enumerate(report.faults, start=1) if fault.stages]
    return RunPictures(
        timeline=Markup(draw_timeline(report.lanes, report.spans, report.faults, report.seconds)),
        roles=tuple(dict.fromkeys(lane.role for lane in report.lanes)),
        scenes=tuple(
            Scene(
                number,
                fault,
                Markup(draw_scene(fault, number, report.lanes, report.spans)),
                activities(fault, report.spans),
            )
            for number, fault in numbered[:most_scenes]
        ),
        columns=max((len(fault.stages) for fault in report.faults), default=0),
    )


def render(report: RunReport) -> str:
    """The page as text. Raises ModuleNotFoundError, naming what to install, without jinja2."""
    template = environment().get_template(TEMPLATE)
    learning = {} if report.learning is None else draw_learning(report.learning, report.faults, report.seconds)
    return template.render(report=report, pictures=draw_run(report), learning=learning) + "\n"


def write(report: RunReport, path: Path) -> None:
    """Write the page to `path`, in an existing folder."""
    path.write_text(render(report), encoding="utf-8")
