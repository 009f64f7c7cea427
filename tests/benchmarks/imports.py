"""What it costs to import holdfast: time beyond that of torch, and modules."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.common import profile

PROGRAM = """
import sys, time
import torch
before, began = set(sys.modules), time.perf_counter_ns()
import holdfast.comms
print((time.perf_counter_ns() - began) / 1e6, len(set(sys.modules) - before))
"""


def measure(processes: int) -> tuple[float, int]:
    """Milliseconds, and modules, that holdfast adds to torch: medians of fresh processes, but for the first."""
    samples = []
    for _ in range(processes + 1):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=True)
        samples.append(done.stdout.split())
    times, modules = zip(*samples[1:], strict=True)
    return statistics.median(map(float, times)), int(modules[0])


class Imports:
    """What the import adds in a fresh process that has torch imported."""

    timeout = 180

    def track_milliseconds(self) -> float:
        return measure(profile(5, 15))[0]

    def track_modules(self) -> int:
        return measure(1)[1]

    track_milliseconds.unit = "ms"  # type: ignore[attr-defined]
    track_modules.unit = "modules"  # type: ignore[attr-defined]


class Process:
    """Peak memory of a process that has imported holdfast, and the time of a plain command."""

    timeout = 120

    def peakmem_import(self) -> None:
        import holdfast.comms  # noqa: F401

    def timeraw_command_line(self) -> str:
        return "import holdfast.harness.cli.app"

    timeraw_command_line.repeat = (3, 5, 10.0)  # type: ignore[attr-defined]
