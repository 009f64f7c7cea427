"""The trainers of TRL and transformers, and a loop of your own with Accelerate, on two ranks over holdfast.

torchrun --nproc-per-node 2 train.py grpo|sft|trainer|loop --directory saved [--backend gloo] [--kill-step 5]
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from small_model import small_llama, sums, tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import holdfast.comms.torchdist  # noqa: F401  (registers the backend "holdfast")

sys.path.append(str(Path(__file__).parents[1]))
from restarted_program import arguments, end_once, report


def options(asked: argparse.Namespace) -> dict[str, Any]:
    """Arguments of any of transformers' Trainers: on the CPU, a checkpoint every second step, nothing else written."""
    quiet = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "ddp_find_unused_parameters": False}
    saved = {"output_dir": asked.directory, "logging_steps": 1, "save_steps": 2, "save_total_limit": 2}
    work = {"use_cpu": True, "bf16": False, "seed": 0, "max_steps": asked.steps, "per_device_train_batch_size": 16}
    return {**quiet, **saved, **work}


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right answer, a tenth for each right digit."""
    pairs = zip(completions, answer, strict=True)
    return [float(said[:2] == right) + 0.1 * sum(map(str.__eq__, said, right)) for said, right in pairs]


def grpo(asked: argparse.Namespace) -> Trainer:
    """TRL's GRPOTrainer."""
    config = GRPOConfig(**options(asked), num_generations=8, max_completion_length=2, learning_rate=1e-3, beta=0.0)
    given = {"model": small_llama(), "train_dataset": Dataset.from_list(sums(512)), "processing_class": tokenizer()}
    return GRPOTrainer(args=config, reward_funcs=reward, **given)


def sft(asked: argparse.Namespace) -> Trainer:
    """TRL's SFTTrainer."""
    texts = Dataset.from_list([{"text": each["prompt"] + each["answer"]} for each in sums(512)])
    config = SFTConfig(**options(asked), max_length=16, learning_rate=2e-3)
    return SFTTrainer(model=small_llama(), args=config, train_dataset=texts, processing_class=tokenizer())


def trainer(asked: argparse.Namespace) -> Trainer:
    """The Trainer of transformers; its Accelerate wraps the model in DDP."""
    words = tokenizer()
    texts = [each["prompt"] + each["answer"] for each in sums(512)]
    dataset = Dataset.from_list([{"input_ids": words(text)["input_ids"]} for text in texts])
    config = TrainingArguments(**options(asked), learning_rate=2e-3)
    collator = DataCollatorForLanguageModeling(words, mlm=False)
    return Trainer(model=small_llama(), args=config, data_collator=collator, train_dataset=dataset)


TRAINERS = {"grpo": grpo, "sft": sft, "trainer": trainer}


class EndOnce(TrainerCallback):
    """`end_once` at the end of a step, before its checkpoint is written."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        end_once(state.global_step, self._step)


def train(made: Any, asked: argparse.Namespace) -> tuple[torch.nn.Module, list[float]]:
    """Train, from the newest checkpoint if there is one."""
    made.add_callback(EndOnce(asked.kill_step))
    made.train(resume_from_checkpoint=get_last_checkpoint(asked.directory))
    return made.model, [each["loss"] for each in made.state.log_history if "loss" in each]


def loop(asked: argparse.Namespace) -> tuple[torch.nn.Module, list[float]]:
    """A loop of your own with Accelerate, from the newest checkpoint if there is one."""
    words = tokenizer()

    def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
        return words([row["prompt"] + row["answer"] for row in rows], return_tensors="pt")["input_ids"]

    accelerator = Accelerator(cpu=True)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(sums(16 * 2 * asked.steps), batch_size=16, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved, losses, done = Path(asked.directory), list[float](), 0
    if found := sorted(saved.glob("step-*"), key=os.path.getmtime):
        accelerator.load_state(str(found[-1]))
        done = int(found[-1].name.removeprefix("step-"))
    for number, tokens in enumerate(accelerator.skip_first_batches(loader, done), done + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        end_once(number, asked.kill_step)
        if number % 2 == 0:
            accelerator.save_state(str(saved / f"step-{number}"))
    return accelerator.unwrap_model(model), losses


def main() -> None:
    asked = arguments(*TRAINERS, "loop")
    torch.set_num_threads(1)
    dist.init_process_group(asked.backend)  # before the first use of accelerate: it takes the group that is there
    report(*(loop(asked) if asked.what == "loop" else train(TRAINERS[asked.what](asked), asked)))


if __name__ == "__main__":
    main()
