"""What every run records: frozen records, and their JSON form. Each bench extends them with what names its rows."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.stats import Timing, pairwise

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
    """Each row of `ours`, and each row of another contestant of the same `figure`: how many times as fast ours was."""
    for row in rows:
        for peer in rows:
            if row.contestant in ours and peer.contestant not in ours and figure(row) == figure(peer):
                yield row, peer, pairwise(row.turns, peer.turns)._asdict()
