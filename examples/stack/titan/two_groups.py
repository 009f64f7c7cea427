"""Two replica groups of `fault_tolerant.py`, one of them killed and started again: two_groups.py [JOB ...]."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")

from torchft.coordination import LighthouseServer

PROGRAM = Path(__file__).with_name("fault_tolerant.py")
STEPS, KILL = 6, 3
SECONDS = 280.0
JOBS = {
    "each step, 1 rank": (1, "sync"),
    "each step, 2 ranks": (2, "sync"),
    "DiLoCo, 2 ranks": (2, "diloco"),
    "LocalSGD, 2 ranks": (2, "local_sgd"),
}


def start(lighthouse: LighthouseServer, group: int, ranks: int, how: str, kill: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(PROGRAM), str(group), str(STEPS), "--how", how, "--kill", str(kill)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(job: subprocess.Popen[str]) -> dict[str, Any]:
    """What a group reports at its end."""
    out, errors = job.communicate(timeout=SECONDS)
    if job.returncode:
        raise SystemExit(f"{job.args} ended with {job.returncode}:\n{errors[-4000:]}")
    said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return said


def killed_and_back(ranks: int, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the survivor reports, and what the replacement of the other group, which was killed."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, heartbeat_timeout_ms=1000)
    with contextlib.ExitStack() as stack:
        stack.callback(lighthouse.shutdown)
        first, second = start(lighthouse, 0, ranks, how), start(lighthouse, 1, ranks, how, KILL)
        stack.callback(first.terminate)  # torchrun ends its ranks
        stack.callback(second.terminate)
        _, errors = second.communicate(timeout=SECONDS)
        if "Signal 9 (SIGKILL)" not in errors:
            raise SystemExit(f"the second group ended before it was killed:\n{errors[-4000:]}")
        replacement = start(lighthouse, 1, ranks, how)
        stack.callback(replacement.terminate)
        return result(first), result(replacement)


def main(names: tuple[str, ...]) -> None:
    """Print what was seen; the exit status is 1 if something is not as it should be."""
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torchtitan", "torchft", "torch")))
    good = True
    for name in names:
        began = time.monotonic()
        survivor, replacement = killed_and_back(*JOBS[name])
        alone = sum(groups == 1 for _, groups, _ in survivor["steps"])
        discarded = sum(not committed for *_, committed in survivor["steps"])
        joined, last = replacement["steps"][0][0], replacement["steps"][-1][0]
        equal = survivor["weights"] == replacement["weights"] and last == survivor["steps"][-1][0]
        print(
            f"{name}: the survivor went on alone for {alone} steps, {discarded} discarded; the replacement joined at "
            f"step {joined}; weights of both after step {last} {survivor['weights']} and {replacement['weights']}, "
            f"equal: {equal}; {time.monotonic() - began:.0f} s",
            flush=True,
        )
        good = good and equal and alone > 0 and joined > KILL
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or tuple(JOBS))
