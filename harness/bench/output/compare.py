"""Compares a bench with a stored one: which rows became faster or slower.

Times of two runs differ for many reasons, so only a difference outside the spread of both runs' turns is a change;
`holdfast gate` can tell small changes from noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.harness.bench.output.results import Bench, BenchRow

Change = Literal["faster", "slower", "as before"]


class NotABench(ValueError):
    """The file does not hold a bench's JSON."""


class Compared(msgspec.Struct, frozen=True):
    """A row then and now, in microseconds; `ratio` is then / now, so above 1 is faster now."""

    op: str
    ranks: int
    contestant: str
    nbytes: int
    then: float
    now: float
    ratio: float
    change: Change


def load(path: Path) -> Bench:
    """The bench that `--json` or `--report` wrote. Raises `NotABench`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Bench)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise NotABench(f"{path} is not the JSON of a bench: {error}") from error


def compare(now: Bench, then: Bench) -> tuple[Compared, ...]:
    """The rows that both have."""
    before = {_key(row): row for row in then.rows}
    return tuple(_compared(before[_key(row)], row) for row in now.rows if _key(row) in before)


def _key(row: BenchRow) -> tuple[str, int, str, int, str]:
    return row.op, row.ranks, row.contestant, row.nbytes, row.dtype


def _compared(then: BenchRow, now: BenchRow) -> Compared:
    change: Change = "as before"
    if max(now.turns) < min(then.turns):
        change = "faster"
    elif min(now.turns) > max(then.turns):
        change = "slower"
    ratio = then.timing.p50 / now.timing.p50
    return Compared(
        now.op, now.ranks, now.contestant, now.nbytes, then.timing.p50, now.timing.p50, ratio, change
    )  # fmt: skip


def differing(now: Bench, then: Bench) -> Sequence[str]:
    """How the two runs differ besides their code, in words: the machines, and how inputs were written."""
    fields = ("processor", "cpus", "kernel", "python", "torch")
    pairs = [(name, getattr(then.machine, name), getattr(now.machine, name)) for name in fields]
    pairs.append(("fresh", then.fresh, now.fresh))
    return [f"{name} was {before}, is {after}" for name, before, after in pairs if before != after]
