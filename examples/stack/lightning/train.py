"""Lightning's Trainer on two ranks over holdfast: `DDPStrategy(process_group_backend="holdfast")`. A job of torchrun.

torchrun --nproc-per-node 2 train.py lightning --directory saved [--backend gloo] [--kill-step 5]
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast.comms.torchdist  # noqa: F401  (registers the backend "holdfast")

sys.path.append(str(Path(__file__).parents[1]))
from restarted_program import arguments, end_once, report


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


class EndOnce(Callback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        end_once(trainer.global_step, self._step)


def main() -> None:
    asked = arguments("lightning")
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=asked.backend),
        max_steps=asked.steps,
        callbacks=[ModelCheckpoint(asked.directory, every_n_train_steps=2, save_last=True), EndOnce(asked.kill_step)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path(asked.directory) / "last.ckpt"
    model, batches = Classifier(), DataLoader(TensorDataset(torch.zeros(2 * asked.steps)))
    trainer.fit(model, batches, ckpt_path=str(last) if last.exists() else None)
    report(model, model.losses)


if __name__ == "__main__":
    main()
