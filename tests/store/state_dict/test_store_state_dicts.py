"""What a store's readers get of a state dict that holds more than plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from holdfast.comms.errors import CorruptData
from holdfast.store import CorruptVersion, WeightStore
from support.samples.scaled_tensor import Recipe, Rounding, ScaledTensor, scaled
from support.weights.state_dicts import a_llama, bits, named_leaves, same, state_dicts


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
def test_any_state_dict_is_loaded_as_it_was_published_unless_a_name_occurs_twice(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    names = named_leaves(state)
    with WeightStore(f"memory://{tmp_path}/any") as store:
        if len(set(names)) < len(names):
            with pytest.raises(ValueError, match="is in the state dict twice"):
                store.publish(1, state)
        else:
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_model_is_served_from_its_published_state(store: WeightStore, tied: bool) -> None:
    trained, serving, started = (a_llama(tied) for _ in range(3))
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


def test_tied_weights_are_published_once_and_tied_again(store: WeightStore) -> None:
    weight = torch.randn(400, 300)
    store.publish(1, {"embedding": weight, "head": weight})
    loaded = store.load(1)
    assert loaded["embedding"] is loaded["head"] and torch.equal(loaded["head"], weight)
    assert torch.equal(store.load(1, ["head"])["head"], weight)
    apart = {"embedding": torch.zeros(400, 300), "head": torch.zeros(400, 300)}
    store.get(1, apart)
    assert all(torch.equal(each, weight) for each in apart.values())


def corrupted(store: WeightStore) -> None:
    """Spoil the last piece of the only part."""
    (kept,) = store._replica_holder._kept.values()
    kept.memory[kept.region.handle.nbytes // 2 : kept.region.handle.nbytes // 2 + 8] ^= 255


@pytest.mark.parametrize("atomic", [True, False])
def test_a_get_that_fails_changes_nothing_if_atomic_and_else_says_what_is_mixed(
    store: WeightStore, atomic: bool
) -> None:
    state = {name: torch.full((1 << 20,), 2.0) for name in ("first", "second", "third")}
    store.publish(1, state)
    corrupted(store)
    into = {name: torch.zeros(1 << 20, requires_grad=True) for name in state}
    loss = sum((each * each).sum() for each in into.values())
    with pytest.raises(CorruptData, match="wrong bytes") as failed:
        store.get(1, into, atomic=atomic)
    assert isinstance(loss, torch.Tensor)
    if atomic:
        assert all(not bool(each.any()) for each in into.values())
        assert not isinstance(failed.value, CorruptVersion)
        loss.backward()
    else:
        assert isinstance(failed.value, CorruptVersion) and failed.value.mixed == tuple(state)
        assert "mixture in first, second, third" in str(failed.value)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
