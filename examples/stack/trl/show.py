"""Runs the examples beside gloo and with a rank killed, and prints a table of what was seen: make trl."""

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
EXAMPLES = {"grpo": "TRL GRPOTrainer", "sft": "TRL SFTTrainer", "trainer": "transformers Trainer", "loop": "Accelerate"}
PACKAGES = ("trl", "accelerate", "transformers", "torch")
STEPS, KILL = 12, 7


def job(example: str, backend: str, kill_step: int = 0) -> dict[str, Any]:
    """What a job of two ranks says at its end; torchrun restarts it once if a rank dies."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", str(TRAIN), example, "--directory", directory, "--steps", str(STEPS)]
        command += ["--backend", backend, "--kill-step", str(kill_step)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


def main() -> None:
    """Print the table; the exit status is 1 if something in it is not as it should be."""
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    print(f"{STEPS} steps on 2 ranks; weights over holdfast, over gloo, and after a SIGKILL of rank 1 at step {KILL}\n")
    row = "{:<22} {:>9} {:>8} {:>8}  {:<18} {:<14} {}".format
    print(row("example", "last loss", "holdfast", "gloo", "weights", "equal to gloo", "after the kill"))
    good = True
    for example in sys.argv[1:] or EXAMPLES:
        ours, gloo, killed = job(example, "holdfast"), job(example, "gloo"), job(example, "holdfast", KILL)
        weights = ours["weights"][0]
        same = set(ours["weights"] + gloo["weights"]) == {weights} and ours["losses"] == gloo["losses"]
        back = killed["restarts"] == 1 and set(killed["weights"]) == {weights}
        assert ours["backend"].startswith("holdfast.") and not gloo["backend"].startswith("holdfast.")
        good = good and same and back
        seconds = (f"{each['seconds']:.1f} s" for each in (ours, gloo))
        loss = f"{ours['losses'][-1]:.4f}"
        print(
            row(EXAMPLES[example], loss, *seconds, weights, "yes" if same else "NO", "equal" if back else "DIFFERENT")
        )
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
