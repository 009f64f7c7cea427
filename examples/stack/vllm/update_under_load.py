"""Update a vLLM replica twenty times while it draws, kill it half-way, and compare its tokens with transformers'.

`make vllm` runs it, in this project's environment; the replica runs in that of `make extra-vllm`, or another one's
interpreter: update_under_load.py [PYTHON].
"""

import asyncio
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.actors.service import Service, ServiceOptions
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import GeneratorConfig, RunConfig
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.data.prompts import ARITHMETIC_CHARACTERS, CharacterTokenizer, arithmetic_held_out
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.vllm.vllm_generator import VllmGenerator
from holdfast.store import WeightStore

UPDATES, KILLED_AFTER, TOKENS = 20, 10, 20
SECONDS = 600.0
"""The limit of each call."""

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(ARITHMETIC_CHARACTERS)}
SOURCE = ModelSource(config={"model_type": "llama", **SIZES, "initializer_range": 0.2})
PROMPTS = tuple(tuple(CharacterTokenizer().encode(each.prompt)) for each in arithmetic_held_out()[:16])


async def draw(service: Service, drawn: list[Completion], errors: list[str]) -> None:
    """Draw long completions all the time."""
    for seed in itertools.count(0, len(PROMPTS)):
        seeds = tuple(range(seed, seed + len(PROMPTS)))
        request = SamplingRequest(prompts=PROMPTS, samples=1, seeds=seeds, max_new_tokens=100, temperature=1.0)
        try:
            drawn += await service.generate.route(request)
        except HoldfastError as error:
            errors.append(f"{type(error).__name__}: {error}")


@torch.no_grad()
def greedy(model: Any) -> list[tuple[int, ...]]:
    """What transformers says is likeliest, token by token."""
    tokens = torch.tensor(PROMPTS)
    for _ in range(TOKENS):
        tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return [tuple(each) for each in tokens[:, len(PROMPTS[0]) :].tolist()]


@torch.no_grad()
def change(model: torch.nn.Module, version: int) -> None:
    torch.manual_seed(version)
    for each in model.parameters():
        each.add_(torch.randn_like(each) * 0.02)


async def main(interpreter: str) -> None:
    model, python = SOURCE.build(), extra_python("vllm", interpreter)
    drawn, errors, equal, seconds = list[Completion](), list[str](), list[bool](), list[float]()
    with tempfile.TemporaryDirectory() as folder, WeightStore(f"sqlite://{folder}/weights.sqlite", replicas=1) as store:
        store.publish(0, model.state_dict())
        async with LocalEngine() as engine:
            config = RunConfig(generator=GeneratorConfig(cache=0.1, timeout=SECONDS))
            spec = ServiceOptions(VllmGenerator, name="vllm", engine=engine, python=str(python))
            service = await spec.as_service(SOURCE, store.url, config, True)
            drawing = asyncio.create_task(draw(service, drawn, errors))
            for version in range(UPDATES + 1):
                if version:
                    change(model, version)
                    await asyncio.to_thread(store.publish, version, model.state_dict())
                began = time.monotonic()
                assert (await asyncio.to_thread(store.switch, version)).committed
                for result in await service.update.fanout(version):
                    result.get()
                seconds.append(time.monotonic() - began)
                greedily = {"max_new_tokens": TOKENS, "temperature": 0.0, "version": version}
                request = SamplingRequest(prompts=PROMPTS, samples=1, seeds=(0,) * len(PROMPTS), **greedily)
                found: list[Completion] = await service.generate.route(request)
                equal.append([each.tokens for each in found] == greedy(model))
                assert all(set(each.versions) == {version} for each in found)
                if version == KILLED_AFTER:
                    os.kill(service.status().replicas[0].pid, signal.SIGKILL)
                    began = time.monotonic()
                    await service.generate.route(request)
                    print(f"killed; its successor answers after {time.monotonic() - began:.1f} s")
            drawing.cancel()
            await asyncio.wait([drawing])
            await service.close()
    mixed = sum(len(set(each.versions)) > 1 for each in drawn)
    print(
        f"greedy tokens equal to transformers' before and after each of {UPDATES} updates: {all(equal)}; an update "
        f"under load takes {statistics.median(seconds[1:]) * 1e3:.0f} ms (median); {len(drawn):,} completions were "
        f"drawn meanwhile, {mixed:,} of them with tokens of several versions"
    )
    print(*errors, sep="\n")
    if errors or not all(equal):
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main("".join(sys.argv[1:2])))
