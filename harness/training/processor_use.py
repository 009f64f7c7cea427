"""The processor time of a run in its steady state: without what is done once, at its start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from holdfast.harness.report.model import ProcessorUse
from holdfast.rl.run.run_events import Activity, ProcessorTime, StepTrained

MODEL_WORK = ("forward_backward", "generate", "optimizer")
"""The kinds of work that a model needs, whatever moves its data."""

FIRST_STEPS = 10
"""The number of steps after which a run is in its steady state; of a short run, its first third."""


def steady_from(steps: Mapping[int, StepTrained]) -> int:
    """The first step of the steady state; 0 without steps."""
    ordered = sorted(steps)
    return ordered[min(FIRST_STEPS, len(ordered) // 3)] if ordered else 0


def processor_uses(
    samples: Mapping[str, Sequence[ProcessorTime]], activities: Iterable[Activity], since: float
) -> tuple[ProcessorUse, ...]:
    """The processor time of each role from `since` on, by kind of work.

    A process counts between its first and its last sample from then on, and so does the part of its work that lies
    between them.
    """
    later = {name: [each for each in times if each.time >= since] for name, times in samples.items()}
    counted = {name: (times[0], times[-1]) for name, times in later.items() if times}
    work: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for each in activities:
        if each.cpu and each.process in counted:
            first, last = counted[each.process]
            inside = _inside(each, first.time, last.time)
            if inside:
                work[first.role][each.what] += each.cpu * inside
    found = []
    for role in dict.fromkeys(first.role for first, _ in counted.values()):
        total = sum(last.seconds - first.seconds for first, last in counted.values() if first.role == role)
        ordered = sorted(work[role].items(), key=lambda item: (item[0] not in MODEL_WORK, item[0]))
        found.append(ProcessorUse(role, total, tuple(ordered), max(0.0, total - sum(work[role].values()))))
    return tuple(found)


def model_share(uses: Sequence[ProcessorUse]) -> float | None:
    """The share of the processor time that the model had; None if that is not known."""
    total = sum(use.seconds for use in uses)
    mine = sum(seconds for use in uses for what, seconds in use.work if what in MODEL_WORK)
    return min(1.0, mine / total) if total else None


def _inside(activity: Activity, begin: float, end: float) -> float:
    """The part of an activity that lies between two moments, from 0 to 1."""
    if not activity.seconds:
        return float(begin <= activity.time <= end)
    overlap = min(activity.time + activity.seconds, end) - max(activity.time, begin)
    return max(0.0, overlap) / activity.seconds
