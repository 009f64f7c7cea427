"""What each worker of vLLM reads from the store: its slices, joined as vLLM joins them. Needs no vLLM."""

from __future__ import annotations

import asyncio
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="generators need transformers: pip install 'holdfast[rl]'")

from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.rl.generators.vllm.vllm_generator import draw_whole
from holdfast.store import Layout, WeightStore

WIDTH = 4
"""The width of a head."""


def model_of(kind: str, heads: int, keys: int, tied: bool) -> Any:
    """A transformers model of a kind that vLLM has, with random weights."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=70,
        hidden_size=heads * WIDTH,
        head_dim=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(heads * keys)
    return AutoModelForCausalLM.from_config(config)


def of_worker(state: dict[str, torch.Tensor], keys: int, rank: int, size: int) -> dict[str, torch.Tensor]:
    """What tensor-parallel rank `rank` of vLLM makes of a checkpoint: written anew, without the store."""

    def part(name: str, count: int = size, index: int = rank, dim: int = 0) -> torch.Tensor:
        return state[name].chunk(count, dim)[index]

    found = {}
    copies = max(size // keys, 1)
    for name, whole in state.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = math.ceil(len(whole) / 64) * 64
            padded = torch.cat([whole, torch.zeros(rows - len(whole), whole.shape[1])])
            found[name] = padded.chunk(size)[rank]
        elif ".q_proj." in name:
            others = [part(name.replace("q_proj", f"{x}_proj"), size // copies, rank // copies) for x in "kv"]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat([part(name), *others])
        elif ".gate_proj." in name:
            joined = torch.cat([part(name), part(name.replace("gate_proj", "up_proj"))])
            found[name.replace("gate_proj", "gate_up_proj")] = joined
        elif "o_proj" in name or "down_proj" in name:
            found[name] = part(name, dim=1)
        elif "_proj" not in name:
            found[name] = whole
    return found


@given(st.sampled_from(["llama", "qwen2", "qwen3"]), st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2)]), st.booleans())
@settings(max_examples=12)
def test_every_worker_gets_its_slices_joined_as_vllm_has_them(kind: str, heads: tuple[int, int], tied: bool) -> None:
    model = model_of(kind, *heads, tied)
    state = {name: each.detach() for name, each in model.state_dict().items()}
    with WeightStore("memory://vllm-workers") as store:
        store.publish(1, state)
        for size in (1, 2, 4):
            for rank in range(size):
                wanted = of_worker(state, heads[1], rank, size)
                staged = {name: torch.zeros_like(each) for name, each in wanted.items()}
                store.get(1, staged, layout=Layout.vllm(model.config, rank, size))
                assert [name for name, each in wanted.items() if not torch.equal(staged[name], each)] == []


def test_a_version_that_is_no_model_of_this_kind_is_refused_with_the_names_that_are_missing() -> None:
    model = model_of("llama", 4, 2, False)
    state = {name: each.detach() for name, each in model.state_dict().items()}
    wanted = of_worker(state, 2, 0, 2)
    del state["model.layers.1.mlp.up_proj.weight"]
    with WeightStore("memory://vllm-missing") as store:
        store.publish(1, state)
        with pytest.raises(Mismatch, match=r"model.layers.1.mlp.gate_up_proj.weight"):
            store.get(1, wanted, layout=Layout.vllm(model.config, 0, 2))


def test_models_and_ranks_that_have_no_plan_are_refused() -> None:
    with pytest.raises(Unsupported, match="the layout of gpt2 in vLLM"):
        Layout.vllm(AutoConfig.for_model("gpt2"), 0, 1)
    with pytest.raises(ValueError, match="3 tensor-parallel ranks cannot share 4 heads"):
        Layout.vllm(model_of("llama", 4, 2, False).config, 0, 3)


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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sets(st.integers(0, 7)), st.booleans())
def test_a_sample_that_updates_cut_off_goes_on_behind_its_tokens(
    versions: list[int], cuts: set[int], stopped: bool
) -> None:
    """So no completion that a trainer sees was cut off by an update, whatever came when."""
    most = len(versions) + stopped
    asked: list[tuple[tuple[int, ...], int]] = []
    edges = [0, *sorted(cut for cut in cuts if cut < len(versions)), len(versions)]

    async def draw(seen: tuple[int, ...], seed: int, left: int) -> Any:
        begin, end = edges[len(asked)], edges[len(asked) + 1]
        asked.append((seen, seed))
        assert (seen, left) == ((7, 8, *range(begin)), most - begin)
        last = "stop" if stopped else "length"
        return output_of(
            list(range(begin, end)), versions[begin:end], last if len(asked) == len(edges) - 1 else "abort"
        )

    completion = asyncio.run(draw_whole(draw, (7, 8), 5, most))
    assert completion.tokens == tuple(range(len(versions))) and completion.versions == tuple(versions)
    assert completion.logprobs == tuple(-float(each) for each in completion.tokens)
    assert completion.finish == ("stop" if stopped else "length")
    assert len({seed for seen, seed in asked}) == len({seen for seen, _ in asked}), (
        "no part draws with another's numbers"
    )


def test_a_sample_that_is_cut_off_at_its_last_token_has_reached_its_limit() -> None:
    async def draw(seen: tuple[int, ...], seed: int, left: int) -> Any:
        return output_of([1, 2], [0, 0], "abort")

    assert asyncio.run(draw_whole(draw, (7,), 5, 2)).finish == "length"
