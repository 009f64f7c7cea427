"""What a bench measured: frozen records, their statistics, and their JSON form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Timing(msgspec.Struct, frozen=True):
    """Statistics of one way of timing, in microseconds an op.

    `samples` counts the timings, `block` the ops in each.
    """

    p50: float
    p99: float
    min: float
    samples: int
    block: int

    @staticmethod
    def of(seconds: Sequence[float], block: int) -> Timing:
        """The statistics of timings of `block` ops that took `seconds` each."""
        each = np.asarray(seconds, dtype=np.float64) * (1e6 / block)
        return Timing(
            p50=float(np.percentile(each, 50)),
            p99=float(np.percentile(each, 99)),
            min=float(each.min()),
            samples=len(each),
            block=block,
        )


class BenchRow(msgspec.Struct, frozen=True):
    """One op at one size on one library.

    `timing` is what the table shows: ops in blocks up to 64 KiB, ops one by one above. `single` is ops one
    by one. `turns` are the medians (us) of each turn, in the order of the rounds. `algbw` and `busbw` are
    GB/s (1e9 bytes) at p50. `wrong` counts elements that came out wrong (for barrier: exits before the last
    entry); it is None for a library that does not say.
    """

    op: str
    ranks: int
    contestant: str
    nbytes: int
    dtype: str
    timing: Timing
    single: Timing
    turns: tuple[float, ...]
    algbw: float
    busbw: float
    wrong: int | None


class Ratio(msgspec.Struct, frozen=True):
    """How many times as fast as `peer` was `ours`: the median, the least and the most over rounds."""

    op: str
    ranks: int
    nbytes: int
    ours: str
    peer: str
    median: float
    least: float
    most: float


class OpFailure(msgspec.Struct, frozen=True):
    """An op in which a library failed, or that it does not have, at one size and number of ranks."""

    op: str
    ranks: int
    contestant: str
    nbytes: int
    reason: str


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run. `others` is how many CPUs other processes used meanwhile, on average."""

    processor: str
    cpus: int
    kernel: str
    python: str
    torch: str
    others: float


class Bench(msgspec.Struct, frozen=True):
    """A whole run.

    `contestants` maps 'name, n ranks' to the library's details and the places of its ranks. `fresh`: ranks wrote their
    inputs anew before each op, in the time taken. `unmeasured` are ops that a library does not have: none was tried.
    """

    command: str
    machine: Machine
    contestants: dict[str, str]
    skipped: dict[str, str]
    rows: tuple[BenchRow, ...]
    ratios: tuple[Ratio, ...]
    failures: tuple[OpFailure, ...]
    unmeasured: tuple[OpFailure, ...] = ()
    fresh: bool = False

    @property
    def wrong(self) -> int:
        """How many elements were wrong in all rows."""
        return sum(row.wrong or 0 for row in self.rows)

    def left_out(self) -> dict[str, str]:
        """Which library was left out of which op, and why: one entry for all sizes."""
        return {f"{each.contestant} left out of {each.op}": each.reason for each in self.unmeasured}

    def json(self) -> str:
        """This bench as JSON, indented by two spaces."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def ratios(rows: Sequence[BenchRow], ours: Sequence[str]) -> tuple[Ratio, ...]:
    """Every one of `ours` against every other library at the same op, size and ranks, round by round."""
    found = []
    for row in rows:
        if row.contestant not in ours:
            continue
        for peer in rows:
            if peer.contestant in ours or (peer.op, peer.ranks, peer.nbytes) != (
                row.op,
                row.ranks,
                row.nbytes,
            ):
                continue
            rounds = [theirs / mine for theirs, mine in zip(peer.turns, row.turns, strict=False)]
            found.append(
                Ratio(
                    row.op, row.ranks, row.nbytes, row.contestant, peer.contestant,
                    float(np.median(rounds)), min(rounds), max(rounds),
                )
            )  # fmt: skip
    return tuple(found)
