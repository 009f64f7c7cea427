"""TorchTitan's models as trainers of a reinforcement-learning run, while ranks are killed: equal weights to the bit.

    .venv/extras/titan/bin/python examples/stack/titan/trainers.py

Each job trains on the same batches, with the parallelisms of TorchTitan; each is done with and without a SIGKILL.
"""

import logging
import os
import random
import signal
import sys
from typing import Any

from holdfast.ft import Session
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness import LocalCluster
from holdfast.rl.config.run_config import RunConfig, TitanConfig, TrainerConfig
from holdfast.rl.data.episode import Episode, Group, Prompt
from holdfast.rl.data.replay_buffer import Batch, BufferState, StalenessRule
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import EncodedBatch
from holdfast.rl.trainers.training import Training

BATCHES, SHARDS, WORDS = 4, 4, 13
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
LLAMA = ModelSource(config={"model_type": "llama", **SIZES})
QWEN3 = ModelSource(config={"model_type": "qwen3", **SIZES, "head_dim": 8, "tie_word_embeddings": True})


def batch_of(step: int) -> Batch:
    """Three prompts with three answers each: a function of the step."""
    draw, groups = random.Random(step), []
    for number in range(3 * step, 3 * step + 3):
        prompt = Prompt(number=number, tokens=tuple(draw.choices(range(WORDS), k=draw.randint(1, 4))))
        episodes = []
        for reward in range(3):
            many = draw.randint(1, 5)
            drawn: dict[str, Any] = {"logprobs": (-2.5,) * many, "versions": (step,) * many, "mask": (True,) * many}
            tokens = tuple(draw.choices(range(WORDS), k=many))
            episodes.append(Episode(prompt=prompt, tokens=tokens, **drawn, reward=float(reward), finish="stop"))
        groups.append(Group(number=number, prompt=prompt, episodes=tuple(episodes)))
    return Batch(step=step, groups=tuple(groups), after=BufferState(rule=StalenessRule(groups=3), batch=step + 1))


def config_of(titan: TitanConfig, copies: int = 1) -> RunConfig:
    rates = {"rate": 0.01, "rate_warmup": 2, "rate_decay": 10}
    trainer = TrainerConfig(kind="titan", units=SHARDS, micro_batch=2, copies=copies, **rates)
    return RunConfig(steps=BATCHES, trainer=trainer, titan=titan)


def train(session: Session, config: RunConfig, source: ModelSource, killed: int) -> tuple[str, tuple[float, ...], int]:
    """The digest of the final weights under transformers' names, the losses that were committed here, the epochs."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    reports, epochs = list[Any](), list[int]()

    def take(step: int, over: Any) -> EncodedBatch:
        epochs.append(session.epoch or 0)
        if step == 2 and session.rank == killed and len(epochs) == step + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return EncodedBatch.of(batch_of(step))

    digest = Training(config, source, None, take, reports.append).run(session)
    return digest, tuple(each.figures["loss"] for each in reports), len(set(epochs))


def run(
    config: RunConfig, source: ModelSource, size: int, spares: int = 0, killed: int = -1
) -> tuple[str, tuple[float, ...]]:
    """The digest, alike on all ranks of a job, and the losses."""
    options = {"shards": SHARDS, "size": size, "min_size": 1}
    with LocalCluster(size, "shm", spares=spares, session=options) as ranks:
        job = ranks.start(train, config, source, killed)
        job.wait_for_spares()
        results = job.results(180.0)
    digests = {digest for digest, _, _ in results if digest}
    assert max(epochs for _, _, epochs in results) == (1 if killed < 0 else 2), "a kill begins another epoch"
    assert len(digests) == 1, f"the ranks differ: {digests}"
    return digests.pop(), max((losses for _, losses, _ in results), key=len)


JOBS: list[tuple[str, str, ModelSource, TitanConfig, dict[str, Any]]] = [
    ("llama3", "FSDP2, 1 rank", LLAMA, TitanConfig(), {"size": 1}),
    ("llama3", "FSDP2, 2 ranks, 1 killed, a spare", LLAMA, TitanConfig(), {"size": 2, "spares": 1, "killed": 1}),
    ("llama3", "FSDP2, 3 ranks, 1 killed", LLAMA, TitanConfig(), {"size": 3, "killed": 0}),
    ("llama3", "HSDP 2 x 2, 1 killed, a spare", LLAMA, TitanConfig(data_parallel_replicate_degree=2),
     {"size": 4, "spares": 1, "killed": 3, "copies": 0}),
    ("llama3", "TP 2", LLAMA, TitanConfig(tensor_parallel_degree=2), {"size": 2}),
    ("llama3", "TP 2 x FSDP2 2, 1 killed, a spare", LLAMA, TitanConfig(tensor_parallel_degree=2),
     {"size": 4, "spares": 1, "killed": 1}),
    ("qwen3", "FSDP2, 1 rank", QWEN3, TitanConfig(activation_checkpoint="full"), {"size": 1}),
    ("qwen3", "FSDP2, 3 ranks, 1 killed, a spare", QWEN3, TitanConfig(), {"size": 3, "spares": 1, "killed": 2}),
]  # fmt: skip


def main() -> bool:
    """Print the table; False if weights that must be equal are not."""
    zygote().preload("torchtitan.models.llama3", "torchtitan.models.qwen3", "transformers.models.llama.modeling_llama")
    row = "{:<8} {:<36} {:>18} {}".format
    print(row("model", "parallelism", "last loss", "weights"))
    seen, good = dict[tuple[str, bool], str](), True
    wanted = sys.argv[1:]  # words of titles; none: all
    for model, title, source, titan, how in JOBS:
        if wanted and f"{model} {title}" not in wanted:
            continue
        copies = how.pop("copies", 1)
        digest, losses = run(config_of(titan, copies), source, **how)
        same = seen.setdefault((model, titan.tensor_parallel_degree > 1), digest) == digest
        good = good and same
        print(row(model, title, f"{losses[-1]:.15f}", digest if same else f"{digest} DIFFERS"), flush=True)
    return good


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
