"""The frame of each example: a process group over holdfast or gloo, and a report at the end. A rank may kill itself."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from small_model import fingerprint
from transformers import TrainerCallback

import holdfast.comms.torchdist  # noqa: F401  (registers the backend "holdfast")


def arguments(steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="holdfast", choices=("holdfast", "gloo"))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--directory", required=True, help="where checkpoints lie")
    parser.add_argument(
        "--kill-step", type=int, default=0, help="rank 1 ends itself with SIGKILL after this step, once"
    )
    return parser.parse_args()


def options(asked: argparse.Namespace) -> dict[str, Any]:
    """Arguments of any of transformers' Trainers: on the CPU, a checkpoint every second step, nothing else written."""
    return {
        "output_dir": asked.directory,
        "use_cpu": True,
        "max_steps": asked.steps,
        "logging_steps": 1,
        "save_steps": 2,
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "bf16": False,
        "seed": 0,
    }


def end_once(step: int, kill_step: int) -> None:
    """SIGKILL to rank 1 after `kill_step`; not in a job that was restarted after it."""
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and dist.get_rank() == 1 and step == kill_step:
        os.kill(os.getpid(), signal.SIGKILL)


class KillOnce(TrainerCallback):
    """`end_once` at the end of a step, before its checkpoint is written."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        end_once(state.global_step, self._step)


def begin(backend: str) -> None:
    """Before the first use of accelerate: it takes the process group that is there."""
    torch.set_num_threads(1)
    dist.init_process_group(backend)


def train(trainer: Any, asked: argparse.Namespace) -> None:
    """Train, from the newest checkpoint if there is one; rank 0 prints a line of JSON."""
    from transformers.trainer_utils import get_last_checkpoint

    began = time.perf_counter()
    trainer.add_callback(KillOnce(asked.kill_step))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(asked.directory))
    logs = [each for each in trainer.state.log_history if "loss" in each]
    report(trainer.model, asked, [each["loss"] for each in logs], time.perf_counter() - began)


def report(model: torch.nn.Module, asked: argparse.Namespace, losses: list[float], seconds: float) -> None:
    """Print what the job came to, and end this process; collective."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, fingerprint(model))
    if dist.get_rank() == 0:
        backend = type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))).__module__
        said = {"weights": everywhere, "losses": losses, "seconds": round(seconds, 2), "backend": backend}
        said["restarts"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        print(json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # torch 2.13's gloo may deadlock at the end: DDP's reducer frees the group while it holds the interpreter lock, and
    # joins a thread of the group that waits for this lock to free its last op.
    sys.stdout.flush()
    os._exit(0)
