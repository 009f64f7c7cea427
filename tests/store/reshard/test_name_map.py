"""A `Layout` gives a reader its own names: renamed, fused and tied tensors, and vLLM's of transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import whole
from holdfast.store import Layout, WeightStore
from holdfast.store.casts.wire_cast import CastName
from holdfast.store.reshard.name_map import Component, NameRule, fill, match
from holdfast.store.reshard.placements import Blocks, LocalBlock, PlacedTensor, blocks_of, cuts_of, local_shape
from holdfast.store.reshard.plan import PartBox, plan
from support.weights.layouts import at, coordinates, meshes, placements

State = dict[str, torch.Tensor]


def asked_for(shape: tuple[int, ...], blocks: Blocks) -> PlacedTensor:
    return PlacedTensor(shape, torch.float32, torch.empty(0), blocks)


def shapes_of(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def read(layout: Layout, wanted: Mapping[str, tuple[int, ...]], published: State) -> State:
    """What a reader of whole tensors gets; elements that nothing fills stay -1."""
    asked = {name: asked_for(shape, (LocalBlock(whole(shape), whole(shape)),)) for name, shape in wanted.items()}
    targets = layout.targets(asked, shapes_of(published))
    sources = {name: [PartBox(0, whole(tensor.shape))] for name, tensor in published.items()}
    found = {name: torch.full(shape, -1.0) for name, shape in wanted.items()}
    for copy in plan(targets, sources):
        found[copy.into][at(copy.put)] = published[copy.name][at(copy.source)][at(copy.take)]
    return found


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "head_dim": 8,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3 with biases, tied": Qwen3Config(**SIZES, attention_bias=True, tie_word_embeddings=True),
}


@cache
def trained(model: str) -> State:
    """The state dict of a model; biases and norms get random values, too."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIGS[model])
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return {name: tensor.detach() for name, tensor in made.state_dict().items()}


def in_vllm(config: Any, state: State, rank: int, size: int) -> State:
    """What vLLM's weight loaders make of a transformers state dict on one tensor-parallel rank."""
    found: State = {}
    copies = max(size // config.num_key_value_heads, 1)

    def mine(tensor: torch.Tensor, dim: int = 0, copies: int = 1) -> torch.Tensor:
        return tensor.chunk(size // copies, dim)[rank // copies]

    for name, tensor in state.items():
        if "q_proj" in name:
            key, value = (state[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            joined = torch.cat([mine(tensor), mine(key, 0, copies), mine(value, 0, copies)])
            found[name.replace("q_proj", "qkv_proj")] = joined
        elif "gate_proj" in name:
            up = state[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([mine(tensor), mine(up)])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = mine(tensor, 1)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name == "model.embed_tokens.weight" or not config.tie_word_embeddings:
                padded = torch.cat([tensor, torch.full((64 - len(tensor), tensor.shape[1]), -1.0)])
                found[name] = mine(padded)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            found[name] = tensor
    return found


@pytest.mark.parametrize("model", CONFIGS)
def test_vllm_gets_every_tensor_of_a_transformers_model(model: str) -> None:
    config, published = CONFIGS[model], trained(model)
    for rank, size in [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)]:
        layout = Layout.vllm(config, rank, size)
        expected = in_vllm(config, published, rank, size)
        assert equal(read(layout, shapes_of(expected), published), expected)
        layout.check(shapes_of(expected), shapes_of(published))


@pytest.mark.parametrize("model", CONFIGS)
def test_transformers_gets_every_tensor_of_a_model_in_vllm(model: str) -> None:
    config, expected = CONFIGS[model], trained(model)
    published = in_vllm(config, expected, 0, 1)
    layout = Layout.vllm(config)
    assert equal(read(layout, shapes_of(expected), published), expected)
    missing = {name: shape for name, shape in shapes_of(expected).items() if "layers.1.self_attn.k_proj" not in name}
    with pytest.raises(Mismatch, match=r"nothing takes \[32:48, 0:32\] of 'model.layers.1.self_attn.qkv_proj.weight'"):
        layout.check(missing, shapes_of(published))


def test_a_tensor_parallel_rank_of_vllm_is_filled_from_fused_tensors_too() -> None:
    config, state = CONFIGS["qwen2"], trained("qwen2")
    published = in_vllm(config, state, 0, 1)
    for rank in range(4):
        expected = in_vllm(config, state, rank, 4)
        assert equal(read(Layout.vllm(config, rank, 4), shapes_of(expected), published), expected)


def test_other_models_and_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(Unsupported, match="the layout of qwen3_moe in vLLM"):
        Layout.vllm(Qwen3MoeConfig(**SIZES))
    with pytest.raises(ValueError, match="3 tensor-parallel ranks cannot share 4 heads and 2 heads of keys"):
        Layout.vllm(CONFIGS["llama"], 0, 3)


@given(meshes, meshes, st.data())
def test_shards_fill_fused_tensors(before: tuple[int, ...], after: tuple[int, ...], data: st.DataObject) -> None:
    """And the other way round: both layouts are any placements on any mesh."""
    dim = data.draw(st.integers(0, 1))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=3))
    names = [f"x.{letter}" for letter in "qkv"[: len(lengths)]]
    layout = Layout((NameRule.fuse("*.qkv", *(name.replace("x", "*") for name in names), dim=dim),))
    fused = torch.arange(3.0 * sum(lengths)).view([sum(lengths), 3] if dim == 0 else [3, sum(lengths)])
    pieces = dict(zip(names, fused.split(lengths, dim), strict=True))
    for published, wanted in ((pieces, {"x.qkv": fused}), ({"x.qkv": fused}, pieces)):
        old = {name: cuts_of(name, data.draw(placements(before, 2)), 2) for name in published}
        sources = {
            name: [
                PartBox(part, block.box)
                for part, place in enumerate(coordinates(before))
                for block in blocks_of(tuple(tensor.shape), old[name], before, place)
            ]
            for name, tensor in published.items()
        }
        new = {name: cuts_of(name, data.draw(placements(after, 2)), 2) for name in wanted}
        for place in coordinates(after):
            shapes = shapes_of(wanted)
            asked = {
                name: asked_for(shape, blocks_of(shape, new[name], after, place)) for name, shape in shapes.items()
            }
            found = {
                name: torch.full(local_shape(shape, new[name], after, place), -1.0) for name, shape in shapes.items()
            }
            for copy in plan(layout.targets(asked, shapes_of(published)), sources):
                assert (found[copy.into][at(copy.put)] == -1).all()
                found[copy.into][at(copy.put)] = published[copy.name][at(copy.source)][at(copy.take)]
            for name, each in asked.items():
                for box, local in each.blocks:
                    assert torch.equal(found[name][at(local)], wanted[name][at(box)])


def test_names_are_replaced_by_pattern_in_either_direction_and_a_tied_weight_has_either() -> None:
    layout = Layout((NameRule.rename("policy.**", "model.**"), NameRule.rename("*.scale", "*.gamma")))
    published = {"model.a.weight": torch.ones(2), "b.gamma": torch.zeros(3), "same": torch.ones(())}
    mine = {"policy.a.weight": torch.ones(2), "b.scale": torch.zeros(3), "same": torch.ones(())}
    assert equal(read(layout, shapes_of(mine), published), mine)
    assert equal(read(layout, shapes_of(published), mine), published)
    layout = Layout(tied=(("head", "embedding"),))
    weight = torch.ones(3, 2)
    both = {"head": (3, 2), "embedding": (3, 2)}
    for name in both:
        assert equal(read(layout, both, {name: weight}), {"head": weight, "embedding": weight})
        layout.check({name: (3, 2)}, both)


def test_one_error_lists_every_tensor_that_cannot_be_made() -> None:
    layout = Layout((NameRule.fuse("*.qkv", "*.q", "*.k", "*.v"), NameRule("pad", (Component("pad", 6),), padded=True)))
    there = {
        "a.q": (2, 3),
        "a.k": (1, 3),
        "b.qkv": (4, 3),
        "c": (2,),
        "pad": (8, 1),
        "d.q": (1,),
        "d.k": (2,),
        "d.v": (3,),
    }
    wanted = {"a.qkv": (4, 3), "b.k": (1, 3), "c": (3,), "d.qkv": (7,), "pad": (4, 1), "e": ()}
    asked = {name: asked_for(shape, ()) for name, shape in wanted.items()}
    with pytest.raises(Mismatch) as caught:
        layout.targets(asked, there)
    assert str(caught.value) == (
        "the layout does not fit: there is no 'a.qkv', nor 'a.v' to make it of; "
        "nothing says how long 'b.q' and 'b.v' are in 'b.qkv': give their lengths; "
        "'c' has shape (3,) here, in the version 'c' has (2,); "
        "'d.qkv' has shape (7,) here, in the version 'd.q' has (1,), 'd.k' has (2,), 'd.v' has (3,); "
        "'pad' has room for 4 along dimension 0, in the version 'pad' has 8; the layout says 6; "
        "there is no 'e'"
    )


def test_lengths_of_the_layout_are_checked_and_rules_that_cannot_be_meant_are_refused_all_at_once() -> None:
    layout = Layout((NameRule("qkv", (Component("q", 4), Component("kv", 2)), sliced=True),), rank=0, size=2)
    with pytest.raises(Mismatch, match="'q' is 3 long, the layout says 4"):
        layout.check({"qkv": (3,)}, {"q": (3,), "kv": (2,)})
    with pytest.raises(Mismatch, match=r"'qkv' is 7 long along dimension 0, its components are \[4, 2\]"):
        layout.check({"qkv": (3,)}, {"qkv": (7,)})
    odd = Layout((NameRule("qkv", (Component("q"), Component("kv")), sliced=True),), rank=0, size=2)
    with pytest.raises(Mismatch, match="'kv', 3 long along 0, is not divided by 2"):
        odd.check({"qkv": (3,)}, {"q": (4,), "kv": (3,)})
    with pytest.raises(ValueError, match="this is no layout") as caught:
        Layout(
            (
                NameRule.rename("a.*", "b"),
                NameRule("c", ()),
                NameRule("d", (Component("e"), Component("f", copies=3)), padded=True),
            ),
            rank=2,
            size=2,
        )
    assert str(caught.value) == (
        "this is no layout: rank 2 of 2; 'a.*' and 'b' have different wildcards; 'c' consists of nothing; "
        "'d' is padded, and has 2 components; 3 copies of 'f' among 2 ranks"
    )


names = st.lists(st.sampled_from(["a", "b+", "0", "weight", "(c"]), min_size=1, max_size=5).map(".".join)


@given(st.lists(st.sampled_from(["a", "b+", "0", "*"]), min_size=1, max_size=5).map(".".join), names)
def test_a_pattern_matches_the_names_that_it_makes(pattern: str, name: str) -> None:
    words = match(pattern, name)
    if words is not None:
        assert fill(pattern, words) == name
    assert match(name, name) == ()
    assert match(pattern, fill(pattern, ("x",) * pattern.count("*"))) == ("x",) * pattern.count("*")


def test_one_star_is_one_word_and_two_are_any_number() -> None:
    assert match("model.*.weight", "model.layers.0.weight") is None
    assert match("model.**.weight", "model.layers.0.weight") == ("layers.0",)
    assert match("model.layers.*.weight", "modelXlayers.0.weight") is None


QKV = "model.layers.1.self_attn.qkv_proj.weight"
QWEN = CONFIGS["qwen2, tied"]


@pytest.fixture
def store(store: WeightStore) -> WeightStore:
    """The store, with a model as version 1."""
    store.publish(1, trained("qwen2, tied"))
    return store


@pytest.mark.parametrize(("cast", "dtype"), [(None, torch.float32), ("bf16", torch.float32), ("bf16", torch.bfloat16)])
def test_ranks_of_vllm_get_their_slices(store: WeightStore, cast: CastName | None, dtype: torch.dtype) -> None:
    def wanted(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if cast is None else tensor.bfloat16()).to(dtype)

    published, padded = trained("qwen2, tied"), "model.embed_tokens.weight"
    for rank in range(2):
        into = {QKV: torch.empty(32, 32, dtype=dtype), padded: torch.full((32, 32), -1.0, dtype=dtype)}
        store.get(1, into, layout=Layout.vllm(QWEN, rank, 2), strict=False, cast=cast)
        qkv = [published[QKV.replace("qkv", letter)].chunk(2)[rank] for letter in "qkv"]
        assert torch.equal(into[QKV], wanted(torch.cat(qkv)))
        mine = published[padded][32 * rank : 32 * rank + 32]
        assert torch.equal(into[padded][: len(mine)], wanted(mine))
        assert bool((into[padded][len(mine) :] == -1).all())


def test_what_a_layout_cannot_make_changes_nothing(store: WeightStore) -> None:
    into = {QKV: torch.zeros(64, 32), "model.layers.9.mlp.gate_up_proj.weight": torch.zeros(96, 32)}
    with pytest.raises(Mismatch, match=r"there is no 'model.layers.9.mlp.gate_up_proj.weight', nor .*9.mlp.up_proj"):
        store.get(1, into, layout=Layout.vllm(QWEN), strict=False)
    with pytest.raises(Mismatch, match=r"nothing takes \[0:32, 0:48\] of 'model.layers.0.mlp.down_proj.weight'"):
        store.get(1, {QKV: into[QKV]}, layout=Layout.vllm(QWEN))
    with pytest.raises(Mismatch, match="dtype"):
        store.get(1, {QKV: into[QKV].double()}, layout=Layout.vllm(QWEN), strict=False)
    assert not into[QKV].any()
