"""TRL's GRPOTrainer on two ranks over holdfast: a job of torchrun.

torchrun --nproc-per-node 2 grpo.py --directory saved [--backend gloo] [--kill-step 5]
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from job import arguments, begin, options, train
from small_model import small_llama, sums, tokenizer
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right answer, a tenth for each right digit."""
    pairs = zip(completions, answer, strict=True)
    return [float(said[:2] == right) + 0.1 * sum(map(str.__eq__, said, right)) for said, right in pairs]


def main() -> None:
    asked = arguments(steps=20)
    begin(asked.backend)
    config = GRPOConfig(
        **options(asked),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=2,
        learning_rate=1e-3,
        beta=0.0,
        ddp_find_unused_parameters=False,
    )
    trainer = GRPOTrainer(
        model=small_llama(),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(sums(512)),
        processing_class=tokenizer(),
    )
    train(trainer, asked)


if __name__ == "__main__":
    main()
