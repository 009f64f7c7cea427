"""One replica group of TorchTitan's FaultTolerantTrainer: TorchFT averages the groups' gradients over holdfast.

    TORCHFT_LIGHTHOUSE=http://... torchrun --nproc-per-node 1 fault_tolerant.py GROUP STEPS sync|diloco|local_sgd KILL

It trains until two groups have taken part in STEPS steps since both of them were there. It ends itself with SIGKILL
before the commit of a step, after KILL such steps, unless that is 0. At the end rank 0 prints a line of JSON.
"""

# ruff: noqa: E402  (torchtitan reads what `cpu.patch` changes when it is imported)

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cpu
import torch
import torch.distributed as dist
import torchft

cpu.patch()

from own_trainer import config, digest_of
from torchft import Manager
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

sys.path.append(str(Path(__file__).parents[1] / "torchft"))
from holdfast_group import ProcessGroupHoldfast

LOCAL_STEPS = 2  # to a step of DiLoCo or LocalSGD
ALONE = 0.3  # seconds that a group which is alone leaves the processors, each step, to the other that starts


def holdfast_manager(**options: Any) -> Manager:
    """TorchFT's Manager as TorchTitan makes it, but over holdfast, and with another way to share the state."""
    options["pg"] = ProcessGroupHoldfast()
    # Else TorchFT reads the model's state in a thread beside the forward pass, and FSDP2 ends the gathered parameters.
    options["use_async_quorum"] = False
    # Else the ranks of a group take their first state from different groups, and `state_dict()`, in which the ranks
    # gather attention's weights, is called on some of them alone. Here all begin with the same seed.
    options["init_sync"] = False
    return Manager(**options)


torchft.Manager = holdfast_manager


class Optimizers(TorchFTOptimizersContainer):
    """Gives a newcomer the learning rate of now.

    Why: TorchTitan reads the optimizer's state once and keeps it; the tensors in it change with the training, the
    learning rate does not, so a newcomer would take its first step with that of step 0. Until: it is read anew.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTOptimizersContainer.Config):
        pass

    def state_dict(self) -> dict[str, Any]:
        self.init_cache_state_dict()
        return super().state_dict()


class Trainer(FaultTolerantTrainer):
    """Ends when two groups have taken part in `together` steps since both of them were there."""

    def __init__(self, config: FaultTolerantTrainer.Config, together: int, kill: int) -> None:
        super().__init__(config)
        self._together = together
        self._met: int | None = None
        self.steps: list[tuple[int, int, bool]] = []  # number, groups that took part, whether it was committed
        manager = self.ft_manager.manager
        commit = manager.should_commit

        def should_commit(*arguments: Any, **options: Any) -> bool:
            step, groups = manager.current_step(), manager.num_participants()
            if groups != 2:
                self._met = None
                time.sleep(ALONE)
            elif self._met is None:
                self._met = step
            if kill and self._met is not None and step - self._met >= kill:
                os.kill(os.getpid(), signal.SIGKILL)
            committed = bool(commit(*arguments, **options))
            self.steps.append((step, groups, committed))
            return committed

        manager.should_commit = should_commit

    def should_continue_training(self) -> bool:
        return self._met is None or self.ft_manager.manager.current_step() - self._met < self._together


def fault_tolerant(group: int, together: int, how: str, kill: int, folder: str) -> Trainer:
    plain = config("fsdp", folder)
    settings = {each.name: getattr(plain, each.name) for each in fields(plain)} | {
        "optimizer": Optimizers.Config(param_groups=plain.optimizer.param_groups),
        "checkpoint": TorchFTCheckpointManager.Config(  # it registers the state that a newcomer gets
            enable=True, interval=1 << 30, enable_ft_dataloader_checkpoints=False, last_save_model_only=False
        ),
        "fault_tolerance": FaultTolerance(
            enable=True,
            replica_id=group,
            group_size=2,
            semi_sync_method=None if how == "sync" else how,
            sync_steps=LOCAL_STEPS,
        ),
    }
    settings["training"].steps = 1 << 20
    return Trainer(FaultTolerantTrainer.Config(**settings), together, kill)


def main(group: int, together: int, how: str, kill: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("holdfast")
    with tempfile.TemporaryDirectory() as folder:
        trainer = fault_tolerant(group, together, how, kill, folder)
        trainer.metrics_processor.log = lambda *values, **named: None
        trainer.train()
    weights = digest_of(trainer)
    if dist.get_rank() == 0:
        print(json.dumps({"weights": weights, "steps": trainer.steps}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
