"""What `import holdfast.comms` costs beyond `import torch`, measured in fresh processes.

Each round runs one process that imports torch, and one that imports holdfast.comms (which imports torch), in turn;
and torch once more; the figure is the median of the differences, and two imports of torch say how large noise is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import msgspec

_PROGRAM = """
import time
start = time.perf_counter_ns()
import {module}
print(time.perf_counter_ns() - start)
"""


class ImportCost(msgspec.Struct, frozen=True):
    """Medians in milliseconds. `extra` is that of the differences within a round, `noise` of two torch imports."""

    torch: float
    holdfast: float
    extra: float
    noise: float
    rounds: int


def _seconds(module: str) -> float:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(module=module)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(run.stdout.split()[-1]) / 1e9


def measure(rounds: int = 11, module: str = "holdfast.comms") -> ImportCost:
    """Import each in `rounds` fresh processes, after one round that only warms the file cache."""
    samples = [(_seconds("torch"), _seconds(module), _seconds("torch")) for _ in range(rounds + 1)][1:]
    return ImportCost(
        torch=statistics.median(1e3 * torch for torch, _, _ in samples),
        holdfast=statistics.median(1e3 * ours for _, ours, _ in samples),
        extra=statistics.median(1e3 * (ours - (torch + again) / 2) for torch, ours, again in samples),
        noise=statistics.median(1e3 * abs(again - torch) for torch, _, again in samples),
        rounds=rounds,
    )
