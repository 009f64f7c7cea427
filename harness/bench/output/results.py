"""What a bench of ops measured: records, their JSON form, and how they compare with a stored run.

Times of two runs differ for many reasons, so only a difference outside the spread of both runs' turns is a change;
`holdfast gate` can tell small changes from noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.harness.measure.results import ContestantFailure, Ratio, Row, Run, wrong_in
from holdfast.harness.measure.stats import Timing, pairwise


class BenchRow(Row, frozen=True, kw_only=True):
    """One op at one size on one library.

    `timing` is what the table shows: ops in blocks up to 64 KiB, ops one by one above. `single` is ops one
    by one. `algbw` and `busbw` are GB/s (1e9 bytes) at p50. `wrong` counts elements (for barrier: exits before the last
    entry).
    """

    op: str
    ranks: int
    dtype: str
    single: Timing
    algbw: float
    busbw: float


class OpRatio(Ratio, frozen=True, kw_only=True):
    """How many times as fast as `peer` was `ours`, in an op."""

    op: str
    ranks: int
    nbytes: int
    ours: str


class OpFailure(ContestantFailure, frozen=True, kw_only=True):
    """An op in which a library failed, or that it does not have, at one size and number of ranks."""

    op: str
    ranks: int
    nbytes: int


class Bench(Run, frozen=True, kw_only=True):
    """A whole run.

    `contestants` maps 'name, n ranks' to the library's details and the places of its ranks. `fresh`: ranks wrote their
    inputs anew before each op, in the time taken. `unmeasured` are ops that a library does not have: none was tried.
    """

    rows: tuple[BenchRow, ...]
    ratios: tuple[OpRatio, ...]
    failures: tuple[OpFailure, ...]
    unmeasured: tuple[OpFailure, ...] = ()
    fresh: bool = False

    @property
    def wrong(self) -> int:
        """How many elements were wrong in all rows."""
        return wrong_in(self.rows)

    def left_out(self) -> dict[str, str]:
        """Which library was left out of which op, and why: one entry for all sizes."""
        return {f"{each.contestant} left out of {each.op}": each.reason for each in self.unmeasured}


def ratios(rows: Sequence[BenchRow], ours: Sequence[str]) -> tuple[OpRatio, ...]:
    """Every one of `ours` against every other library at the same op, size and ranks, round by round."""
    found = []
    for row in rows:
        for peer in rows:
            if row.contestant not in ours or peer.contestant in ours:
                continue
            if (peer.op, peer.ranks, peer.nbytes) == (row.op, row.ranks, row.nbytes):
                ratio = pairwise(row.turns, peer.turns)
                found.append(
                    OpRatio(
                        op=row.op, ranks=row.ranks, nbytes=row.nbytes, ours=row.contestant, peer=peer.contestant,
                        median=ratio.median, least=ratio.least, most=ratio.most,
                    )
                )  # fmt: skip
    return tuple(found)


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
