"""A generated demo run with as much data as a real one, for tests of its report."""

from __future__ import annotations

import math
import random

from holdfast.harness.demo.record import (
    DemoFault,
    DemoRun,
    Evaluation,
    LogLine,
    ProcessLife,
    RunOutcome,
    Step,
    StepSpan,
)
from holdfast.harness.invariants import Event, examine
from holdfast.harness.report.model import RecoveryStage
from holdfast.rl.crew import Crew
from holdfast.rl.learning.recipe import Recipe

SECONDS = 62.0
STRUCK = {"trainer-1": 14.2, "generator-0": 26.8, "holder-1": 40.1}
_PARTS: tuple[tuple[str, float], ...] = (("fetch", 0.004), ("train", 0.026), ("reduce", 0.006), ("update", 0.003))


def _learnt(step: int, noise: random.Random, width: float) -> float:
    return min(1.0, max(0.0, 0.1 + 0.8 / (1 + math.exp(-(step - 370) / 105)) + noise.gauss(0, width)))


def _trainer_spans(name: str, begins: list[float], until: float) -> list[StepSpan]:
    spans = []
    for step, begin in enumerate(begins):
        at = begin
        for activity, seconds in _PARTS:
            if at < until:
                spans.append(StepSpan(name, activity, at, min(at + seconds, until), step))
            at += seconds + 0.001
        if name == "trainer-0" and at < until:
            spans.append(StepSpan(name, "publish", at, at + 0.002, step + 1))
    return spans


def _generator_spans(name: str, first: float, until: float, noise: random.Random) -> list[StepSpan]:
    spans, at, step = [], first, 0
    while at < until:
        seconds = 0.019 + noise.random() * 0.008
        activity = "evaluate" if noise.random() < 0.01 else "generate"
        spans.append(StepSpan(name, activity, at, min(until, at + seconds), step))
        at, step = at + seconds + 0.003 + noise.random() * 0.006, step + 1
    return spans


def _findings(broken: bool) -> list[Event]:
    events = []
    for member, rank in (("trainer-0", 0), ("trainer-1", 1)):
        events.append(
            Event(2.0, member, 1, "installed", {"epoch": 1, "members": ["trainer-0", "trainer-1"], "rank": rank})
        )
    for step in range(50):
        for member in ("trainer-0", "trainer-1"):
            fields = {"step": step, "epoch": 1, "how": "normal"}
            events.append(Event(2.1 + step, member, 1, "attempt", fields))
            events.append(Event(2.2 + step, member, 1, "committed", fields))
    if broken:
        events.append(Event(60.0, "trainer-0", 1, "committed", {"step": 7, "epoch": 1, "how": "normal"}))
    return sorted(events, key=lambda event: event.time)


def sample_run(steps: int = 1000, passed: bool = True, faults: bool = True) -> DemoRun:
    """A run of `steps` steps; with `faults` a trainer, a generator and a holder were killed."""
    noise = random.Random(7)
    begins, at = [], 2.5
    for _ in range(steps):
        begins.append(at)
        at += (SECONDS - 3.0) / steps + noise.random() * 0.001
        if faults and any(0 <= at - struck < 0.06 for struck in STRUCK.values()):
            at += 0.04
    struck = STRUCK if faults else {}
    blow_step = {name: sum(begin < when for begin in begins) - 1 for name, when in struck.items()}
    ended = {name: when + 0.001 for name, when in struck.items()}
    lives = [
        ProcessLife(f"{role}-{number}", role, 4100 + index * 10 + number, 0.1, ended.get(f"{role}-{number}"),
             "killed by SIGKILL" if f"{role}-{number}" in struck else "")
        for index, (role, count) in enumerate((("trainer", 3), ("generator", 2), ("holder", 2)))
        for number in range(count)
    ]  # fmt: skip
    if faults:
        lives += [
            ProcessLife("trainer-3", "trainer", 4203, 14.21, replaces="trainer-1"),
            ProcessLife("generator-2", "generator", 4212, 26.81, replaces="generator-0"),
            ProcessLife("holder-2", "holder", 4222, 40.11, replaces="holder-1"),
        ]
    spans = _trainer_spans("trainer-0", begins, SECONDS)
    spans += _trainer_spans("trainer-1", begins, struck.get("trainer-1", SECONDS))
    if faults:
        spans += [
            StepSpan(name, "rebuild", 14.2018, 14.2071, blow_step["trainer-1"]) for name in ("trainer-0", "trainer-2")
        ]
        spans += _trainer_spans("trainer-2", [begin for begin in begins if begin > 14.2], SECONDS)
        spans += _generator_spans("generator-2", 27.4, SECONDS, noise)
    spans += _generator_spans("generator-0", 2.4, struck.get("generator-0", SECONDS), noise)
    spans += _generator_spans("generator-1", 2.4, SECONDS, noise)
    stage = RecoveryStage
    blows = (
        DemoFault("trainer", "trainer-1", 4101, "rank 1 inside the all_reduce", blow_step.get("trainer-1", 0), 14.2,
             (stage("detected", 0.0009), stage("rebuilt", 0.0071), stage("next step committed", 0.0486))),
        DemoFault("generator", "generator-0", 4110, "between two tokens of a unit",
             blow_step.get("generator-0", 0), 26.8,
             (stage("detected", 0.0012), stage("replaced", 0.0094), stage("its unit redone", 0.0614))),
        DemoFault("holder", "holder-1", 4121, "holding the newest weights, version 631",
             blow_step.get("holder-1", 0), 40.1,
             (stage("detected", 0.0011), stage("replaced", 0.0087), stage("replicated again", 0.372))),
    )  # fmt: skip
    return DemoRun(
        backend="shm",
        began="2025-11-20T14:02:11+00:00",
        seconds=SECONDS,
        setup_seconds=2.9,
        recipe=Recipe(steps=steps),
        crew=Crew(),
        steps=tuple(
            Step(step, begin + 0.045, _learnt(step, noise, 0.05), 512 * 3, 1 + (begin > 14.2), 2)
            for step, begin in enumerate(begins)
        ),
        evaluations=tuple(
            Evaluation(version, begins[version - 1] if version else 2.4, _learnt(version, noise, 0.01))
            for version in range(0, steps + 1, 25)
        ),
        lives=tuple(lives),
        spans=tuple(spans),
        blows=blows if faults else (),
        notes=(LogLine(14.2, "trainer-1", "killed with SIGKILL"),) if faults else (),
        findings=tuple(examine(_findings(broken=not passed))),
        outcome=RunOutcome(
            untrained=0.0,
            before=0.103,
            after=0.907,
            digest="5b1d4e0f9a2c7788aabbccdd",
            verified="5b1d4e0f9a2c7788aabbccdd" if faults else None,
            steps_lost=0,
            versions_lost=0,
            too_short=False,
            failures=() if passed else ('the invariant "committed steps are kept" was broken once',),
        ),
    )
