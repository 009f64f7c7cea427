"""What every run records, as JSON, and how it is shown. Each bench extends the records with what names its rows."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from holdfast.ft.console.console import FoldingTable, styled
from holdfast.ft.console.units import counted, format_seconds
from holdfast.harness.measure.stats import Timing, pairwise


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


R = TypeVar("R", bound="Row")


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run. `others` is how many CPUs other processes used meanwhile, on average."""

    processor: str
    cpus: int
    kernel: str
    python: str
    torch: str
    others: float

    @staticmethod
    def here(noise: Noise) -> Machine:
        """This machine, and what `noise` has seen."""
        import torch

        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
        return Machine(
            processor=next(models, platform.processor()),
            cpus=os.cpu_count() or 1,
            kernel=platform.release(),
            python=platform.python_version(),
            torch=str(torch.__version__),
            others=noise.cpus(),
        )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of one contestant.

    `turns` are the medians (us) of each turn, in the order of the rounds. `wrong` counts results that came out wrong;
    it is None for a library that does not say.
    """

    contestant: str
    nbytes: int
    timing: Timing
    turns: tuple[float, ...]
    wrong: int | None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as fast ours was as `peer`: the median, the least and the most over rounds."""

    peer: str
    median: float
    least: float
    most: float


class ContestantFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A contestant that failed, or does not have what was asked for."""

    contestant: str
    reason: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `contestants` maps names to details of the library, `skipped` those left out to the reason."""

    command: str
    machine: Machine
    contestants: dict[str, str]
    skipped: dict[str, str]

    def json(self) -> str:
        """This run as JSON, indented by two spaces."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def wrong_in(rows: Iterable[Row]) -> int:
    """How many results were wrong in all rows."""
    return sum(row.wrong or 0 for row in rows)


def beside(
    rows: Sequence[R], ours: Collection[str], figure: Callable[[R], Hashable]
) -> Iterator[tuple[R, R, dict[str, float]]]:
    """Pair each row of `ours` with those of others for a `figure`; says how much faster ours was."""
    for row in rows:
        for peer in rows:
            if row.contestant in ours and peer.contestant not in ours and figure(row) == figure(peer):
                yield row, peer, pairwise(row.turns, peer.turns)._asdict()


# On a terminal --------------------------------------------------------------------------------------------------------


QUIET = 0.1
"""CPUs that other processes may use before the figures are in doubt."""


def show_time(microseconds: float) -> str:
    """Microseconds to three figures, with a unit."""
    return format_seconds(1e-6 * microseconds)


def figures(
    title: str, columns: Sequence[str], *, names: Sequence[str] = (), caption: str = "", drop: Sequence[str] = ()
) -> FoldingTable:
    """An empty table of figures: right-justified but for the columns of `names`; those of `drop` go first."""
    table = FoldingTable(title=title, title_justify="left", caption=caption, caption_justify="left", drop=drop)
    for column in columns:
        table.add_column(column, justify="left" if column in names else "right")
    return table


def describe(machine: Machine, more: str = "") -> str:
    """The machine of a run in words."""
    return (
        f"{machine.processor}, {counted(machine.cpus, 'CPU')}, Linux {machine.kernel}, Python {machine.python}, "
        f"torch {machine.torch}{more}; {others(machine.others)}"
    )


def others(cpus: float) -> str:
    """How many CPUs other processes used, in words."""
    return f"other processes used {cpus:.2f} CPUs meanwhile"


def show_head(run: Run, out: Console, more: str = "") -> None:
    """Print the machine of a run, yellow if it was busy with something else, the contestants, and those left out."""
    out.print(styled(describe(run.machine, more), "yellow" if run.machine.others > QUIET else ""))
    for name, detail in run.contestants.items():
        out.print(f"  {name}: {detail}")
    for name, reason in run.skipped.items():
        out.print(styled(f"  {name} left out", "yellow") + f": {reason}")
