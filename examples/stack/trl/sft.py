"""TRL's SFTTrainer on two ranks over holdfast: a job of torchrun.

torchrun --nproc-per-node 2 sft.py --directory saved [--backend gloo] [--kill-step 5]
"""

from __future__ import annotations

from datasets import Dataset
from job import arguments, begin, options, train
from small_model import small_llama, sums, tokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    asked = arguments(steps=40)
    begin(asked.backend)
    texts = [{"text": each["prompt"] + each["answer"]} for each in sums(512)]
    config = SFTConfig(
        **options(asked),
        per_device_train_batch_size=16,
        max_length=16,
        learning_rate=2e-3,
        ddp_find_unused_parameters=False,
    )
    trainer = SFTTrainer(
        model=small_llama(), args=config, train_dataset=Dataset.from_list(texts), processing_class=tokenizer()
    )
    train(trainer, asked)


if __name__ == "__main__":
    main()
