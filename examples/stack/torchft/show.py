"""Two groups of torchft over holdfast, beside gloo and with one of them killed and replaced: make torchft."""

import sys
from itertools import pairwise
from pathlib import Path

from group_jobs import groups, killed_and_back, result

STEPS, KILL = 30, 10


def command(name: str, backend: str, steps: int = STEPS, kill_step: int = 0) -> list[object]:
    return [sys.executable, Path(__file__).with_name("train.py"), name, backend, steps, kill_step]


def weights(backend: str) -> set[str]:
    """What two groups end with that nothing befalls."""
    with groups(2) as start:
        started = [start(*command(name, backend)) for name in "ab"]
        return {result(group)["weights"] for group in started}


def main() -> None:
    """Print what was seen; the exit status is 1 if something is not as it should be."""
    ours, gloo = weights("holdfast"), weights("gloo")
    print(f"{STEPS} steps of two groups: weights {ours}, equal to gloo's: {ours == gloo}")
    survivor, replacement = killed_and_back(
        command("a", "holdfast"),
        command("b", "holdfast", kill_step=KILL),
        command("b", "holdfast", STEPS - KILL - 1),
        heartbeat_timeout_ms=500,
    )
    steps = [step for step, _, _ in survivor["steps"]]
    whole = steps == list(range(steps[0], steps[0] + len(steps)))  # the first of the two groups began alone
    equal = survivor["weights"] == replacement["weights"]
    pairs = pairwise(survivor["steps"])
    waited = next(after - before for (_, two, before), (_, one, after) in pairs if (two, one) == (2, 1))
    print(
        f"one killed in a step after {KILL}: the other's next step was done {waited:.2f} s later; the replacement "
        f"joined at step {replacement['steps'][0][0]}; no step lost: {whole}; weights equal: {equal}"
    )
    raise SystemExit(0 if len(ours) == 1 and ours == gloo and whole and equal else 1)


if __name__ == "__main__":
    main()
