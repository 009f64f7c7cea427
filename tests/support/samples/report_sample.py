"""A generated report with as much data as that of a real run."""

from __future__ import annotations

import math
import random

from holdfast.harness.report.model import (
    Curve,
    FaultRecord,
    Figure,
    Learning,
    Point,
    ProcessRecord,
    RecoveryStage,
    RunReport,
    Span,
)

SECONDS = 62.0
STRUCK = {"trainer-1": 14.2, "generator-0": 26.8, "holder-1": 40.1}
_PARTS: tuple[tuple[str, float], ...] = (("fetch", 0.004), ("train", 0.026), ("reduce", 0.006), ("update", 0.003))


def _learnt(step: int, noise: random.Random, width: float) -> float:
    return min(1.0, max(0.0, 0.1 + 0.8 / (1 + math.exp(-(step - 370) / 105)) + noise.gauss(0, width)))


def _trainer_spans(name: str, begins: list[float], until: float) -> list[Span]:
    spans = []
    for step, begin in enumerate(begins):
        at = begin
        for activity, seconds in _PARTS:
            if at < until:
                spans.append(Span(name, activity, at, min(at + seconds, until), str(step)))
            at += seconds + 0.001
        if name == "trainer-0" and at < until:
            spans.append(Span(name, "publish", at, at + 0.002, str(step + 1)))
    return spans


def _generator_spans(name: str, first: float, until: float, noise: random.Random) -> list[Span]:
    spans, at, step = [], first, 0
    while at < until:
        seconds = 0.019 + noise.random() * 0.008
        activity = "evaluate" if noise.random() < 0.01 else "generate"
        spans.append(Span(name, activity, at, min(until, at + seconds), str(step)))
        at, step = at + seconds + 0.003 + noise.random() * 0.006, step + 1
    return spans


def sample_report(steps: int = 1000, outcome: str = "", faults: bool = True) -> RunReport:
    """The report of a run of `steps` steps; with `faults` a trainer, a generator and a holder were killed."""
    noise = random.Random(7)
    begins, at = [], 2.5
    for _ in range(steps):
        begins.append(at)
        at += (SECONDS - 3.0) / steps + noise.random() * 0.001
        if faults and any(0 <= at - struck < 0.06 for struck in STRUCK.values()):
            at += 0.04
    struck = STRUCK if faults else {}
    before = {name: sum(begin < when for begin in begins) - 1 for name, when in struck.items()}
    lanes = [
        ProcessRecord(
            name=f"{role}-{number}",
            role=role,
            pid=4100 + index * 10 + number,
            born=0.1,
            ended=struck.get(f"{role}-{number}", SECONDS),
            fate="killed" if f"{role}-{number}" in struck else "finished",
        )
        for index, (role, count) in enumerate((("trainer", 3), ("generator", 2), ("holder", 2)))
        for number in range(count)
    ]
    spans = _trainer_spans("trainer-0", begins, SECONDS)
    spans += _trainer_spans("trainer-1", begins, struck.get("trainer-1", SECONDS))
    if faults:
        lanes += [
            ProcessRecord("trainer-3", "trainer", 4203, 14.21, SECONDS, "finished", "in place of trainer-1"),
            ProcessRecord("generator-2", "generator", 4212, 26.81, SECONDS, "finished", "in place of generator-0"),
            ProcessRecord("holder-2", "holder", 4222, 40.11, SECONDS, "finished", "in place of holder-1"),
        ]
        rebuilt = str(before["trainer-1"])
        spans += [Span(name, "rebuild", 14.2018, 14.2071, rebuilt) for name in ("trainer-0", "trainer-2")]
        spans += _trainer_spans("trainer-2", [begin for begin in begins if begin > 14.2], SECONDS)
        spans += _generator_spans("generator-2", 27.4, SECONDS, noise)
    spans += _generator_spans("generator-0", 2.4, struck.get("generator-0", SECONDS), noise)
    spans += _generator_spans("generator-1", 2.4, SECONDS, noise)
    return RunReport(
        title="A run of reinforcement learning",
        good=not outcome,
        outcome=outcome or "all steps done",
        summary="A tiny Llama learnt to add three digits.",
        when="20 November 2025, 14:02 UTC",
        seconds=SECONDS,
        figures=(Figure("Held-out reward", "10.3% → 90.7%", "", "good"),),
        learning=Learning(
            curve=Curve(
                rewards=tuple(Point(step + 1, _learnt(step, noise, 0.05)) for step in range(steps)),
                evaluations=tuple(Point(step, _learnt(step, noise, 0.01)) for step in range(0, steps + 1, 25)),
            )
        ),
        lanes=tuple(lanes),
        spans=tuple(spans),
        faults=tuple(_fault(name, before[name]) for name in struck),
        configuration=(("seed", "0"),),
        repeat=("holdfast rl train run.toml",),
    )


def _fault(name: str, step: int) -> FaultRecord:
    stages = (RecoveryStage("detected", 0.0009), RecoveryStage("rebuilt", 0.0071), RecoveryStage("resumed", 0.0486))
    words = f"SIGKILL of a {name.split('-')[0]}"
    return FaultRecord(words=words, victims=(name,), time=STRUCK[name], step=step, stages=stages, note="Planned.")
