"""Runs TorchTitan both ways, its models as trainers and its own Trainer, and prints what was seen: make titan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import trainers

HERE = Path(__file__).parent
JOBS = {"fsdp": ("FSDP2", 2), "hsdp": ("HSDP", 4), "tp": ("TP 2", 2)}


def job(how: str, backend: str) -> dict[str, Any]:
    """What a job of TorchTitan's own Trainer says at its end."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(JOBS[how][1]), str(HERE / "own_trainer.py"), how, backend]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


def main() -> None:
    """Print both tables; the exit status is 1 if weights that must be equal are not."""
    print("Its own Trainer over init_process_group: 6 steps of llama3_debugmodel\n")
    row = "{:<12} {:>6} {:>10}  {:<34} {}".format
    print(row("parallelism", "ranks", "last loss", "weights over holdfast", "equal to gloo"))
    good = True
    for how, (title, ranks) in JOBS.items():
        ours, gloo = job(how, "holdfast"), job(how, "gloo")
        same = ours["weights"] == gloo["weights"] and len(ours["weights"]) == 1
        good = good and same
        print(row(title, ranks, f"{ours['losses'][-1]:.5f}", ours["weights"][0], "yes" if same else "NO"), flush=True)
    print("\nIts models as trainers of a run, under a session: equal weights for each model and degree of TP\n")
    raise SystemExit(0 if trainers.main() and good else 1)


if __name__ == "__main__":
    main()
