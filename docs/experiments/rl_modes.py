"""How much faster is asynchronous training than synchronous? `python docs/experiments/rl_modes.py`.

Prints the episodes a second of both loops, their ratio, and the held-out reward at the end. One trainer and one
generator: each has a processor to itself where there are two, as they have GPUs of their own on a cluster.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.ft.console.units import counted
from holdfast.ft.processes.zygote_client import shut_down
from holdfast.harness.training.driver import train_here
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import config_of
from holdfast.rl.run.run_events import Evaluated, Event, StepTrained

MODES = {"synchronous": 0, "asynchronous": 1}
"""The loops, and the staleness of each."""

WARM = 10
"""Steps that are not measured, at most half of all: the first ones allocate and import."""


class ModeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run reached. `rate` is in episodes a second; `reward` is the mean of the last three evaluations."""

    mode: str
    rate: float
    reward: float


def configuration(mode: str, steps: int, every: int, seed: int) -> RunConfig:
    """The run that is measured."""
    return config_of(
        {
            "seed": seed,
            "steps": steps,
            "model": {"warmup_steps": 16, "warmup_batch": 256},
            "algorithm": {"mode": mode, "staleness": MODES[mode], "groups": 32},
            "objective": {"entropy": 0.1},
            "sampling": {"group": 8, "batch": 16, "max_new_tokens": 2},
            "trainer": {"replicas": 1, "spares": 0, "units": 1, "rate": 2e-3, "rate_decay": steps},
            "generator": {"replicas": 1},
            "evaluation": {"every": every},
        },
        "modes",
    )


def measure(mode: str, steps: int, every: int = 25, seed: int = 0) -> ModeFigures:
    """Train once, with an evaluation every so many steps."""
    config = configuration(mode, steps, every, seed)
    seen: list[Event] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-modes-") as folder:
        train_here(config, Path(folder) / "run", observers=(seen.append,))
    trained = [each.time for each in seen if isinstance(each, StepTrained)][min(WARM, steps // 2) :]
    scores = [each.reward for each in seen if isinstance(each, Evaluated) and each.reward is not None][-3:]
    return ModeFigures(
        mode=mode,
        rate=config.algorithm.groups * config.sampling.group * (len(trained) - 1) / (trained[-1] - trained[0]),
        reward=statistics.fmean(scores),
    )


def lines(found: Sequence[ModeFigures]) -> Sequence[str]:
    """The figures in words."""
    of = {mode: [each for each in found if each.mode == mode] for mode in MODES}
    rates = {mode: statistics.median(each.rate for each in of[mode]) for mode in MODES}
    rewards = {mode: statistics.fmean(each.reward for each in of[mode]) for mode in MODES}
    return (
        *(
            f"{mode}: {rates[mode]:.0f} episodes/s (median of {counted(len(of[mode]), 'run')}), "
            f"held-out reward {rewards[mode]:.1%}"
            for mode in MODES
        ),
        f"asynchronous over synchronous: {rates['asynchronous'] / rates['synchronous']:.2f}",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    results = []
    for chosen_seed, each in itertools.product(range(asked.seeds), MODES):
        results.append(measure(each, asked.steps, every=min(25, asked.steps), seed=chosen_seed))
        print(f"{each}: {results[-1].rate:.0f} episodes/s, held-out reward {results[-1].reward:.1%}", flush=True)
    print(*lines(results), sep="\n")
    shut_down()
