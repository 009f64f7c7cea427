"""Two replica groups of `fault_tolerant.py`, one of them killed and started again: two_groups.py [JOB ...]."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "torchft"))
from group_jobs import killed_and_back

STEPS, KILL = 6, 3
JOBS = {
    "each step, 1 rank": (1, "sync"),
    "each step, 2 ranks": (2, "sync"),
    "DiLoCo, 2 ranks": (2, "diloco"),
    "LocalSGD, 2 ranks": (2, "local_sgd"),
}


def command(group: int, ranks: int, how: str, kill: int = 0) -> list[object]:
    launcher = f"-W ignore -m torch.distributed.run --standalone --nproc-per-node {ranks}"
    return [sys.executable, *launcher.split(), Path(__file__).with_name("fault_tolerant.py"), group, STEPS, how, kill]


def main(names: tuple[str, ...]) -> None:
    """Print what was seen; the exit status is 1 if something is not as it should be."""
    good = True
    for name in names:
        how = JOBS[name]
        survivor, replacement = killed_and_back(command(0, *how), command(1, *how, KILL), command(1, *how))
        alone = sum(groups == 1 for _, groups, _ in survivor["steps"])
        discarded = sum(not committed for *_, committed in survivor["steps"])
        joined, last = replacement["steps"][0][0], replacement["steps"][-1][0]
        equal = survivor["weights"] == replacement["weights"] and last == survivor["steps"][-1][0]
        print(
            f"{name}: the survivor went on alone for {alone} steps, {discarded} discarded; the replacement joined at "
            f"step {joined}; weights of both after step {last} {survivor['weights']} and {replacement['weights']}, "
            f"equal: {equal}",
            flush=True,
        )
        good = good and equal and alone > 0 and joined > KILL
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or tuple(JOBS))
