"""Runs trainers that restart when a rank dies, beside gloo and with one killed: make trl, make lightning.

restarted_job.py trl|lightning
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = {"trl": ("grpo", "sft", "trainer", "loop"), "lightning": ("lightning",)}
STEPS, KILL = 12, 7


def torchrun(program: Path, *words: object, ranks: int, restarts: int = 0) -> dict[str, Any]:
    """What a job of torchrun says at its end, in a line of JSON."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += map(str, ["--nproc-per-node", ranks, "--max-restarts", restarts, program, *words])
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def job(folder: str, example: str, backend: str, kill_step: int = 0) -> dict[str, Any]:
    """What a job of two ranks says at its end; torchrun restarts it once if a rank dies."""
    program = Path(__file__).parent / folder / "train.py"
    with tempfile.TemporaryDirectory() as directory:
        options = ("--directory", directory, "--steps", STEPS, "--backend", backend, "--kill-step", kill_step)
        return torchrun(program, example, *options, ranks=2, restarts=1)


def main(folder: str) -> None:
    """Print the table; the exit status is 1 if something in it is not as it should be."""
    print(f"{STEPS} steps on 2 ranks; weights over holdfast, over gloo, and after a SIGKILL of rank 1 at step {KILL}\n")
    row = "{:<10} {:>9} {:<18} {:<14} {}".format
    print(row("example", "last loss", "weights", "equal to gloo", "after the kill"))
    good = True
    for example in EXAMPLES[folder]:
        ours, gloo, killed = (job(folder, example, *how) for how in (("holdfast",), ("gloo",), ("holdfast", KILL)))
        weights = ours["weights"][0]
        same = set(ours["weights"] + gloo["weights"]) == {weights} and ours["losses"] == gloo["losses"]
        back = killed["restarts"] == 1 and set(killed["weights"]) == {weights}
        good = good and same and back
        loss = f"{ours['losses'][-1]:.4f}"
        print(row(example, loss, weights, "yes" if same else "NO", "equal" if back else "DIFFERENT"), flush=True)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1])
