"""What `import holdfast.comms` costs beyond `import torch`, measured in fresh processes.

Each process imports torch first and then holdfast.comms, and times both. The second time includes all other modules
that holdfast.comms imports, and none of the noise of torch's import, which is far larger.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import msgspec

_PROGRAM = """
import time
start = time.perf_counter_ns()
import torch
between = time.perf_counter_ns()
import {module}
print(between - start, time.perf_counter_ns() - between)
"""


class ImportCost(msgspec.Struct, frozen=True):
    """Milliseconds: the medians of importing torch, and of importing ours after it, and the latter's least and most."""

    torch: float
    extra: float
    extra_min: float
    extra_max: float
    processes: int


def measure(processes: int = 11, module: str = "holdfast.comms") -> ImportCost:
    """Import in `processes` fresh processes, after one that only warms the file cache."""
    samples = []
    for _ in range(processes + 1):
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(module=module)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        samples.append([int(word) / 1e6 for word in run.stdout.split()])
    torch, extra = zip(*samples[1:], strict=True)
    return ImportCost(statistics.median(torch), statistics.median(extra), min(extra), max(extra), processes)
