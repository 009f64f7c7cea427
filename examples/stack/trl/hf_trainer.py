"""The Trainer of transformers on two ranks over holdfast; its Accelerate wraps the model in DDP. A job of torchrun.

torchrun --nproc-per-node 2 hf_trainer.py --directory saved [--backend gloo] [--kill-step 5]
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from job import arguments, begin, options, train
from small_model import small_llama, sums, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


def main() -> None:
    asked = arguments(steps=40)
    begin(asked.backend)
    words = tokenizer()

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": words(row["prompt"] + row["answer"])["input_ids"]}

    dataset = Dataset.from_list(sums(512)).map(tokens, remove_columns=["prompt", "answer"])
    config = TrainingArguments(
        **options(asked), per_device_train_batch_size=16, learning_rate=2e-3, ddp_find_unused_parameters=False
    )
    collator = DataCollatorForLanguageModeling(words, mlm=False)
    train(Trainer(model=small_llama(), args=config, train_dataset=dataset, data_collator=collator), asked)


if __name__ == "__main__":
    main()
