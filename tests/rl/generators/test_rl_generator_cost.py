"""Figures of a generator beside what they are compared with, measured in turns on one thread."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="generators need transformers: pip install 'holdfast[rl]'")

from holdfast.rl.data.episode import SamplingRequest
from holdfast.rl.generators.batches import ContinuousBatch, RunningRequest
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.store import WeightStore
from support.rl.small_batches import tiny_llama


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


DEMO = tiny_llama(14, layers=2, width=64)


def test_a_request_costs_no_more_than_a_loop_without_cache_and_seeds() -> None:
    """64 samples of two tokens, with a seed each. The plain loop runs each prompt once, and draws all at once."""
    model = DEMO.build()
    prompts = torch.randint(14, (8, 6), generator=torch.Generator().manual_seed(0))
    rows = tuple(map(tuple, prompts.tolist()))
    asked = SamplingRequest(prompts=rows, samples=8, seeds=tuple(range(64)), max_new_tokens=2, temperature=1.0)
    random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def plain() -> None:
        logits = model(input_ids=prompts, logits_to_keep=1, use_cache=False).logits[:, -1].log_softmax(-1)
        first = torch.multinomial(logits.exp().repeat_interleave(8, 0), 1, generator=random)
        both = torch.cat([prompts.repeat_interleave(8, 0), first], 1)
        logits = model(input_ids=both, logits_to_keep=1, use_cache=False).logits[:, -1].log_softmax(-1)
        torch.multinomial(logits.exp(), 1, generator=random)

    def ours() -> None:
        batch = ContinuousBatch.of(RunningRequest(asked, lambda found: None))
        while batch.busy:
            batch.step(model, 0)

    turns = [(cpu_seconds(plain), cpu_seconds(ours)) for _ in range(60)][10:]
    one, other = (statistics.median(each) for each in zip(*turns, strict=True))
    print(f"\n64 samples: {other * 1e3:.2f} ms of CPU, a plain loop {one * 1e3:.2f} ms")
    assert other < 1.3 * one * 1.5, "1.3, and half as much for a busy machine"


@pytest.mark.thorough
def test_the_time_from_a_published_version_to_serving_it(tmp_path: Any) -> None:
    """10 million parameters, whole tensors, on one host: beside the time of a plain copy of as many bytes, twice."""
    source = ModelSource(
        config={
            "model_type": "llama",
            "vocab_size": 1000,
            "hidden_size": 320,
            "intermediate_size": 900,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "max_position_embeddings": 64,
        }
    )
    model = source.build()
    nbytes = sum(each.nbytes for each in model.state_dict().values())
    with WeightStore(f"sqlite://{tmp_path}/weights.sqlite", replicas=1, reserve=nbytes) as store:
        store.publish(0, model.state_dict())
        generator = TransformersGenerator(source, store.url)
        try:
            asyncio.run(generator.update(0))
            seconds = []
            for version in range(1, 12):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.001)
                began = time.perf_counter()
                store.publish(version, model.state_dict())
                while generator.version != version:
                    time.sleep(0.0005)
                seconds.append(time.perf_counter() - began)
        finally:
            generator.close()
    found = statistics.median(seconds[3:])
    print(f"\ncommitted step to served, {nbytes / 4e6:.1f}M parameters: {found * 1e3:.1f} ms (median of 8)")
    assert found < 5.0
