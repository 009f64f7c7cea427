"""Two groups of torchft over holdfast, beside gloo and with one of them killed and replaced: make torchft."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")

from torchft.coordination import LighthouseServer

TRAIN = Path(__file__).with_name("train.py")
STEPS, KILL = 30, 10


def start(
    lighthouse: LighthouseServer, name: str, backend: str, steps: int = STEPS, kill_step: int = 0
) -> subprocess.Popen[str]:
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TRAIN), name, backend, str(steps), str(kill_step)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(group: subprocess.Popen[str]) -> dict[str, Any]:
    """What a group says at its end."""
    out, errors = group.communicate(timeout=120)
    if group.returncode:
        raise SystemExit(f"{group.args} ended with {group.returncode}:\n{errors[-4000:]}")
    said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return said


def job(backend: str) -> list[dict[str, Any]]:
    """What two groups say that nothing befalls."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
    groups = [start(lighthouse, name, backend) for name in ("a", "b")]
    said = [result(group) for group in groups]
    lighthouse.shutdown()
    return said


def killed_job(backend: str) -> dict[str, Any]:
    """What became of two groups of which the second is killed, and replaced."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, heartbeat_timeout_ms=500)
    first, second = start(lighthouse, "a", backend), start(lighthouse, "b", backend, kill_step=KILL)
    second.communicate(timeout=120)
    died = time.time()
    assert second.returncode == -signal.SIGKILL
    replacement = result(start(lighthouse, "b", backend, STEPS - KILL - 1))
    survivor = result(first)
    lighthouse.shutdown()
    alone = [when for _, groups, when in survivor["steps"] if groups == 1 and when > died]
    return {
        "weights": [survivor["weights"], replacement["weights"]],
        "steps": [step for step, _, _ in survivor["steps"]],
        "seconds": alone[0] - died,
        "joined at": replacement["steps"][0][0],
    }


def main() -> None:
    """Print what was seen; the exit status is 1 if something is not as it should be."""
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torchft", "torch")))
    ours, gloo, killed = job("holdfast"), job("gloo"), killed_job("holdfast")
    weights = {each["weights"] for each in (*ours, *gloo)}
    print(f"{STEPS} steps of two groups: weights {ours[0]['weights']}, equal to gloo's: {len(weights) == 1}")
    steps = killed["steps"]
    whole = steps == list(range(steps[0], steps[0] + len(steps)))  # the first of the two groups began alone
    print(
        f"one killed in a step after {KILL}: the other's next step was done {killed['seconds']:.2f} s later; the "
        f"replacement joined at step {killed['joined at']}; no step lost: {whole}; weights of both "
        f"{' and '.join(killed['weights'])}"
    )
    raise SystemExit(0 if len(weights) == 1 and whole and len(set(killed["weights"])) == 1 else 1)


if __name__ == "__main__":
    main()
