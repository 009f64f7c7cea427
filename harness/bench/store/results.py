"""What a run measured: frozen records, and their JSON form."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.harness.measure.results import ContestantFailure, Ratio, Row, Run, beside, wrong_in

FIRST_TURNS = 3
"""The first turns after a start are set apart: a store that keeps two versions takes new memory in three of them."""


class StoreRow(Row, frozen=True, kw_only=True):
    """One figure of one contestant.

    `timing` and `turns` (of all starts) are of the later turns; `early` are the first, second and third turn after a
    start, each the median over starts (us; None where it did not give this figure). `rate` is GB/s (1e9 bytes) at
    p50. `memory` is the most private bytes that the op took in one process, where that was measured. `wrong` counts
    tensors, in all turns.
    """

    workload: str
    figure: str
    tensors: int
    early: tuple[float | None, ...]
    rate: float
    memory: int | None


class StoreRatio(Ratio, frozen=True, kw_only=True):
    """How many times as fast as `peer` holdfast was in a figure."""

    workload: str
    figure: str


class StoreFailure(ContestantFailure, frozen=True, kw_only=True):
    """A contestant that failed in a workload."""

    workload: str


class StoreBench(Run, frozen=True, kw_only=True):
    """A whole run."""

    size: int
    threads: int
    starts: int
    rounds: int
    workloads: dict[str, str]
    rows: tuple[StoreRow, ...]
    ratios: tuple[StoreRatio, ...]
    failures: tuple[StoreFailure, ...]

    @property
    def wrong(self) -> int:
        """How many tensors were wrong in all rows."""
        return wrong_in(self.rows)


def ratios(rows: Sequence[StoreRow], ours: str) -> tuple[StoreRatio, ...]:
    """Ours against every other contestant in the same figure, round by round."""
    return tuple(
        StoreRatio(workload=row.workload, figure=row.figure, peer=peer.contestant, **ratio)
        for row, peer, ratio in beside(rows, (ours,), lambda row: (row.workload, row.figure))
    )
