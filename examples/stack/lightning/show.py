"""Runs the example beside gloo and with a rank killed, and prints what was seen: make lightning."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).with_name("train.py")
STEPS, KILL = 40, 17


def job(backend: str, kill_step: int = 0) -> dict[str, Any]:
    """What a job of two ranks says at its end; torchrun restarts it once if a rank dies."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", str(TRAIN), "--directory", directory, "--steps", str(STEPS)]
        command += ["--backend", backend, "--kill-step", str(kill_step)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


def main() -> None:
    """The exit status is 1 if something is not as it should be."""
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("lightning", "torch")))
    ours, gloo, killed = job("holdfast"), job("gloo"), job("holdfast", KILL)
    assert ours["backend"].startswith("holdfast.") and not gloo["backend"].startswith("holdfast.")
    assert ours["steps"] == STEPS > killed["steps"], "the killed job went on from a checkpoint"
    weights = ours["weights"][0]
    same = {*ours["weights"], *gloo["weights"]} == {weights} and ours["loss"] == gloo["loss"]
    back = {*killed["weights"]} == {weights}
    print(f"{STEPS} steps on 2 ranks: last loss {ours['loss']:.4f}, weights {weights}; equal to gloo: {same}")
    print(f"rank 1 killed at step {KILL}, restarted by torchrun: the last {killed['steps']} steps again; equal: {back}")
    raise SystemExit(0 if same and back else 1)


if __name__ == "__main__":
    main()
