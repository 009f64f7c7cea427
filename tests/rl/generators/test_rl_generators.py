"""Completions are functions of request and weights; weights change between two tokens, and vLLM gets its slices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="generators need transformers: pip install 'holdfast[rl]'")

from holdfast.comms.errors import CorruptData
from holdfast.ft import faultpoints
from holdfast.rl.config.run_config import AlgorithmConfig, GeneratorConfig, RunConfig, Sampling, StoreConfig
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators import errors, transformers_generator
from holdfast.rl.generators.models import ModelMisfit, ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator, draw, uniforms
from holdfast.rl.generators.vllm.vllm_generator import draw_whole
from holdfast.store import StoreTimeout, WeightStore
from holdfast.store.follow.staging import CopiedStaging, StagingState
from support.rl.small_batches import full_logprobs, likeliest_tokens, tiny_llama
from support.waiting import eventually

VOCABULARY = 17
SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
LLAMA = {**tiny_llama(VOCABULARY, layers=2).config, "num_attention_heads": 4, "num_key_value_heads": 2}
SOURCES = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 4},
    "gpt2": SMALL | {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.3},
}
STRONG = {"initializer_range": 0.2}
"""So that random weights prefer some tokens."""


def source(kind: str = "llama", seed: int = 0) -> ModelSource:
    return ModelSource(config=SOURCES[kind] | STRONG, seed=seed)


def request(
    *prompts: tuple[int, ...], samples: int = 1, seed: int = 0, tokens: int = 5, **more: Any
) -> SamplingRequest:
    count = len(prompts) * samples
    settings = {"temperature": 1.0, "max_new_tokens": tokens} | more
    return SamplingRequest(prompts=prompts, samples=samples, seeds=tuple(range(seed, seed + count)), **settings)


Mode = Literal["synchronous", "asynchronous"]


def config_of(
    mode: Mode = "synchronous", slots: int = 32, timeout: float = 20.0, update: Any = "swap", cast: Any = "none"
) -> RunConfig:
    """What a generator takes of the configuration of a run."""
    return RunConfig(
        algorithm=AlgorithmConfig(mode=mode),
        sampling=Sampling(group=slots, batch=1),
        generator=GeneratorConfig(timeout=timeout, update=update),
        store=StoreConfig(cast=cast),
    )


Generators = Callable[..., TransformersGenerator]


@pytest.fixture
def generators() -> Iterator[Generators]:
    """Opens generators, and closes all of them; `between` is called between two tokens of any of them from now on."""
    with contextlib.ExitStack() as stack:

        def opened(*args: Any, between: Any = None, store: Any = None, reader: bool = False, **options: Any) -> Any:
            if between is not None:
                faultpoints.arm(lambda point, *_: between() if point == "generate.between_tokens" else None)
            generator = TransformersGenerator(*(args or (source(),)), store, config_of(**options), reader)
            return stack.enter_context(contextlib.closing(generator))

        yield opened
        faultpoints.arm(None)


def run(generator: TransformersGenerator, *requests: SamplingRequest) -> list[list[Completion]]:
    """The replies to requests that are all made at once."""

    async def all_of_them() -> list[list[Completion]]:
        return list(await asyncio.gather(*map(generator.generate, requests)))

    return asyncio.run(all_of_them())


# -- what a sample is


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("kind", SOURCES)
def test_logprobs_are_those_of_a_full_forward_pass(generators: Generators, kind: str, mode: Mode) -> None:
    generator = generators(source(kind), mode=mode, slots=3)
    asked = request((3,), (1, 2, 3, 4, 5), (7, 8, 9), samples=4, tokens=9, temperature=0.8, stop=(2, 5))
    model = source(kind).build()
    [found] = run(generator, asked)
    assert {each.finish for each in found} == {"stop", "length"}
    for number, each in enumerate(found):
        wanted = full_logprobs(model, asked.prompts[number // 4], each.tokens, 0.8).tolist()
        assert each.logprobs == pytest.approx(wanted, abs=1e-5)
        assert each.versions == (0,) * len(each.tokens)
        assert (each.finish == "stop") == (each.tokens[-1] in asked.stop)
        assert not set(each.tokens[:-1]) & set(asked.stop)
        assert len(each.tokens) <= 9


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9).map(tuple)
requests = st.builds(
    lambda prompts, samples, seed, tokens, temperature, stop: request(
        *prompts, samples=samples, seed=seed, tokens=tokens, temperature=temperature, stop=stop
    ),
    st.lists(prompts, min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 1000),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=2).map(tuple),
)


@settings(max_examples=12)
@given(asked=st.lists(requests, min_size=1, max_size=4), slots=st.integers(1, 6))
def test_a_running_batch_draws_what_each_request_alone_draws(asked: list[SamplingRequest], slots: int) -> None:
    """Whatever else runs, whichever slots are free: the same tokens, and log-probs that differ by rounding only."""
    with (
        contextlib.closing(TransformersGenerator(source())) as alone,
        contextlib.closing(TransformersGenerator(source(), None, config_of("asynchronous", slots))) as shared,
    ):
        for one, other in zip(run(shared, *asked), run(alone, *asked), strict=True):
            assert [each.tokens for each in one] == [each.tokens for each in other]
            assert [each.finish for each in one] == [each.finish for each in other]
            for mine, theirs in zip(one, other, strict=True):
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_a_fixed_batch_is_equal_to_the_bit_on_every_replica(generators: Generators) -> None:
    asked = [request((1, 2), (3, 4, 5), samples=4, seed=seed, tokens=6) for seed in (0, 100)]
    first = run(generators(), *asked)
    torch.rand(5)
    assert run(generators(), asked[1], asked[0]) == first[::-1]
    assert first[0] != first[1]


@given(
    logits=st.lists(st.lists(st.floats(-30, 30), min_size=6, max_size=6), min_size=1, max_size=4),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.1, 4.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_drawn_token_is_in_the_nucleus(logits: Any, top_p: float, temperature: float, seed: int) -> None:
    rows = torch.tensor(logits)
    count = len(rows)
    random = uniforms([seed] * count, 1)[:, 0]
    tokens, logprobs = draw(rows, torch.full((count,), temperature), torch.full((count,), top_p), random)
    whole = (rows / temperature).log_softmax(-1)
    assert torch.equal(logprobs, whole.gather(1, tokens.unsqueeze(1)).squeeze(1)), "of the whole distribution"
    for row, token in zip(whole.double().exp(), tokens.tolist(), strict=True):
        likelier = row[row > row[token]].sum()
        assert likelier < top_p + 1e-6
    greedy, _ = draw(rows, torch.zeros(count), torch.full((count,), top_p), random)
    assert torch.equal(greedy, rows.argmax(-1))


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4000, -1)
    tokens, _ = draw(logits, torch.ones(4000), torch.ones(4000), uniforms(range(4000), 1)[:, 0])
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert shares.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)


def test_evaluation_is_greedy(generators: Generators) -> None:
    prompts = ((1, 2, 3), (4, 5))
    found = asyncio.run(generators().generate(request(*prompts, tokens=4, temperature=0.0)))
    model = source().build()
    assert [each.tokens for each in found] == [likeliest_tokens(model, prompt, 4) for prompt in prompts]


# -- versions of the weights


def publish(store: WeightStore, version: int) -> None:
    """Publish weights that are the model's with the seed `version`."""
    store.publish(version, source(seed=version).build().state_dict())


class Gate:
    """Stops a generator between two tokens until it may go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(20.0)


async def updated_halfway(
    generators: Generators, store: WeightStore, asked: SamplingRequest, update: str = "swap"
) -> tuple[TransformersGenerator, asyncio.Task[list[Completion]], Gate]:
    """A generator that gets version 2 after the first token of a request; the next one comes when the gate opens."""
    publish(store, 1)
    gate = Gate()
    generator = generators(source(), store=store.url, mode="asynchronous", update=update, between=gate)
    assert await generator.update(1) == 1
    running = asyncio.create_task(generator.generate(asked))
    await asyncio.to_thread(gate.reached.wait, 20.0)
    publish(store, 2)
    assert await generator.update(2) == 2
    return generator, running, gate


async def test_a_generator_draws_from_weights_that_were_cast_on_their_way(
    generators: Generators, store: WeightStore
) -> None:
    weights = source(seed=1).build().state_dict()
    store.publish(1, weights)
    [drawn] = await generators(source(), store=store.url, cast="bf16").generate(request((1, 2, 3), version=1))
    store.publish(2, {name: each.bfloat16().float() for name, each in weights.items()})
    [wanted] = await generators(source(), store=store.url).generate(request((1, 2, 3), version=2))
    assert (drawn.tokens, drawn.logprobs) == (wanted.tokens, wanted.logprobs)


@pytest.mark.parametrize(
    ("update", "version", "drawn_with"),
    [("swap", None, (1, *[2] * 7)), ("drain", None, (1,) * 8), ("swap", 1, (1,) * 8)],
)
async def test_weights_change_between_two_tokens_or_after_the_batch_and_not_under_samples_of_a_named_version(
    generators: Generators, store: WeightStore, update: str, version: int | None, drawn_with: tuple[int, ...]
) -> None:
    """Other requests wait for the next weights."""
    asked = request((1, 2, 3), samples=2, tokens=8, version=version)
    generator, running, gate = await updated_halfway(generators, store, asked, update)
    later = asyncio.create_task(generator.generate(request((1, 2, 3), samples=2, tokens=8)))
    await asyncio.sleep(0)  # it is queued
    gate.open.set()
    assert all(each.versions == (2,) * 8 for each in await later)
    assert all(each.versions == drawn_with for each in await running)
    assert generator.version == 2


async def test_tokens_after_a_swap_have_the_logprobs_of_the_new_weights_over_the_kept_cache(
    generators: Generators, store: WeightStore
) -> None:
    """One token after the swap: it attends to keys that the weights before the swap made of earlier tokens."""
    _, running, gate = await updated_halfway(generators, store, request((1, 2, 3), tokens=2))
    gate.open.set()
    [found] = await running
    old, new = source(seed=1).build(), source(seed=2).build()
    assert found.versions == (1, 2)
    assert found.logprobs[0] == pytest.approx(float(full_logprobs(old, (1, 2, 3), found.tokens, 1.0)[0]), abs=1e-5)
    with torch.no_grad():
        kept = old(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
        logits = new(input_ids=torch.tensor([[found.tokens[0]]]), past_key_values=kept).logits[0, -1]
    assert found.logprobs[1] == pytest.approx(float(logits.log_softmax(-1)[found.tokens[1]]), abs=1e-5)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_a_request_gets_exactly_the_version_that_it_names(
    generators: Generators, store: WeightStore, mode: Mode
) -> None:
    """It waits for a version to come. One that is older than the one which is served is refused."""
    generator = generators(source(), store=store.url, mode=mode)
    asked = {version: request((1, 2, 3), samples=3, version=version) for version in (1, 2)}
    waiting = asyncio.create_task(generator.generate(asked[2]))
    await asyncio.sleep(0)
    publish(store, 1)
    [one] = {each.versions[0] for each in await generator.generate(asked[1])}
    assert one == 1 and not waiting.done()
    publish(store, 2)
    expected = await generators(source(seed=2)).generate(request((1, 2, 3), samples=3))
    found = await waiting
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert {each.versions for each in found} == {(2,) * 5}
    with pytest.raises(errors.VersionGone, match="version 1 of the weights is gone"):
        await generator.generate(asked[1])
    with pytest.raises(errors.VersionGone, match="version 1 of the weights is gone"):
        await generators().generate(asked[1])


def test_a_version_that_never_comes_is_a_timeout(generators: Generators, store: WeightStore) -> None:
    publish(store, 1)
    generator = generators(source(), store=store.url, timeout=0.2)
    with pytest.raises(StoreTimeout):
        run(generator, request((1,), version=4))


def test_a_generator_follows_the_store(generators: Generators, store: WeightStore) -> None:
    generator = generators(source(), store=store.url)
    with pytest.raises(errors.GeneratorNotReady, match="no version"):
        run(generator, request((1,)))
    for version in (1, 2, 3):
        publish(store, version)
    eventually(lambda: generator.version == 3)
    assert {each.versions for each in run(generator, request((1,), samples=2))[0]} == {(3,) * 5}


@pytest.mark.parametrize("update", ["swap", "drain"])
async def test_a_reader_serves_what_switches_commit(generators: Generators, store: WeightStore, update: str) -> None:
    """Not what is published; and from the very next request on. One that starts later has caught up once it is made."""
    publish(store, 1)
    options = {"store": store.url, "mode": "asynchronous", "update": update}
    generator = generators(source(), reader=True, **options)
    with pytest.raises(errors.GeneratorNotReady, match="no version"):
        await generator.generate(request((1,)))
    for version in (1, 2, 3):
        publish(store, version)
        assert store.switch(version, timeout=20.0).committed
        [found] = await generator.generate(request((1, 2)))
        assert found.versions == (version,) * 5
    publish(store, 4)
    late = generators(source(), reader=True, **options)
    assert late.version == 3
    for each in (late, generator):
        assert [found.versions for found in await each.generate(request((1, 2)))] == [(3,) * 5]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_after_a_failed_update_it_is_not_ready_until_one_worked(
    generators: Generators, store: WeightStore, mode: Mode, monkeypatch: Any
) -> None:
    publish(store, 1)
    generator = generators(source(), store=store.url, mode=mode)
    asyncio.run(generator.update(1))
    before = run(generator, request((1, 2), version=1))
    real = CopiedStaging.read

    def broken(self: CopiedStaging, version: int, into: StagingState) -> None:
        if version == 1:
            return real(self, version, into)
        next(iter(into.locals.values())).zero_()
        raise CorruptData("half of it came")

    with monkeypatch.context() as patch:
        patch.setattr(CopiedStaging, "read", broken)
        publish(store, 2)
        with pytest.raises(CorruptData):
            asyncio.run(generator.update(2))
        with pytest.raises(errors.GeneratorNotReady, match="half of it came"):
            run(generator, request((1, 2)))
        assert run(generator, request((1, 2), version=1)) == before, "the version that is whole here, if it is named"
    asyncio.run(generator.update(2))
    assert {each.versions for each in run(generator, request((1, 2)))[0]} == {(2,) * 5}


# -- what cannot be served


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (ModelSource(config=LLAMA, vocabulary=18), "it has 17 tokens, and its tokenizer 18"),
        (ModelSource(), "neither"),
        (ModelSource(path="/nowhere", config=LLAMA), "both"),
        (ModelSource(config={"model_type": "unheard"}), "unheard"),
        (ModelSource(config=LLAMA, dtype="int8"), "no floating type"),
    ],
)
def test_a_model_that_cannot_serve_is_refused_at_the_start(wrong: ModelSource, says: str) -> None:
    with pytest.raises(ModelMisfit, match=says):
        TransformersGenerator(wrong)


def test_a_request_that_the_model_cannot_serve_is_refused(generators: Generators) -> None:
    generator = generators()
    for prompt, says in (((1,) * 30, "make 35 tokens"), ((1, 17), "token 17"), ((1, 90), "90")):
        with pytest.raises(errors.BadRequest, match=says):
            run(generator, request(prompt))
    assert run(generator, request((1, 2)))[0]


async def test_open_requests_end_when_the_generator_is_closed(generators: Generators) -> None:
    gate = Gate()
    generator = generators(source(), mode="asynchronous", between=gate)
    open_ones = [asyncio.create_task(generator.generate(request((1,), tokens=20))) for _ in range(2)]
    await asyncio.to_thread(gate.reached.wait, 20.0)
    closing = asyncio.create_task(asyncio.to_thread(generator.close))
    gate.open.set()
    await closing
    for each in open_ones:
        with pytest.raises(errors.GeneratorClosed):
            await each
    with pytest.raises(errors.GeneratorClosed):
        await generator.generate(request((1,)))


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_request_that_cannot_begin_or_go_on_fails_alone(
    generators: Generators, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Such as one for which there is no memory."""
    begin, failing = transformers_generator.uniforms, [True]

    def between() -> None:
        if failing:
            raise CorruptData("a fault between two tokens")

    def uniforms(seeds: Sequence[int], count: int) -> torch.Tensor:
        if 99 in seeds:
            raise RuntimeError("not enough memory")
        return begin(seeds, count)

    monkeypatch.setattr(transformers_generator, "uniforms", uniforms)
    generator = generators(source(), mode=mode, between=between)
    with pytest.raises(CorruptData):
        run(generator, request((1, 2)))
    failing.clear()

    async def both() -> list[object]:
        asked = request((1, 2), seed=99, version=None), request((1, 2))
        return await asyncio.gather(*map(generator.generate, asked), return_exceptions=True)

    failed, other = asyncio.run(both())
    assert isinstance(failed, RuntimeError) and isinstance(other, list)
    assert run(generator, request((1, 2))) == [other]


def test_a_register_that_was_away_leaves_a_healthy_generator_ready(generators: Generators, tmp_path: Path) -> None:
    """The weights are whole: only looks for newer ones failed."""
    folder, away = tmp_path / "register", tmp_path / "away"
    folder.mkdir(mode=0o700)
    with WeightStore(f"sqlite://{folder}/job.sqlite", replicas=1) as store:
        publish(store, 1)
        generator = generators(source(), store=store.url)
        generator._follower._stager.client.patience = 0.3
        assert asyncio.run(generator.update(1)) == 1
        follower = generator._follower
        folder.rename(away)
        eventually(lambda: follower.failure is not None)
        away.rename(folder)
        eventually(lambda: follower.failure is None)
        assert [each.versions for each in run(generator, request((1,)))[0]] == [(1,) * 5]
        generator.close()


def output_of(tokens: list[int], versions: list[int], finish: str) -> Any:
    """An output of vLLM: versions come as spans of tokens."""
    spans = [(version, len(list(found))) for version, found in itertools.groupby(versions)]
    starts = list(itertools.accumulate((count for _, count in spans), initial=0))
    return SimpleNamespace(
        token_ids=tokens,
        logprobs=[{token: SimpleNamespace(logprob=-float(token))} for token in tokens],
        weight_versions=[
            SimpleNamespace(version=str(version), start=start, end=start + count)
            for (version, count), start in zip(spans, starts, strict=False)
        ],
        finish_reason=finish,
    )


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.sampled_from(["stop", "length", "abort"]),
)
def test_a_sample_that_updates_cut_off_goes_on_behind_its_tokens(
    versions: list[int], cuts: set[int], last: str
) -> None:
    """So no completion that a trainer sees was cut off by an update: one cut off at its last token was at its limit."""
    most = len(versions) + (last == "stop")
    asked: list[tuple[tuple[int, ...], int]] = []
    edges = [0, *sorted(cut for cut in cuts if cut < len(versions)), len(versions)]

    async def draw(seen: tuple[int, ...], seed: int, left: int) -> Any:
        begin, end = edges[len(asked)], edges[len(asked) + 1]
        asked.append((seen, seed))
        assert (seen, left) == ((7, 8, *range(begin)), most - begin)
        finish = last if len(asked) == len(edges) - 1 else "abort"
        return output_of(list(range(begin, end)), versions[begin:end], finish)

    completion = asyncio.run(draw_whole(draw, (7, 8), 5, most))
    assert completion.tokens == tuple(range(len(versions))) and completion.versions == tuple(versions)
    assert completion.logprobs == tuple(-float(each) for each in completion.tokens)
    assert completion.finish == ("stop" if last == "stop" else "length")
    seeds, contexts = zip(*[(seed, seen) for seen, seed in asked], strict=True)
    assert len(set(seeds)) == len(set(contexts)), "no part draws with another's numbers"
