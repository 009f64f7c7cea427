"""Measures how much of the machine other processes used during a bench: figures from a busy machine prove little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def _busy() -> float:
    """CPU seconds that all processes of this machine used since its start, including time stolen by its host."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _used(pid: int) -> float:
    """CPU seconds of a process and of its ended children; 0 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Noise:
    """How many CPUs other processes use on average, from the construction of this object on.

    Not counted as others: this process, the process `helper`, and the children of both, once they have ended.
    """

    def __init__(self, helper: Callable[[], int | None] = lambda: None) -> None:
        self._helper = helper
        self._began, self._busy, self._ours = time.monotonic(), _busy(), self._used_by_us()

    def cpus(self) -> float:
        """The average. Call it after our children have ended: until then their use counts as that of others."""
        others = (_busy() - self._busy) - (self._used_by_us() - self._ours)
        return max(0.0, others / max(1e-3, time.monotonic() - self._began))

    def _used_by_us(self) -> float:
        helper = self._helper()
        return _used(os.getpid()) + (_used(helper) if helper is not None else 0.0)
