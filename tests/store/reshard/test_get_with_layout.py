"""`get(layout=...)`: a reader with vLLM's names is filled from what a transformers model published, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from holdfast.comms.errors import Mismatch
from holdfast.store import Layout, WeightStore

CONFIG = Qwen2Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=40,
    tie_word_embeddings=True,
)
QKV = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture
def store() -> Iterator[WeightStore]:
    with WeightStore("memory://layouts") as found:
        yield found


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


def qkv_of(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [state[QKV.replace("qkv", letter)] for letter in "qkv"]


def test_ranks_of_vllm_get_their_slices_of_what_transformers_published(
    store: WeightStore, model: torch.nn.Module
) -> None:
    state = model.state_dict()
    store.publish(1, state)
    for rank in range(2):
        into = {QKV: torch.empty(32, 32), "model.embed_tokens.weight": torch.full((32, 32), -1.0)}
        store.get(1, into, layout=Layout.vllm(CONFIG, rank, 2), strict=False)
        assert torch.equal(into[QKV], torch.cat([each.chunk(2)[rank] for each in qkv_of(state)]))
        mine = state["model.embed_tokens.weight"][32 * rank : 32 * rank + 32]
        assert torch.equal(into["model.embed_tokens.weight"][: len(mine)], mine)
        assert bool((into["model.embed_tokens.weight"][len(mine) :] == -1).all())


def test_a_fused_tensor_is_filled_in_a_cast_and_in_the_dtype_of_the_reader(
    store: WeightStore, model: torch.nn.Module
) -> None:
    store.publish(1, model.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        into = {QKV: torch.empty(32, 32, dtype=dtype)}
        store.get(1, into, layout=Layout.vllm(CONFIG, 1, 2), strict=False, cast="bf16")
        wanted = torch.cat([each.chunk(2)[1] for each in qkv_of(model.state_dict())])
        assert torch.equal(into[QKV], wanted.bfloat16().to(dtype))


def test_a_transformers_model_gets_what_vllm_published(store: WeightStore, model: torch.nn.Module) -> None:
    state = model.state_dict()
    fused = {name: each for name, each in state.items() if "_proj" not in name or "o_proj" in name or "down" in name}
    del fused["lm_head.weight"]
    for layer in range(2):
        for kind in ("weight", "bias"):
            prefix = f"model.layers.{layer}.self_attn"
            fused[f"{prefix}.qkv_proj.{kind}"] = torch.cat([state[f"{prefix}.{x}_proj.{kind}"] for x in "qkv"])
        mlp = f"model.layers.{layer}.mlp"
        fused[f"{mlp}.gate_up_proj.weight"] = torch.cat([state[f"{mlp}.{x}_proj.weight"] for x in ("gate", "up")])
    store.publish(1, fused)
    other = AutoModelForCausalLM.from_config(CONFIG)
    store.get(1, other.state_dict(), layout=Layout.vllm(CONFIG))
    assert all(torch.equal(each, state[name]) for name, each in other.state_dict().items())


def test_what_a_layout_cannot_make_changes_nothing(store: WeightStore, model: torch.nn.Module) -> None:
    store.publish(1, model.state_dict())
    into = {QKV: torch.zeros(64, 32), "model.layers.9.mlp.gate_up_proj.weight": torch.zeros(96, 32)}
    with pytest.raises(Mismatch, match=r"there is no 'model.layers.9.mlp.gate_up_proj.weight', nor .*9.mlp.up_proj"):
        store.get(1, into, layout=Layout.vllm(CONFIG), strict=False)
    with pytest.raises(Mismatch, match=r"nothing takes \[0:32, 0:48\] of 'model.layers.0.mlp.down_proj.weight'"):
        store.get(1, {QKV: into[QKV]}, layout=Layout.vllm(CONFIG))
    with pytest.raises(Mismatch, match="dtype"):
        store.get(1, {QKV: into[QKV].double()}, layout=Layout.vllm(CONFIG), strict=False)
    assert not into[QKV].any()
