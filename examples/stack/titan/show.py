"""Runs TorchTitan both ways, its models as trainers and its own Trainer, and prints what was seen: make titan."""

import sys
from pathlib import Path

import trainers

sys.path.append(str(Path(__file__).parents[1]))
from restarted_job import torchrun

JOBS = {"fsdp": ("FSDP2", 2), "hsdp": ("HSDP", 4), "tp": ("TP 2", 2)}


def main() -> None:
    """Print both tables; the exit status is 1 if weights that must be equal are not."""
    print("Its own Trainer over init_process_group: 6 steps of llama3_debugmodel\n")
    row = "{:<12} {:>6} {:>10}  {:<34} {}".format
    print(row("parallelism", "ranks", "last loss", "weights over holdfast", "equal to gloo"))
    good = True
    for how, (title, ranks) in JOBS.items():
        program = Path(__file__).with_name("own_trainer.py")
        ours, gloo = (torchrun(program, how, backend, ranks=ranks) for backend in ("holdfast", "gloo"))
        same = ours["weights"] == gloo["weights"] and len(ours["weights"]) == 1
        good = good and same
        print(row(title, ranks, f"{ours['losses'][-1]:.5f}", ours["weights"][0], "yes" if same else "NO"), flush=True)
    print("\nIts models as trainers of a run, under a session: equal weights for each model and degree of TP\n")
    raise SystemExit(0 if trainers.main() and good else 1)


if __name__ == "__main__":
    main()
