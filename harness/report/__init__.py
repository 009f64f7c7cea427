"""Reports of runs: one self-contained HTML file that works offline, in light and dark, on a laptop and a phone.

from holdfast.harness.report import RunReport, write
write(report, Path("report.html"))
"""

from holdfast.harness.report.model import (
    Curve,
    FaultRecord,
    Figure,
    Learning,
    Point,
    ProcessRecord,
    RecoveryStage,
    RunReport,
    Span,
)
from holdfast.harness.report.render import render, write

__all__ = [
    "Curve",
    "FaultRecord",
    "Figure",
    "Learning",
    "Point",
    "ProcessRecord",
    "RecoveryStage",
    "RunReport",
    "Span",
    "render",
    "write",
]
