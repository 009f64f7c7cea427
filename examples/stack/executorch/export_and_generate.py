"""A small model learns to add three digits, becomes a program of ExecuTorch, and the program adds them.

    make executorch

Training and the comparison run in holdfast's own environment; the export and the program in ExecuTorch's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from export import export_program

from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import parse_config
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.run.evaluation import held_out_prompts
from holdfast.rl.run.policy import policy_source, task_of, train

CONFIG = """
seed = 1
[model]
warmup_steps = 400
warmup_batch = 128
[sampling]
max_new_tokens = 2
"""

GENERATE = """
import sys
import torch
from executorch.runtime import Runtime

method = Runtime.get().load_program(sys.argv[1]).load_method("forward")
for line in sys.stdin:
    tokens = [int(each) for each in line.split()]
    for _ in range(2):
        tokens.append(int(method.execute([torch.tensor([tokens])])[0][0, -1].argmax()))
    print(*tokens, flush=True)
"""
"""All that a device needs: the program, and the greedy loop. No holdfast, no transformers."""


def trained(config: RunConfig, folder: Path) -> ModelSource:
    """A model after supervised steps on the arithmetic task, in a folder."""
    task = task_of(config)
    model = policy_source(config).build()
    began = time.perf_counter()
    loss = train(model, config.model, task.problems, task.tokenizer, config.seed)
    print(f"trained: {config.model.warmup_steps} steps in {time.perf_counter() - began:.0f} s, last loss {loss:.2f}")
    save_model(model, folder)
    return ModelSource(path=str(folder))


def main() -> int:
    """Train, export, generate; 0 if the program's answers are those of the model."""
    config = parse_config(CONFIG, "example")
    task = task_of(config)
    prompts = held_out_prompts(config, task, 50)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = trained(config, folder / "model")
        report = export_program(source, prompts, config.sampling, folder / "sum.pte")
        print(
            f"exported: {report.nbytes:,} bytes in {report.seconds:.0f} s, {report.delegated:.0%} in XNNPACK\n"
            f"compared: logits up to {report.largest:.1f} within {report.difference:.1e} of eager, the same answers "
            f"to {len(prompts)} held-out prompts"
        )
        asked = "\n".join(" ".join(map(str, each.tokens)) for each in prompts)
        done = subprocess.run(
            [extra_python("executorch"), "-c", GENERATE, folder / "sum.pte"],
            input=asked,
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    said = [task.tokenizer.decode([int(each) for each in line.split()]) for line in done.stdout.splitlines()]
    right = sum(text == prompt.text + prompt.answer for text, prompt in zip(said, prompts, strict=True))
    print(f"the program alone says {', '.join(said[:4])}: {right} of {len(prompts)} are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
