"""A vLLM replica in an interpreter of its own draws what transformers would, and never with a mixture of weights."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

pytest.importorskip("transformers", reason="generators need transformers: pip install 'holdfast[rl]'")

from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.actors.errors import ActorDied, EndpointFailed
from holdfast.rl.config.named_code import ExtraNotInstalled, extra_python
from holdfast.rl.config.run_config import GeneratorConfig, RunConfig
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.vllm.vllm_generator import FILES, VllmGenerator
from holdfast.rl.telemetry import WorkReport
from holdfast.store import WeightStore
from support.event_loop import until
from support.rl.small_batches import full_logprobs, likeliest_tokens, tiny_llama

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.2}
SMALL = {**tiny_llama(40, layers=2, positions=64).config, **WIDE}
PROMPTS = ((3, 4, 5), (6,), (7, 8, 9, 10), (11, 12))
CALL = 200.0
"""Seconds that a call may take on a busy machine."""


@pytest.fixture
def python() -> str:
    """The interpreter that has vLLM."""
    try:
        return str(extra_python("vllm"))
    except ExtraNotInstalled:
        pytest.skip("vllm is not installed: make extra-vllm")


class Trainer:
    """A transformers model that changes, and publishes each version."""

    def __init__(self, store: WeightStore, kind: str = "llama", **config: Any) -> None:
        self.source = ModelSource(config=SMALL | {"model_type": kind} | config)
        self.model, self._store, self.version = self.source.build(), store, -1

    def publish(self, leave_out: str = "") -> int:
        """Change all weights, and publish them; without one tensor, if it is named."""
        self.version += 1
        torch.manual_seed(self.version)
        with torch.no_grad():
            for each in self.model.parameters():
                each.add_(torch.randn_like(each) * 0.1)
        state = self.model.state_dict()
        self._store.publish(self.version, {name: each for name, each in state.items() if name != leave_out})
        return self.version


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # another interpreter cannot import it


class WatchedGenerator(VllmGenerator):
    """Tells how many samples it draws."""

    async def running(self) -> int:
        return len(self._running)


@asynccontextmanager
async def replica(
    python: str, store: WeightStore, trainer: Trainer, reader: bool = False, **fields: Any
) -> AsyncIterator[Any]:
    async with LocalEngine() as engine:
        chosen = RunConfig(generator=GeneratorConfig(timeout=CALL / 2, cache=0.05, **fields))
        yield await engine.start("vllm", WatchedGenerator, trainer.source, store.url, chosen, reader, python=python)


def request(*prompts: tuple[int, ...], **more: Any) -> SamplingRequest:
    chosen = {"samples": 1, "max_new_tokens": 12, "temperature": 0.0, **more}
    return SamplingRequest(prompts=prompts, seeds=tuple(range(len(prompts) * chosen["samples"])), **chosen)


async def check_like_transformers(process: Any, trainer: Trainer) -> None:
    """Greedy tokens are equal; drawn tokens have the log-probs that transformers gives them."""
    found: list[Completion] = await process.call("generate", request(*PROMPTS), timeout=CALL)
    for prompt, each in zip(PROMPTS, found, strict=True):
        assert each.tokens == likeliest_tokens(trainer.model, prompt, 12)
    drawn: list[Completion] = await process.call(
        "generate", request(*PROMPTS, samples=3, temperature=0.7, version=trainer.version), timeout=CALL
    )
    assert len({each.tokens for each in drawn}) > len(PROMPTS)
    for index, each in enumerate(drawn):
        wanted = full_logprobs(trainer.model, PROMPTS[index // 3], each.tokens, 0.7)
        assert torch.allclose(torch.tensor(each.logprobs), wanted, atol=1e-4)
        assert (each.versions, each.finish) == ((trainer.version,) * 12, "length")


async def check_versions(process: Any, trainer: Trainer) -> None:
    """Each version is drawn from as by transformers, and a sample ends at a token that ends it."""
    for _ in range(3):
        assert await process.call("update", trainer.publish(), timeout=CALL) == trainer.version
        await check_like_transformers(process, trainer)
    stop = likeliest_tokens(trainer.model, PROMPTS[0], 12)[4]
    (ended,) = await process.call("generate", request(*PROMPTS[:1], stop=(stop,)), timeout=CALL)
    assert (ended.tokens[-1], ended.finish) == (stop, "stop")


async def check_an_update_of_running_samples(process: Any, trainer: Trainer, on_update: str) -> None:
    """The new version draws their next tokens, or those after their end. The work is recorded."""
    old = trainer.version
    running = asyncio.create_task(process.call("generate", request(*PROMPTS, max_new_tokens=2000), timeout=CALL))
    while await process.call("running", timeout=CALL) < len(PROMPTS):
        await asyncio.sleep(0.01)
    await process.call("generate", request(*PROMPTS, max_new_tokens=5), timeout=CALL)
    new = await process.call("update", trainer.publish(), timeout=CALL)
    for each in await running:
        assert (len(each.tokens), each.finish) == (2000, "length")
        if on_update in ("keep", "abort"):
            assert (each.versions[0], each.versions[-1]) == (old, new)
            assert list(each.versions) == sorted(each.versions)
        else:
            assert each.versions == (old,) * 2000
    (after, *_) = await process.call("generate", request(*PROMPTS, max_new_tokens=5), timeout=CALL)
    assert (after.tokens, after.versions) == (likeliest_tokens(trainer.model, PROMPTS[0], 5), (new,) * 5)
    report: WorkReport = await process.call("work", timeout=CALL)
    done = [(each.what, each.number) for each in report.spans]
    assert list(dict.fromkeys(done)) == [(what, each) for each in range(new + 1) for what in ("update", "generate")]
    assert done[-1] == ("generate", new)
    spent = sum(each.cpu for each in report.spans)
    assert 0.1 < spent < report.cpu, "vLLM's process does the work, and its time counts"


async def check_a_failed_update(process: Any, trainer: Trainer) -> None:
    """Nothing is drawn until a whole update worked; and without its engine the process ends."""
    running = asyncio.create_task(
        process.call("generate", request(*PROMPTS, max_new_tokens=2000, samples=2, temperature=1.0), timeout=CALL)
    )
    broken = trainer.publish(leave_out="model.norm.weight")
    with pytest.raises(EndpointFailed, match=f"UpdateFailed.*version {broken}.*model.norm.weight"):
        await process.call("update", broken, timeout=CALL)
    await asyncio.wait([running])
    assert running.exception() is None or "GeneratorNotReady" in str(running.exception())
    assert await process.call("running", timeout=CALL) == 0
    with pytest.raises(EndpointFailed, match=r"GeneratorNotReady.*its last update failed"):
        await process.call("generate", request(*PROMPTS), timeout=CALL)
    await process.call("update", trainer.publish(), timeout=CALL)
    await check_like_transformers(process, trainer)
    with pytest.raises(EndpointFailed, match=r"VersionGone.*version 0"):
        await process.call("generate", request(*PROMPTS, version=0), timeout=CALL)
    with pytest.raises(EndpointFailed, match=r"BadRequest.*2049 tokens"):
        await process.call("generate", request((1,) * 5, max_new_tokens=2044), timeout=CALL)

    (engine,) = (each for each in psutil.Process(process.pid).children() if "EngineCore" in str(each.cmdline()))
    engine.kill()
    with pytest.raises(ActorDied):
        await process.call("generate", request(*PROMPTS), timeout=CALL)


@pytest.mark.parametrize("kind, on_update", [("qwen2", "wait"), ("qwen3", "abort")])
async def test_each_version_is_drawn_from_as_by_transformers_and_updates_treat_running_samples_as_told(
    kind: str, on_update: str, python: str, store: WeightStore
) -> None:
    trainer = Trainer(store, kind, tie_word_embeddings=True, max_position_embeddings=2048)
    async with replica(python, store, trainer, on_update=on_update) as process:
        with pytest.raises(EndpointFailed, match=r"GeneratorNotReady.*no version"):
            await process.call("generate", request(*PROMPTS), timeout=CALL)
        await check_versions(process, trainer)
        await check_an_update_of_running_samples(process, trainer, on_update)
        if on_update == "abort":
            await check_a_failed_update(process, trainer)


async def test_samples_run_on_over_an_update_and_no_process_of_a_killed_replica_is_left(
    python: str, store: WeightStore
) -> None:
    trainer = Trainer(store, "llama", tie_word_embeddings=False, max_position_embeddings=2048)

    async with replica(python, store, trainer, on_update="keep") as process:
        await check_versions(process, trainer)
        await check_an_update_of_running_samples(process, trainer, "keep")
        below = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    assert below
    await until(lambda: not any(each.is_running() for each in below))


async def test_a_reader_serves_what_switches_commit(python: str, store: WeightStore) -> None:
    """Running samples get it too, and the next request draws from nothing before it."""
    trainer = Trainer(store, tie_word_embeddings=False, max_position_embeddings=2048)
    async with replica(python, store, trainer, reader=True) as process:
        old = trainer.publish()
        assert (await asyncio.to_thread(store.switch, old)).committed
        await check_like_transformers(process, trainer)
        running = asyncio.create_task(process.call("generate", request(*PROMPTS, max_new_tokens=2000), timeout=CALL))
        while await process.call("running", timeout=CALL) < len(PROMPTS):
            await asyncio.sleep(0.01)
        new = trainer.publish()
        assert (await asyncio.to_thread(store.switch, new)).committed
        assert {(each.versions[0], each.versions[-1]) for each in await running} == {(old, new)}
        trainer.publish()
        trainer.publish()
        assert (await asyncio.to_thread(store.switch, trainer.version)).committed
        await check_like_transformers(process, trainer)


@pytest.mark.parametrize("killed", [False, True])
async def test_two_ranks_draw_as_one_and_leave_no_file(
    python: str, store: WeightStore, short: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(short))  # other replicas of this machine have theirs elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    trainer = Trainer(store, tie_word_embeddings=False)
    async with replica(python, store, trainer, tensor_parallel=2) as process:
        await process.call("update", trainer.publish(), timeout=CALL)
        (files,) = short.glob(f"{FILES}*")
        (meeting,) = (files / "met").iterdir()
        shared = list(Path("/dev/shm").glob(f"{meeting.name}*"))
        # On a processor without AVX-512 its ranks communicate over gloo.
        expected = {"cpushm_0", "cpushm_1"} if "avx512f" in Path("/proc/cpuinfo").read_text() else set()
        assert {path.name.split("-")[-1] for path in shared} >= expected
        if killed:
            process.kill()
        else:
            await check_versions(process, trainer)
    assert not [path for path in (files, *shared) if path.exists()]
