"""What a bench of ops measured: records, and their JSON form."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.harness.measure.results import ContestantFailure, Ratio, Row, Run, beside, wrong_in
from holdfast.harness.measure.stats import Timing


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
    return tuple(
        OpRatio(op=row.op, ranks=row.ranks, nbytes=row.nbytes, ours=row.contestant, peer=peer.contestant, **ratio)
        for row, peer, ratio in beside(rows, ours, lambda row: (row.op, row.nbytes, row.ranks))
    )
