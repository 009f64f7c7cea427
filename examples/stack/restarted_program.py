"""What the trainers of `restarted_job.py` share: their arguments, the death of a rank, and the report at the end."""

import argparse
import hashlib
import json
import os
import signal
from typing import NoReturn

import torch
import torch.distributed as dist

RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def arguments(*trainers: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=trainers)
    parser.add_argument("--backend", default="holdfast", choices=("holdfast", "gloo"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--directory", required=True, help="where checkpoints lie")
    parser.add_argument("--kill-step", type=int, default=0, help="rank 1 ends itself with SIGKILL after it, once")
    return parser.parse_args()


def end_once(step: int, kill_step: int) -> None:
    """SIGKILL to rank 1 after `kill_step`; not in a job that was restarted after it."""
    if not RESTARTS and dist.get_rank() == 1 and step == kill_step:
        os.kill(os.getpid(), signal.SIGKILL)


def report(model: torch.nn.Module, losses: list[float]) -> NoReturn:
    """End this process; that of rank 0 prints a line of JSON, with a checksum of the weights of each rank."""
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, hashlib.sha256(weights).hexdigest()[:12])
    if dist.get_rank() == 0:
        backend = type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))).__module__
        said = {"weights": everywhere, "losses": losses, "backend": backend, "restarts": RESTARTS}
        print(json.dumps(said), flush=True)
    dist.barrier()
    # torch 2.13's gloo may deadlock at the end: DDP's reducer frees the group while it holds the interpreter lock, and
    # joins a thread of the group that waits for this lock to free its last op.
    os._exit(0)
