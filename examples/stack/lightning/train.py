"""Lightning's Trainer on two ranks over holdfast: `DDPStrategy(process_group_backend="holdfast")`. A job of torchrun.

torchrun --nproc-per-node 2 train.py lightning --directory saved [--backend gloo] [--kill-step 5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast.comms.torchdist  # noqa: F401  (registers the backend "holdfast")


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        # Drawn by the step: Lightning does not go on at the same sample in a job that was restarted.
        draw = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
        samples, classes = torch.randn(16, 16, generator=draw), torch.randint(4, (16,), generator=draw)
        loss = nn.functional.cross_entropy(self.net(samples), classes)
        self.log("loss", loss, sync_dist=True)  # an all_reduce of its own
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class KillOnce(Callback):  # type: ignore[misc]
    """SIGKILL to rank 1 after a step; not in a job that was restarted after it."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and trainer.global_rank == 1 and trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("lightning",))
    parser.add_argument("--backend", default="holdfast", choices=("holdfast", "gloo"))
    parser.add_argument("--directory", required=True, help="where checkpoints lie")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kill-step", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=asked.backend),
        max_steps=asked.steps,
        callbacks=[
            ModelCheckpoint(asked.directory, every_n_train_steps=2, save_last=True),
            KillOnce(asked.kill_step),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path(asked.directory) / "last.ckpt"
    model = Classifier()
    trainer.fit(
        model, DataLoader(TensorDataset(torch.zeros(2 * asked.steps))), ckpt_path=str(last) if last.exists() else None
    )
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, hashlib.sha256(weights).hexdigest()[:12])
    if trainer.is_global_zero:
        backend = type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))).__module__
        said = {"weights": everywhere, "losses": model.losses, "backend": backend}
        print(json.dumps(said | {"restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
