"""What the processes of a run use together, by the kernel's accounts of them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of all processes that live or were waited for; memory of those that live."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0


def usage(first: int) -> Usage:
    """The sum over a run's first process and its descendants; those that end meanwhile count for nothing.

    The memory leaves out what each process has from the template: as much as the first process, which only waits.
    """
    ticks, sizes = 0, list[int]()
    todo = [first]
    while todo:
        pid = todo.pop()
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            sizes.append(_memory(pid))
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
    base = sizes[0] if sizes else 0
    return Usage(ticks / _TICKS, sum(max(0, size - base) for size in sizes))


def _memory(pid: int) -> int:
    """Anonymous and shared memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024
