"""The forms of `holdfast simulate`, and their output."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import TYPE_CHECKING

from holdfast.ft import events
from holdfast.ft.console.console import FoldingTable, console, print_json, styled, working
from holdfast.ft.console.units import counted
from holdfast.harness.command_line import writing
from holdfast.harness.invariants import Event, Violation
from holdfast.harness.simulate.core.schedule import Schedule, load, save
from holdfast.harness.simulate.core.world import TraceWriter
from holdfast.harness.simulate.draw import MOST_WITH_STEPS, RANKS_A_HOST, SCENARIOS, draw
from holdfast.harness.simulate.draw import scenario as make_scenario
from holdfast.harness.simulate.known_bugs import KnownBug
from holdfast.harness.simulate.known_bugs.reproduce import KNOWN_BUGS, Sighting, run_all
from holdfast.harness.simulate.run import SimulationResult, simulate
from holdfast.harness.simulate.shrink import shrink as make_smaller

if TYPE_CHECKING:
    from holdfast.harness.simulate.command import SimulateOptions


STEPS = 40
LINE_SECONDS = 5.0
"""Seconds between two lines of progress where there is no terminal."""

SEED_SECONDS = 0.02
KNOWN_BUGS_SECONDS = 150.0
"""Seconds of one core for the search for all known bugs."""


def _working(text: str) -> AbstractContextManager[Callable[[str], None]]:
    return working(console(stderr=True), text, every=LINE_SECONDS)


def known_bug_named(name: str) -> KnownBug:
    """The known bug of that name. Raises ValueError that lists the names."""
    for bug in KNOWN_BUGS:
        if bug.name == name:
            return bug
    raise ValueError(f"no bug {name!r} in the museum; there are: {', '.join(bug.name for bug in KNOWN_BUGS)}")


def run(options: SimulateOptions, trace: TraceWriter | None) -> int:
    """Do what the options ask for; returns the exit status. `trace` gets a line for each event."""
    with nullcontext() if options.bug is None else known_bug_named(options.bug).inject():
        if options.museum:
            return _known_bugs(options)
        if options.compare:
            return _compare(options)
        return _simulate(_schedules(options), trace, options)


# Simulations ------------------------------------------------------------------------------------------------------


def _schedules(options: SimulateOptions) -> list[Schedule]:
    """What the options ask for: the schedule of a file, of each seed, or of a scenario."""
    if options.schedule is not None:
        return [load(options.schedule)]
    if options.scenario == "swarm":
        return [draw(options.seed + number, options.ranks, options.hosts) for number in range(options.seeds)]
    ranks = options.ranks or RANKS_A_HOST
    hosts = options.hosts or max(1, ranks // RANKS_A_HOST)
    return [make_scenario(options.scenario, ranks, hosts, options.seed, steps=STEPS * (ranks <= MOST_WITH_STEPS))]


def _simulate(schedules: list[Schedule], trace: TraceWriter | None, options: SimulateOptions) -> int:
    """Run the schedules, up to the first that breaks an invariant, and show what came of them."""
    steps, name = schedules[0].layout.steps, options.scenario
    if options.shrink and not steps:
        raise ValueError(f"--shrink repeats a run many times: it takes at most {counted(MOST_WITH_STEPS, 'rank')}")
    results: list[SimulationResult] = []
    begin = f"{counted(len(schedules), 'seed')}: about {SEED_SECONDS * len(schedules):.0f} s"
    with _working(begin if steps else f"{name}: setting up {counted(schedules[0].layout.ranks, 'rank')}") as say:
        for schedule in schedules:
            what, story = f"{name}, seed {schedule.seed}", RunSummary()
            show = lambda share, events, what=what: say(f"{what}: {share:.0%}, {counted(events, 'event')}")  # noqa: E731
            results.append(simulate(schedule, trace, story.hear if steps else None, show))
            if steps:
                events = sum(result.events for result in results)
                say(f"{what}: {len(results)} of {counted(len(schedules), 'seed')}, {counted(events, 'event')}")
            if results[-1].violation is not None:
                break
    broken = results[-1].violation
    if broken is not None and options.shrink:
        schedule = make_smaller(schedule, lambda smaller: _breaks(smaller, broken.invariant))
        story = RunSummary()
        results[-1] = simulate(schedule, also=story.hear)
    text = story.text(schedule, results[-1].violation)
    if options.json and steps:
        print_json({"outcomes": results, "schedule": schedule})
    elif options.json:
        print_json(results if name == "swarm" else results[0])
    else:
        _show_results(name, results, text if steps and (broken is not None or len(results) == 1) else "")
        if steps and broken is not None:
            again = ["--schedule", str(options.out)] if options.shrink else ["--seed", str(schedule.seed), "--shrink"]
            console().print(f"again: {shlex.join(['holdfast', 'simulate', *again])}", soft_wrap=True)
    if broken is not None and options.shrink:
        with writing("holdfast simulate"):
            save(schedule, options.out)
            options.out.with_suffix(".txt").write_text(text, encoding="utf-8")
    return 0 if broken is None else 1


def _breaks(schedule: Schedule, invariant: str) -> bool:
    found = simulate(schedule).violation
    return found is not None and found.invariant == invariant


def _show_results(name: str, results: list[SimulationResult], story: str) -> None:
    """Print one row for all jobs with steps, or one for each of membership alone; then the story."""
    out, steps = console(), any(result.steps for result in results)
    rows = [results] if steps else [[result] for result in results]
    what = SCENARIOS[name][0] if name in SCENARIOS else "all kinds of faults"
    caption = f"protocol results in simulated time; {results[0].invariants} invariants checked after every event"
    table = FoldingTable(title=f"{name}: {what}", caption=caption + "; times are medians" * (len(rows[0]) > 1))
    counts = ("simulations", "faults", "lost", "epochs", "steps") if steps else ("lost", "epochs")
    loads = () if steps else ("hops", "messages a rank", "KiB a rank")
    for column in ("ranks", *counts, "first evidence", "agreed", "all installed", *loads, "cost here"):
        table.add_column(column, justify="right")
    for row in rows:
        least, most = min(each.ranks for each in row), max(each.ranks for each in row)
        known = {name: sum(getattr(each, name) for each in row) for name in counts if name != "simulations"}
        first, cells = row[0], dict.fromkeys(counts, f"{len(row):,}") | {n: f"{v:,}" for n, v in known.items()}
        messages = f"{first.messages_mean:.1f} (most {first.messages_max:,})"
        nbytes = f"{first.bytes_mean / 1024:.1f} (most {first.bytes_max / 1024:.0f})"
        table.add_row(
            f"{most:,}" if least == most else f"{least:,} to {most:,}",
            *cells.values(),
            *map(_middle, zip(*((each.detected, each.agreed, each.installed) for each in row), strict=True)),
            *((str(first.depth), messages, nbytes) if loads else ()),
            f"{sum(each.setup + each.cpu for each in row):.1f} s CPU, {max(each.memory for each in row):.2f} GiB",
        )
    if not steps and (broken := results[-1].violation) is not None:
        out.print(styled("BROKEN", "red") + f" {broken.invariant}: {broken.message}")
    out.print(table)
    for row in rows:
        events = counted(sum(each.events for each in row), "event")
        seeds = f"seed {row[0].seed}" if len(row) == 1 else f"seeds {row[0].seed} to {row[-1].seed}, trace of the last"
        out.print(f"trace {row[-1].trace}, {events}, {seeds}")
    if story:
        out.print(story)


def _middle(times: Iterable[float | None]) -> str:
    """The median of the recoveries that came so far."""
    known = [time for time in times if time is not None]
    return f"{1e3 * median(known):,.1f} ms" if known else "-"


# Simulated and real -----------------------------------------------------------------------------------------------


def _compare(options: SimulateOptions) -> int:
    """Simulate faults, inject them into real processes, and show both."""
    from holdfast.harness.simulate.compare import compare, show_comparison

    sizes = (4, 16) if options.ranks is None else (options.ranks,)
    with _working("comparing: about a minute") as say:
        result = compare(sizes, repeats=options.repeats, progress=say)
    if options.json:
        print_json(result)
    else:
        show_comparison(result)
    return 0


# Known bugs --------------------------------------------------------------------------------------------------------

MUSEUM_SEEDS = 3000
"""In so many seeds each known bug is looked for, unless more than one are asked for."""


def _known_bugs(options: SimulateOptions) -> int:
    """Look for every known bug."""
    seeds, cores = options.seeds if options.seeds > 1 else MUSEUM_SEEDS, len(os.sched_getaffinity(0))
    begin = f"{counted(len(KNOWN_BUGS), 'bug')} on {counted(cores, 'core')}: about {KNOWN_BUGS_SECONDS / cores:.0f} s"
    looked = 0
    with working(console(stderr=True), begin) as say:

        def done(seen: Sighting) -> None:
            nonlocal looked
            looked += 1
            what = f"found by {seen.checker!r} in seed {options.seed + seen.seeds - 1}" if seen.found else "NOT found"
            say(f"{looked}/{len(KNOWN_BUGS)} {seen.name}: {what}")

        sightings = run_all(seeds, options.seed, done=done)
    if options.json:
        print_json(sightings)
    else:
        _show_sightings(sightings)
    return 0 if all(sighting.found and sighting.real for sighting in sightings) else 1


def _show_sightings(sightings: list[Sighting]) -> None:
    table = FoldingTable(title=f"{sum(s.found for s in sightings)} of {len(sightings)} bugs found")
    for column in ("bug", "known from", "found by"):
        table.add_column(column)
    for column in ("seeds", "events", "shrunk", "clean without"):
        table.add_column(column, justify="right")
    for seen in sightings:
        table.add_row(
            seen.name,
            seen.origin,
            styled(seen.checker or "not found", "" if seen.checker else "red"),
            str(seen.seeds),
            str(seen.events),
            str(seen.shrunk),
            "yes" if seen.real else "no",
        )
    out = console()
    out.print(table)
    found = [seen.seeds for seen in sightings if seen.found]
    if found:
        largest = max(seen.shrunk for seen in sightings)
        out.print(f"median {median(found):g} seeds; the largest schedule has {counted(largest, 'event')}")


# The story of a run ---------------------------------------------------------------------------------------------------


LONGEST = 160
TOLD = (
    events.ProcessDied
    | events.ProcessStopped
    | events.ViewProposed
    | events.WasEvicted
    | events.MemberFenced
    | events.RegisterUnreachable
    | events.LostMajority
    | events.ResignedItself
    | events.MemberUnreachable
    | events.StepAborted
    | events.SessionFailed
    | events.CoreBroken
    | events.StepsFinished
)


class RunSummary:
    """Collects the important events of a run."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._epochs: set[int] = set()
        self._steps: dict[int, int] = {}
        self._doubts: set[tuple[str, str]] = set()

    def hear(self, event: Event) -> None:
        """Handle the next event."""
        who = event.process
        match event:
            case events.ViewInstalled():
                self._installed(event)
            case events.StepCommitted(step=step):
                self._steps[step] = self._steps.get(step, 0) + 1
            case events.MemberSuspected(member=member):
                if (member, who) not in self._doubts:
                    self._doubts.add((member, who))
                    self._say(event.time, f"{who} does not hear {member} any more")
            case events.SuspicionCleared(member=member):
                self._doubts.discard((member, who))
                self._say(event.time, f"{who} hears {member} again")
            case events.FaultInjected():
                self._say(event.time, str(event))
            case _ if isinstance(event, TOLD):
                self._say(event.time, f"{who}: {event}")

    def _installed(self, event: events.ViewInstalled) -> None:
        if event.epoch not in self._epochs:
            self._epochs.add(event.epoch)
            self._say(event.time, f"epoch {event.epoch} begins with {', '.join(event.members)}: {event.reason}")

    def _say(self, time: float, words: str) -> None:
        self._lines.append(f"{time:9.4f} s  {words[:LONGEST]}")

    def text(self, schedule: Schedule, violation: Violation | None) -> str:
        """The whole text."""
        layout = schedule.layout
        head = (
            f"{counted(layout.ranks, 'rank')} on {layout.hosts} hosts, {counted(layout.spares, 'spare')}, "
            f"at least {layout.min_size} needed; "
            f"{counted(layout.steps, 'step')} of {layout.compute:g} s; seed {schedule.seed}."
        )
        committed = f"Steps 0 to {max(self._steps)} were committed." if self._steps else "No step was committed."
        if violation is None:
            end = "Every invariant held."
        else:
            end = f"BROKEN at {violation.time:.4f} s: {violation.invariant}: {violation.process} {violation.message}"
        return "\n".join((head, "", *self._lines, "", committed, end)) + "\n"
