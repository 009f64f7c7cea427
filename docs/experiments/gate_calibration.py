"""How often does the gate err? `python docs/experiments/gate_calibration.py COMMIT`.

A trial is a whole run of the gate with one commit on both sides: once as it is, and once with a head that does 5% more
ops than the base. It prints as Markdown how often equal code was called slower, and how often the slowdown was found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.ft.console.units import counted
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.harness.gate.gate import ComparisonState, DecisionRule, chosen, compare
from holdfast.harness.gate.pairs import PairLauncher
from holdfast.harness.gate.sides import Side, build
from holdfast.harness.measure.results import Noise


class Rate(msgspec.Struct, frozen=True):
    """In how many of `trials` the verdict was slower, faster, the same, or none.

    `mean` and `spread` (standard deviation) are of the estimated slowdowns; `pairs` is how many pairs of processes a
    trial took on average.
    """

    workload: str
    injected: float
    trials: int
    slower: int
    faster: int
    same: int
    unsure: int
    mean: float
    spread: float
    clusters: float


class Calibration(msgspec.Struct, frozen=True):
    """`alarms` of `trials` runs on equal code called a workload slower.

    `found` counts the workloads with an injected slowdown that were called slower; a trial has `workloads` of them.
    """

    commit: str
    injected: float
    trials: int
    workloads: int
    alarms: int
    found: int
    rates: tuple[Rate, ...]
    rule: DecisionRule
    seconds: float
    others: float

    @property
    def power(self) -> float:
        return self.found / max(1, self.trials * self.workloads)

    @property
    def good(self) -> bool:
        """Whether the error rates are within those of the rule."""
        return self.power >= 0.95 and self.alarms <= 0.01 * self.trials


def _rate(name: str, injected: float, states: list[ComparisonState]) -> Rate:
    slowdowns = [state.estimate.slowdown for state in states]
    mean = sum(slowdowns) / len(slowdowns)
    verdicts = [state.verdict for state in states]
    return Rate(
        workload=name,
        injected=injected,
        trials=len(states),
        slower=verdicts.count("slower"),
        faster=verdicts.count("faster"),
        same=verdicts.count("same"),
        unsure=verdicts.count("unsure"),
        mean=mean,
        spread=(sum((each - mean) ** 2 for each in slowdowns) / max(1, len(slowdowns) - 1)) ** 0.5,
        clusters=sum(state.estimate.clusters for state in states) / len(states),
    )


def calibrate(
    sides: tuple[Side, Side],
    rule: DecisionRule,
    trials: int,
    names: Sequence[str] = (),
    injected: float = 0.05,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Do `trials` trials of each kind with the workloads `names` (none: all). `sides` are two copies of one commit.

    ^C ends it with the trials so far. Raises ValueError for an effect that cannot be injected exactly, unknown names,
    or a workload that does not run.
    """
    workloads = chosen(names)
    if any(abs(workload.ops * injected - round(workload.ops * injected)) > 1e-6 for workload in workloads):
        raise ValueError(f"an effect of {injected:.4g} is not a whole number of ops: give a multiple of 0.05")
    began, noise = time.monotonic(), Noise()
    done: dict[tuple[float, str], list[ComparisonState]] = {(a, w.name): [] for a in (0.0, injected) for w in workloads}
    alarms = found = trial = 0
    try:
        with PairLauncher() as launcher:
            for trial in range(1, trials + 1):
                equal, slowed = (
                    [ComparisonState(workload, amount) for workload in workloads] for amount in (0.0, injected)
                )
                compare(launcher, sides, rule, (*equal, *slowed))
                for state in (*equal, *slowed):
                    if state.why:
                        raise ValueError(f"{state.workload.name} does not run: {state.why}")
                    done[state.extra, state.workload.name].append(state)
                alarms += any(state.verdict == "slower" for state in equal)
                found += sum(state.verdict == "slower" for state in slowed)
                progress(f"trial {trial} of {trials}: {alarms} alarms, {found} of {trial * len(workloads)} found")
    except KeyboardInterrupt:
        trial -= 1
        if not trial:
            raise
    return Calibration(
        commit=sides[0].title,
        injected=injected,
        trials=trial,
        workloads=len(workloads),
        alarms=alarms,
        found=found,
        rates=tuple(_rate(w.name, amount, done[amount, w.name]) for w in workloads for amount in (0.0, injected)),
        rule=rule,
        seconds=time.monotonic() - began,
        others=noise.cpus(),
    )


def markdown(found: Calibration) -> str:
    """How often the gate was right, as Markdown."""
    lines = [
        f"{counted(found.trials, 'trial')} of each kind at `{found.commit}`, of {found.workloads} workloads at once, "
        f"in "
        f"{found.seconds / 60:.0f} minutes, while other processes used {found.others:.2f} CPUs. Equal code was called "
        f"slower in {found.alarms} of {found.trials} runs; {found.injected:.0%} put in was found in {found.power:.1%}.",
        "",
        "| workload | put in | slower | faster | same | unsure | estimated, ± standard deviation | pairs |",
        "|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {rate.workload} | {rate.injected:.0%} | {rate.slower} | {rate.faster} | {rate.same} | {rate.unsure} "
        f"| {rate.mean:+.2%} ± {rate.spread:.2%} | {rate.clusters:.1f} |"
        for rate in found.rates
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says; 0 if the error rates are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--trials", type=int, default=104)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--effect", type=float, default=0.05)
    parser.add_argument("--most", type=int, default=DecisionRule().most, help="pairs of processes of a trial, at most")
    asked = parser.parse_args(arguments)
    rule = DecisionRule(effect=asked.effect, first=min(DecisionRule().first, asked.most), most=asked.most)
    with HeldDirectory("holdfast-gate-") as folder:
        sides = [build(asked.commit, Path(), folder.path / name) for name in ("base", "head")]
        progress = lambda text: print(text, file=sys.stderr)  # noqa: E731
        found = calibrate((sides[0], sides[1]), rule, asked.trials, asked.only, asked.effect, progress)
    print(markdown(found))
    return int(not found.good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
