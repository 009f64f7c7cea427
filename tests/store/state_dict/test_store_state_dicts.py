"""What a store's readers get of a state dict that holds more than plain tensors."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.store import WeightStore
from support.samples.scaled_tensor import Recipe, Rounding, ScaledTensor, scaled
from support.weights.state_dicts import bits, named_leaves, same, state_dicts


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint1, torch.uint7, torch.float4_e2m1fn_x2, torch.bits4x2])
def test_dtypes_that_torch_cannot_compute_with_arrive_whatever_their_strides(
    store: WeightStore, dtype: torch.dtype
) -> None:
    raw = torch.randint(0, 256, (700, 800), dtype=torch.uint8)
    state = {
        "small": raw[:5, :7].contiguous().view(dtype),
        "transposed": raw.view(dtype).t(),
        "rows": raw.view(dtype)[::3],
    }
    store.publish(1, state)
    for layout in (torch.empty_like, lambda each: torch.empty(each.shape[::-1], dtype=dtype).t()):
        into = {name: layout(tensor) for name, tensor in state.items()}
        for atomic in (False, True):
            for tensor in into.values():
                tensor.view(torch.uint8).zero_()
            store.get(1, into, atomic=atomic)
            assert [name for name in state if bits(into[name]) != bits(state[name])] == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state_dicts())
def test_any_state_dict_is_loaded_as_it_was_published(tmp_path: Path, state: dict[str, Any]) -> None:
    names = named_leaves(state)
    with WeightStore(f"memory://{tmp_path}/any") as store:
        if len(set(names)) == len(names):
            store.publish(1, state)
            assert same(store.load(1), state)


def test_subclasses_are_loaded_as_their_class_and_filled_in_place(store: WeightStore) -> None:
    store.publish(1, {"q": {"weight": nn.Parameter(scaled(2.0), requires_grad=False)}, "bias": torch.ones(2)})
    loaded = store.load(1)["q"]["weight"]
    assert type(loaded) is ScaledTensor and isinstance(loaded, nn.Parameter)
    assert loaded.recipe == Recipe(Rounding.NEAREST, (1, 3))
    assert torch.equal(loaded + 0, scaled(2.0) + 0)
    target = scaled(5.0)
    store.get(1, {"q": {"weight": target}, "bias": torch.zeros(2)})
    assert torch.equal(target + 0, scaled(2.0) + 0)
    assert list(store.load(1, "q.")) == ["q.weight.inner", "q.weight.scale"]
    with pytest.raises(Mismatch, match=r"'q.weight' is a ScaledTensor.* in the version, a plain tensor in `into`"):
        store.get(1, {"q": {"weight": torch.ones(2, 3)}, "bias": torch.zeros(2)})


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_model_is_served_from_its_published_state(store: WeightStore, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'holdfast[rl]'")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    trained, serving, started = (transformers.LlamaForCausalLM(config) for _ in range(3))
    store.publish(1, trained.state_dict())
    store.get(1, serving.state_dict())
    started.load_state_dict(store.load(1))
    tokens = torch.arange(8)[None]
    assert torch.equal(trained(tokens).logits, serving(tokens).logits)
    assert torch.equal(trained(tokens).logits, started(tokens).logits)


def test_publishing_leaves_gradients_and_version_counters_alone(store: WeightStore) -> None:
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    before = weight._version
    store.publish(1, {"weight": weight, "scaled": scaled(1.0)})
    assert weight._version == before and weight.grad.tolist() == [1, 1, 1]
    loss.backward()


def test_one_error_names_all_that_is_wrong_with_a_target_and_nothing_changes(
    store: WeightStore, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_bytes(bytes(16))
    with (tmp_path / "weights").open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.frombuffer(mmap.mmap(file.fileno(), 16, prot=mmap.PROT_READ), dtype=torch.float32)
    names = ("good", "meta", "sparse", "frozen", "expanded", "extra")
    store.publish(1, {**{name: torch.ones(4) for name in names}, "lr": 0.5, "scaled": scaled(1.0)})
    into = {
        "good": torch.zeros(4),
        "meta": torch.zeros(4, device="meta"),
        "sparse": torch.zeros(4).to_sparse(),
        "frozen": frozen,
        "expanded": torch.zeros(1).expand(4),
        "missing": torch.zeros(4),
        "lr": 0.1,
        "scaled": scaled(0.0, Rounding.STOCHASTIC),
    }
    with pytest.raises(Unsupported) as refused:
        store.get(1, into)
    for words in (
        "'meta' is a meta tensor", "'sparse' is a tensor of layout", "'frozen' of `into` lies in memory",
        "'expanded' of `into` is an expanded", "no 'missing'", "also has 'extra'", "'scaled' is a ScaledTensor",
    ):  # fmt: skip
        assert words in str(refused.value), words
    assert not into["good"].any() and into["lr"] == 0.1
