"""TorchTitan's own Trainer over `init_process_group("holdfast")`: a job of torchrun, or of `holdfast run`.

    torchrun --nproc-per-node 2 own_trainer.py fsdp|hsdp|tp holdfast|gloo

On a GPU leave `cpu.patch()` out, and use TorchTitan's `torchtitan.train` with the line that makes the process group.
"""

# ruff: noqa: E402  (torchtitan reads what `cpu.patch` changes when it is imported)

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cpu
import torch
import torch.distributed as dist
import xxhash

import holdfast.comms.torchdist  # noqa: F401  (registers the backend "holdfast")

cpu.patch()

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

WORDS = 64
DEGREES = {
    "fsdp": {"data_parallel_shard_degree": -1},
    "hsdp": {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": 2},
    "tp": {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2},
}


class NoTokenizer(BaseTokenizer):
    """The rows are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **_: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **_: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Counting(BaseDataLoader):
    """Rows that count up from a random number, for the rank's part of each batch; needs no download."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self._random = torch.Generator().manual_seed(dp_rank)
        self._rows, self._length = local_batch_size, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            starts = torch.randint(0, WORDS, (self._rows, 1), generator=self._random)
            tokens = (starts + torch.arange(self._length + 1)) % WORDS
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"random": self._random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.set_state(state["random"])


def digest_of(trainer: Any) -> str:
    """A checksum of every bit of the weights, alike on all ranks."""
    digest = xxhash.xxh3_128()
    for part in trainer.model_parts:
        for parameter in part.parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.detach().contiguous().numpy().data)
    return digest.hexdigest()


def config(how: str, folder: str) -> Any:
    """Llama 3's debug model as TorchTitan's registry has it, but for the vocabulary and the kernel of attention."""
    spec = model_registry("debugmodel")
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = WORDS
    for layer in spec.model.layers:  # flex and varlen attention are for GPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4, seq_len=32, steps=6, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **DEGREES[how]),
    )


def main(how: str, backend: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(backend)  # TorchTitan takes the group that is there
    with tempfile.TemporaryDirectory() as folder:
        trainer = config(how, folder).build()
        if backend == "gloo":
            cpu.sum_only(trainer.model_parts)
        losses: list[float] = []
        trainer.metrics_processor.log = lambda step, mean, *more, **named: losses.append(float(mean))
        trainer.train()
        digest = digest_of(trainer)
        trainer.close()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, digest)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "weights": sorted(set(everywhere))}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
