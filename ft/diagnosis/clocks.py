"""Estimates the offsets between the clocks of hosts, from the ops that their ranks did together.

No rank leaves a synchronising op (`MEETINGS`) before all ranks have entered it. So for each such op of ranks on hosts a
and b: entered(a) <= left(b) + offset and entered(b) + offset <= left(a). Over many ops the two bounds narrow the offset
to within half of the shortest op; the middle is taken (as NTP does with its round trips).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from holdfast.ft.diagnosis.evidence import RankGroup, Track

MEETINGS = frozenset(
    [
        "all_reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "all_gather",
        "all_gather_single",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "sum_contributions",
    ]
)
"""Ops that no rank can leave before all ranks have entered."""


def offsets(groups: Sequence[RankGroup]) -> Mapping[str, float]:
    """By host, the seconds to add to its times to get those of the first host.

    Hosts without a chain of common ops to the first host are left out."""
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    hosts: list[str] = []
    for group in groups:
        tracks = list(group.tracks.values())
        hosts += [track.recording.process.host for track in tracks]
        if len({track.recording.process.host for track in tracks}) > 1:
            for a in tracks:
                for b in tracks:
                    if a.recording.process.host != b.recording.process.host:
                        _narrow(bounds, a, b)
    ordered = list(dict.fromkeys(hosts))
    known: dict[str, float] = dict.fromkeys(ordered[:1], 0.0)
    todo = ordered[:1]
    while todo:
        here = todo.pop(0)
        for host in ordered:
            low, high = bounds.get((here, host), (-math.inf, math.inf))
            if host not in known and math.isfinite(low) and math.isfinite(high):
                known[host] = known[here] + (low + high) / 2
                todo.append(host)
    return known


def _narrow(bounds: dict[tuple[str, str], tuple[float, float]], a: Track, b: Track) -> None:
    """Narrow the bounds of the offset from the clock of `b`'s host to that of `a`'s, by their common ops."""
    key = (a.recording.process.host, b.recording.process.host)
    low, high = bounds.get(key, (-math.inf, math.inf))
    for ordinal in _met(a, b):
        mine, theirs = a.collectives[ordinal], b.collectives[ordinal]
        if mine.left is not None and theirs.left is not None:
            low = max(low, mine.entered - theirs.left)
            high = min(high, mine.left - theirs.entered)
    bounds[key] = (low, high)


def _met(a: Track, b: Track) -> Iterable[int]:
    for ordinal in a.collectives.keys() & b.collectives.keys():
        ops = a.collectives[ordinal], b.collectives[ordinal]
        if all(op.signature.op in MEETINGS and op.status == 1 for op in ops):
            yield ordinal
