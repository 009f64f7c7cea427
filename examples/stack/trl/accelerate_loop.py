"""A loop of your own with Accelerate, on two ranks over holdfast: a job of torchrun.

torchrun --nproc-per-node 2 accelerate_loop.py --directory saved [--backend gloo] [--kill-step 5]
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from job import arguments, begin, end_once, report
from small_model import small_llama, sums, tokenizer
from torch.utils.data import DataLoader


def main() -> None:
    asked = arguments(steps=40)
    begin(asked.backend)
    words = tokenizer()

    def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
        return words([row["prompt"] + row["answer"] for row in rows], return_tensors="pt")["input_ids"]

    accelerator = Accelerator(cpu=True)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(sums(16 * 2 * asked.steps), batch_size=16, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved, losses, began, done = Path(asked.directory), list[float](), time.perf_counter(), 0
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
    report(accelerator.unwrap_model(model), asked, losses, time.perf_counter() - began)


if __name__ == "__main__":
    main()
