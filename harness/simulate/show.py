"""The forms of `holdfast simulate`, and their output."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from holdfast.ft.console.console import FoldingTable, console, print_json, styled, working
from holdfast.ft.console.units import counted
from holdfast.harness.command_line import writing
from holdfast.harness.invariants import CHECKERS
from holdfast.harness.simulate.core.schedule import Schedule, load, save
from holdfast.harness.simulate.core.trace import TraceWriter
from holdfast.harness.simulate.known_bugs import KNOWN_BUGS, KnownBug
from holdfast.harness.simulate.known_bugs.reproduce import Sighting
from holdfast.harness.simulate.known_bugs.run_all import run_all
from holdfast.harness.simulate.search.draw import draw
from holdfast.harness.simulate.search.run import SimulationResult, simulate
from holdfast.harness.simulate.search.scale import ScaleResult, measure
from holdfast.harness.simulate.search.scenarios import MOST_WITH_STEPS, RANKS_A_HOST, SCENARIOS
from holdfast.harness.simulate.search.scenarios import scenario as make_scenario
from holdfast.harness.simulate.search.shrink import shrink as make_smaller
from holdfast.harness.simulate.story import RunSummary

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
        if options.schedule is not None:
            return _finish(load(options.schedule), [], trace, options)
        if options.scenario == "swarm":
            return _swarm(options, trace)
        ranks = options.ranks or RANKS_A_HOST
        hosts = options.hosts or max(1, ranks // RANKS_A_HOST)
        steps = STEPS if ranks <= MOST_WITH_STEPS else 0
        schedule = make_scenario(options.scenario, ranks, hosts, options.seed, steps=steps)
        return _finish(schedule, [], trace, options) if steps else _measure([schedule], trace, options)


# One schedule, or many --------------------------------------------------------------------------------------------


def _swarm(options: SimulateOptions, trace: TraceWriter | None) -> int:
    """Run the schedules of the seeds, up to the first that breaks an invariant."""
    schedules = [draw(options.seed + number, options.ranks, options.hosts) for number in range(options.seeds)]
    if options.ranks is not None and options.ranks > MOST_WITH_STEPS:
        return _measure(schedules, trace, options)
    outcomes: list[SimulationResult] = []
    with _working(f"{options.seeds} seeds: about {SEED_SECONDS * options.seeds:.0f} s") as say:
        for schedule in schedules[:-1]:
            outcomes.append(simulate(schedule, trace))
            events = sum(outcome.events for outcome in outcomes)
            say(f"seed {schedule.seed}: {len(outcomes)} of {options.seeds}, {events:,} events")
            if outcomes[-1].violation is not None:
                return _finish(schedule, outcomes[:-1], None, options)
    return _finish(schedules[-1], outcomes, trace, options)


def _finish(
    schedule: Schedule, before: list[SimulationResult], trace: TraceWriter | None, options: SimulateOptions
) -> int:
    """Run the last schedule, and show it with those before it, which broke no invariant."""
    outcome, story = _told(schedule, trace)
    if outcome.violation is not None and options.shrink:
        invariant = outcome.violation.invariant

        def fails(smaller: Schedule) -> bool:
            found = simulate(smaller).violation
            return found is not None and found.invariant == invariant

        schedule = make_smaller(schedule, fails)
        outcome, story = _told(schedule, None)
    if options.json:
        print_json({"outcomes": [*before, outcome], "schedule": schedule})
    else:
        _show_outcomes([*before, outcome], schedule, story, options.out if options.shrink else None)
    if outcome.violation is not None and options.shrink:
        with writing("holdfast simulate"):
            save(schedule, options.out)
            options.out.with_suffix(".txt").write_text(story, encoding="utf-8")
    return 0 if outcome.violation is None else 1


def _told(schedule: Schedule, trace: TraceWriter | None) -> tuple[SimulationResult, str]:
    story = RunSummary()
    outcome = simulate(schedule, trace, story.hear)
    return outcome, story.text(schedule, outcome.violation)


def _show_outcomes(outcomes: list[SimulationResult], schedule: Schedule, story: str, written: Path | None) -> None:
    out, last = console(), outcomes[-1]
    table = FoldingTable(title=f"{counted(len(outcomes), 'simulation')}, seeds {outcomes[0].seed} to {last.seed}")
    for name in ("events", "simulated", "epochs", "steps", "faults", "invariants", "broken", "trace of the last"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{sum(outcome.events for outcome in outcomes):,}",
        f"{sum(outcome.seconds for outcome in outcomes):,.0f} s",
        f"{sum(outcome.epochs for outcome in outcomes):,}",
        f"{sum(outcome.steps for outcome in outcomes):,}",
        f"{sum(outcome.faults for outcome in outcomes):,}",
        str(len(CHECKERS)),
        str(sum(outcome.violation is not None for outcome in outcomes)),
        last.trace,
    )
    out.print(table)
    if last.violation is None and len(outcomes) > 1:
        return
    out.print(story)
    if last.violation is not None:
        again = ["--schedule", str(written)] if written is not None else ["--seed", str(schedule.seed), "--shrink"]
        out.print(f"again: {shlex.join(['holdfast', 'simulate', *again])}", soft_wrap=True)


# Many ranks -------------------------------------------------------------------------------------------------------


def _measure(schedules: list[Schedule], trace: TraceWriter | None, options: SimulateOptions) -> int:
    """Run schedules of membership alone, up to the first that breaks an invariant."""
    if options.shrink:
        raise ValueError(f"--shrink repeats a run many times: it takes at most {counted(MOST_WITH_STEPS, 'rank')}")
    name, results = options.scenario, list[ScaleResult]()
    for schedule in schedules:
        what = f"{name}, seed {schedule.seed}"
        with _working(f"{what}: setting up {counted(schedule.layout.ranks, 'rank')}") as say:
            show = lambda share, events, what=what: say(f"{what}: {share:.0%}, {counted(events, 'event')}")  # noqa: E731
            results.append(measure(schedule, trace, show))
        if results[-1].violation is not None:
            break
    if options.json:
        print_json(results if name == "swarm" else results[0])
    else:
        _show_scales(name, results)
    return 0 if results[-1].violation is None else 1


def _show_scales(name: str, scales: Iterable[ScaleResult]) -> None:
    out = console()
    table = FoldingTable(
        title=f"{name}: {SCENARIOS[name][0] if name in SCENARIOS else 'all kinds of faults'}",
        caption="protocol results in simulated time",
    )
    for column in ("ranks", "lost", "epochs", "first evidence", "agreed", "all installed", "hops", "messages a rank"):
        table.add_column(column, justify="right")
    table.add_column("KiB a rank", justify="right")
    table.add_column("cost here", justify="right")
    for scale in scales:
        table.add_row(
            f"{scale.ranks:,}",
            f"{scale.lost:,}",
            str(scale.epochs),
            *(f"{1e3 * t:,.1f} ms" if t is not None else "-" for t in (scale.detected, scale.agreed, scale.installed)),
            str(scale.depth),
            f"{scale.messages_mean:.1f} (most {scale.messages_max:,})",
            f"{scale.bytes_mean / 1024:.1f} (most {scale.bytes_max / 1024:.0f})",
            f"{scale.setup + scale.cpu:.1f} s CPU, {scale.memory:.2f} GiB",
        )
        if scale.violation is not None:
            out.print(styled("BROKEN", "red") + f" {scale.violation.invariant}: {scale.violation.message}")
    out.print(table)
    for scale in scales:
        out.print(f"trace {scale.trace}, {counted(scale.events, 'event')}, seed {scale.seed}")


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
