"""Builds the report of a run from the events in its directory, and renders its episodes as a page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median

import msgspec

from holdfast.ft.console.units import coarse_seconds, counted, reward_text
from holdfast.harness.report.model import (
    Bar,
    Curve,
    Fate,
    FaultRecord,
    Figure,
    Learning,
    Point,
    ProcessorUse,
    ProcessRecord,
    RateSample,
    RecoveryStage,
    RoleUse,
    RunReport,
    Span,
)
from holdfast.harness.report.render import environment
from holdfast.rl.data.episode import Episode, Group
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import (
    Activity,
    EpisodeFailed,
    Evaluated,
    Event,
    ProcessLost,
    ProcessorTime,
    ProcessStarted,
    RunResumed,
    StepTrained,
    WeightsServed,
)


class RunClock:
    """Places events, in their order. A driver that resumes a run writes on from the last event of the one before.

    From the wall clock at their starts follows how long there was none: later events are moved by that. The processes
    of the second driver are called `trainer-0/2`, and so on, for each driver starts its own.
    """

    def __init__(self) -> None:
        self.downtime = 0.0
        """Seconds without a driver, so far."""
        self.drivers = 0
        self._first: ProcessStarted | None = None
        self._shift = self._last = 0.0

    def place(self, event: Event) -> Event:
        """The event at its time on the axis, with unique names."""
        if isinstance(event, ProcessStarted) and event.role == "driver":
            self._begin(event)
        changed: dict[str, object] = {"time": event.time + self._shift}
        for key in ("name", "process", "replaces"):
            if self.drivers > 1 and (name := getattr(event, key, "")) and "/" not in name:
                changed[key] = f"{name}/{self.drivers}"
        placed: Event = msgspec.structs.replace(event, **changed)
        self._last = max(self._last, placed.time)
        return placed

    def _begin(self, driver: ProcessStarted) -> None:
        self.drivers += 1
        if self._first is None:
            self._first = driver
            return
        if driver.wall and self._first.wall:  # a clock that was set back leaves no time without a driver
            self._shift = max(self._shift, self._first.time + driver.wall - self._first.wall - driver.time)
        self.downtime += max(0.0, driver.time + self._shift - self._last)


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


LATENCY_EDGES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""The upper edges in seconds of the bars of weights' latencies; one more bar holds the rest."""

_RATES = 120
"""The number of moments at which the rate of tokens is given, at most."""

_STEPS_OF_A_RATE = 5
"""The number of steps that a rate is averaged over, at least."""


@dataclass(slots=True)
class RunFacts:
    """The events of a run by kind, without those of a driver that were void after its death. Times in seconds."""

    steps: dict[int, StepTrained] = field(default_factory=dict)
    """The trained batches, by their first steps."""
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    started: dict[str, ProcessStarted] = field(default_factory=dict)
    lost: dict[str, ProcessLost] = field(default_factory=dict)
    served: list[WeightsServed] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    failed: list[EpisodeFailed] = field(default_factory=list)
    resumes: list[RunResumed] = field(default_factory=list)
    processor: dict[str, list[ProcessorTime]] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    """When processes ended that a later driver found gone."""
    repeated: int = 0
    """How many steps were trained again after a resume: those since the last saved state."""
    seconds: float = 0.0
    drivers: int = 1
    downtime: float = 0.0
    """Seconds between drivers, which are a part of `seconds`."""

    @staticmethod
    def of(events: Iterable[Event]) -> RunFacts:
        """The facts of these events, in their order."""
        facts, clock = RunFacts(), RunClock()
        for event in map(clock.place, events):
            if isinstance(event, ProcessStarted) and event.role == "driver":
                gone = facts.started.keys() - facts.lost.keys() - facts.ends.keys()
                facts.ends |= dict.fromkeys(gone, facts.seconds)
            facts.seconds = max(facts.seconds, event.time + (event.seconds if isinstance(event, Activity) else 0.0))
            facts._add(event)
        facts.drivers, facts.downtime = max(1, clock.drivers), clock.downtime
        return facts

    def _add(self, event: Event) -> None:
        match event:
            case StepTrained():
                self.steps[event.step] = event
            case Evaluated():
                self.evaluations[event.version] = event
            case ProcessStarted():
                self.started[event.name] = event
            case ProcessLost():
                self.lost[event.name] = event
            case WeightsServed():
                self.served.append(event)
            case Activity():
                self.activities.append(event)
            case ProcessorTime():
                self.processor.setdefault(event.process, []).append(event)
            case EpisodeFailed():
                self.failed.append(event)
            case RunResumed():
                self.resumes.append(event)
                void = [step for step in self.steps if step >= event.step]
                self.repeated += sum(self.steps.pop(step).updates for step in void)
                self.evaluations = {v: each for v, each in self.evaluations.items() if v <= event.step}
            case _:
                return

    @property
    def done(self) -> int:
        """How many steps are committed."""
        return sum(batch.updates for batch in self.steps.values())

    @property
    def missing(self) -> int:
        """How many steps before the last committed one nobody recorded."""
        return max((batch.version for batch in self.steps.values()), default=0) - self.done

    # -- what a report shows

    def learning(self) -> Learning:
        """All that a report shows but the processes."""
        return Learning(
            curve=Curve(rewards=self.rewards(), evaluations=self.held_out()),
            staleness=self.staleness(),
            latencies=self.latencies(),
            uses=self.uses(),
            processor=self.processor_uses(),
            model_share=self.model_share(),
            steady_from=self.steady_from,
            tokens=self.tokens(),
        )

    def rewards(self) -> tuple[Point, ...]:
        """The mean reward of each batch."""
        return tuple(Point(self.steps[step].version, self.steps[step].reward) for step in sorted(self.steps))

    def held_out(self) -> tuple[Point, ...]:
        """The held-out reward of each evaluated version."""
        found = (self.evaluations[version] for version in sorted(self.evaluations))
        return tuple(Point(each.version, each.reward) for each in found if each.reward is not None)

    def staleness(self) -> tuple[Bar, ...]:
        """Groups by the number of versions that they were behind."""
        counts = Counter(behind for step in self.steps.values() for behind in step.staleness)
        return tuple(Bar(str(behind), counts[behind]) for behind in range(max(counts, default=-1) + 1))

    def latencies(self) -> tuple[Bar, ...]:
        """Served versions by the time since they were published."""
        if not self.served:
            return ()
        counts = Counter(
            next((index for index, edge in enumerate(LATENCY_EDGES) if each.seconds <= edge), len(LATENCY_EDGES))
            for each in self.served
        )
        labels = [coarse_seconds(edge) for edge in LATENCY_EDGES] + ["more"]
        return tuple(Bar(label, counts[index]) for index, label in enumerate(labels))

    def tokens(self) -> tuple[RateSample, ...]:
        """The rate of policy tokens, each averaged over a part of the run."""
        steps = sorted(self.steps.values(), key=lambda step: step.time)
        if len(steps) < 2:
            return ()
        size = max(_STEPS_OF_A_RATE, -(-(len(steps) - 1) // _RATES))
        found = []
        for at in range(0, len(steps) - 1, size):
            before, part = steps[at], steps[at + 1 : at + 1 + size]
            seconds = part[-1].time - before.time or 1e-9
            found.append(RateSample(before.time + seconds / 2, sum(each.tokens for each in part) / seconds))
        return tuple(found)

    def lanes(self) -> tuple[ProcessRecord, ...]:
        """Each process from its start to its end, by role."""
        roles = list(dict.fromkeys(each.role for each in self.started.values()))
        ordered = sorted(self.started.values(), key=lambda each: (roles.index(each.role), each.time))
        return tuple(self._lane(each) for each in ordered)

    def spans(self) -> tuple[Span, ...]:
        """What each process did."""
        return tuple(
            Span(each.process, each.what, each.time, each.time + each.seconds, str(each.number))
            for each in self.activities
        )

    def uses(self) -> tuple[RoleUse, ...]:
        """The work of each role that reports any: the share of its processes' time that activities cover.

        The driver has none: it waits for the others.
        """
        lanes, found = self.lanes(), []
        for role in dict.fromkeys(each.role for each in self.activities if each.role != "driver"):
            mine = [lane for lane in lanes if lane.role == role]
            alive = sum(lane.ended - lane.born for lane in mine)
            worked = sum(self._worked(lane.name) for lane in mine)
            found.append(RoleUse(role, len(mine), min(1.0, worked / alive) if alive else 0.0, max(0.0, alive - worked)))
        return tuple(found)

    @property
    def steady_from(self) -> int:
        """The first step of the steady state."""
        return steady_from(self.steps)

    def processor_uses(self) -> tuple[ProcessorUse, ...]:
        """The processor time of each role in the steady state, by kind of work."""
        first = self.steps.get(self.steady_from)
        return processor_uses(self.processor, self.activities, float("-inf") if first is None else first.time)

    def model_share(self) -> float | None:
        """The share of the processor time in the steady state that the model had; None if that is not known."""
        return model_share(self.processor_uses())

    def _worked(self, process: str) -> float:
        return covered([(each.time, each.time + each.seconds) for each in self.activities if each.process == process])

    def _lane(self, started: ProcessStarted) -> ProcessRecord:
        lost, notes = self.lost.get(started.name), [f"in place of {started.replaces}"] if started.replaces else []
        fate: Fate = "finished"
        ended = self.ends.get(started.name, self.seconds)
        if lost is not None:
            ended, fate = lost.time, "killed" if "SIGKILL" in lost.how else "lost"
        elif started.name in self.ends:
            fate = "lost"
            notes += [] if started.role == "driver" else ["ended with its driver"]
        return ProcessRecord(started.name, started.role, started.pid, started.time, ended, fate, ", ".join(notes))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


PROCESSOR = "Processor time of holdfast"
"""The label of the figure."""


def report_of(
    directory: Path,
    *,
    title: str,
    configuration: Sequence[tuple[str, str]] = (),
    repeat: Sequence[str] = (),
    steps: int = 0,
) -> RunReport:
    """The report of the run in `directory`, which shall have so many steps. Raises `CorruptData` for a damaged file."""
    facts = RunFacts.of(RunDirectory(directory).events())
    began = datetime.fromtimestamp((directory / "events.jsonl").stat().st_mtime - facts.seconds).astimezone()
    done = facts.done
    return RunReport(
        title=title,
        good=done >= steps,
        outcome="all steps done" if done >= steps else f"{done:,} of {counted(steps, 'step')} done",
        summary=_summary(facts),
        when=f"{began:%d %B %Y, %H:%M %Z}".strip().lstrip("0"),
        seconds=facts.seconds,
        figures=_figures(facts),
        learning=facts.learning(),
        lanes=facts.lanes(),
        spans=facts.spans(),
        faults=lost_processes(facts),
        configuration=tuple(configuration),
        repeat=tuple(repeat),
    )


def _summary(facts: RunFacts) -> str:
    steps = counted(facts.done, "step")
    held_out = facts.held_out()
    learnt = f"{steps} were committed"
    if len(held_out) > 1:
        learnt += (
            f"; the held-out reward went from {reward_text(held_out[0].value)} to {reward_text(held_out[-1].value)}"
        )
    parts = [f"{learnt}."]
    if facts.lost:
        parts.append(f"On the way {counted(len(facts.lost), 'process', 'processes')} died, each replaced by another.")
    if facts.resumes:
        again = counted(facts.repeated, "step")
        without = f" after {coarse_seconds(facts.downtime)} without one" if facts.downtime else ""
        times = counted(len(facts.resumes), "time")
        parts.append(f"The driver was resumed {times}{without}, and {again} trained again.")
    if left_out := sum(not each.again for each in facts.failed):
        parts.append(f"{counted(left_out, 'failed episode')} left out.")
    if gone_on := sum(each.again for each in facts.failed):
        parts.append(f"{counted(gone_on, 'episode')} went on in another environment.")
    return " ".join(parts)


def _figures(facts: RunFacts) -> tuple[Figure, ...]:
    held_out = facts.held_out()
    best = max((point.value for point in held_out), default=None)
    figures = []
    if held_out and best is not None:
        words = f"at the end; best {reward_text(best)} of {counted(len(held_out), 'evaluation')}"
        figures.append(Figure("Held-out reward", reward_text(held_out[-1].value), words, "good"))
    figures.append(
        Figure("Steps lost", str(facts.missing), f"of {facts.done:,} committed", "bad" if facts.missing else "good")
    )
    tokens = sum(step.tokens for step in facts.steps.values())
    begun = min((step.time for step in facts.steps.values()), default=0.0)
    if facts.seconds > begun:
        words = f"drawn by the policy, from the first step on; {tokens:,} in all"
        figures.append(Figure("Tokens a second", f"{tokens / (facts.seconds - begun):,.0f}", words))
    if begun:
        figures.append(Figure("First step after", coarse_seconds(begun), "imports and the start of all processes"))
    if facts.drivers > 1:
        share = facts.downtime / facts.seconds if facts.seconds else 0.0
        words = f"without a driver, {share:.0%} of the run; {counted(facts.drivers, 'driver')}"
        figures.append(Figure("Downtime", coarse_seconds(facts.downtime), words))
    behind = [each for step in facts.steps.values() for each in step.staleness]
    if behind:
        figures.append(
            Figure("Staleness", f"{sum(behind) / len(behind):.2f}", f"versions on average, at most {max(behind)}")
        )
    if facts.served:
        times = [each.seconds for each in facts.served]
        figures.append(
            Figure(
                "Weights served after",
                coarse_seconds(median(times)),
                f"median; at most {coarse_seconds(max(times))}",
            )
        )
    model = facts.model_share()
    if model is not None:
        figures.append(Figure(PROCESSOR, f"{1 - model:.1%}", _processor_note(facts)))
    return tuple(figures)


def _processor_note(facts: RunFacts) -> str:
    """What the share of the processor time that is not the model's is a share of, in words."""
    return (
        f"of all threads from step {facts.steady_from} on; the model had the rest: forward and backward (with the "
        "collectives of sharded trainers), generate, optimizer"
    )


def processor_line(report: RunReport) -> str:
    """The processor time of holdfast in a run, as a line; empty if it is not known."""
    found = next((each for each in report.figures if each.label == PROCESSOR), None)
    return f"processor time of holdfast: {found.value} {found.note}" if found else ""


def lost_processes(facts: RunFacts) -> tuple[FaultRecord, ...]:
    """Each process that died, and each driver that another one took over from, by time.

    The stages count from the moment at which the driver, or the next one, saw the loss: another process in its place,
    and the next step. The note has the time by which that step was longer than the steps of the run are.
    """
    return tuple(sorted(_faults(facts), key=lambda fault: fault.at))


def _faults(facts: RunFacts) -> Iterator[FaultRecord]:
    for lost in facts.lost.values():
        placed = min((each.time for each in facts.started.values() if each.replaces == lost.name), default=None)
        yield _fault(facts, lost.time, f"{lost.role} lost: {lost.how}", lost.name, placed)
    drivers = [each for each in facts.started.values() if each.role == "driver"]
    for before, after in pairwise(drivers):
        yield _fault(facts, facts.ends.get(before.name, after.time), "driver lost", before.name, after.time)


def _fault(facts: RunFacts, at: float, title: str, target: str, placed: float | None) -> FaultRecord:
    steps = sorted(facts.steps.values(), key=lambda step: step.time)
    times = [step.time for step in steps]
    done = sum(time <= at for time in times)
    stages = [] if placed is None else [RecoveryStage("another in its place", max(0.0, placed - at))]
    note = ""
    if done < len(times):
        stages.append(RecoveryStage("next step", times[done] - at))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        if done and gaps:
            usual = median(gaps)
            more = max(0.0, times[done] - times[done - 1] - usual)
            note = f"The step took {coarse_seconds(more)} longer than the median of {coarse_seconds(usual)}."
    committed = sum(step.updates for step in steps[:done])
    return FaultRecord(time=at, words=title, victims=(target,), step=committed, stages=tuple(stages), note=note)


TEMPLATE = "episodes.html.j2"

Decode = Callable[[tuple[int, ...]], str]


class EpisodeRow(msgspec.Struct, frozen=True):
    """An episode in words. `versions` are those of the first and the last token that the policy drew.

    `answer` is in pieces, each with whether the policy drew it: an environment said the others.
    """

    answer: tuple[tuple[str, bool], ...]
    reward: float
    parts: tuple[tuple[str, float], ...]
    versions: tuple[int, int]
    tokens: int
    turns: int
    finish: str


class GroupRows(msgspec.Struct, frozen=True):
    """The episodes of a prompt. `mean` is their mean reward."""

    number: int
    prompt: str
    reference: str
    mean: float
    episodes: tuple[EpisodeRow, ...]


def episode_rows(groups: Iterable[Group], decode: Decode) -> list[GroupRows]:
    """Groups in words; `decode` turns tokens into text."""
    return [
        GroupRows(
            number=group.number,
            prompt=group.prompt.text or decode(group.prompt.tokens),
            reference=group.prompt.answer,
            mean=sum(each.reward for each in group.episodes) / max(1, len(group.episodes)),
            episodes=tuple(_row(each, decode) for each in group.episodes),
        )
        for group in groups
    ]


def render_episodes(title: str, rows: list[GroupRows], omitted: int = 0) -> str:
    """The page as text; `omitted` groups are not on it. Raises ModuleNotFoundError without jinja2."""
    return environment().get_template(TEMPLATE).render(title=title, rows=rows, omitted=omitted) + "\n"


def write_episodes(path: Path, title: str, rows: list[GroupRows], omitted: int = 0) -> None:
    """Write the page to `path`, in an existing folder."""
    path.write_text(render_episodes(title, rows, omitted), encoding="utf-8")


def _row(episode: Episode, decode: Decode) -> EpisodeRow:
    drawn = [version for version, mine in zip(episode.versions, episode.mask, strict=True) if mine]
    return EpisodeRow(
        answer=tuple(_pieces(episode, decode)),
        reward=episode.reward,
        parts=tuple(sorted(episode.parts.items())),
        versions=(drawn[0], drawn[-1]) if drawn else (-1, -1),
        tokens=len(drawn),
        turns=episode.turns,
        finish=episode.finish,
    )


def _pieces(episode: Episode, decode: Decode) -> Iterator[tuple[str, bool]]:
    for mine, part in groupby(zip(episode.tokens, episode.mask, strict=True), key=lambda pair: pair[1]):
        yield decode(tuple(token for token, _ in part)), mine
