"""What a state dict holds besides plain tensors travels too: values, nesting, ties; and faults come in one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.comms.errors import CorruptData
from holdfast.store import CorruptVersion, WeightStore


def test_a_get_fills_tensors_and_replaces_values(store: WeightStore) -> None:
    store.publish(1, {"weights": [torch.ones(3), torch.zeros(2)], "step": 9, "lr": {"now": 0.5}})
    into: dict[str, Any] = {"weights": [torch.zeros(3), torch.ones(2)], "step": 0, "lr": {"now": 1.0}}
    kept = into["weights"][0]
    store.get(1, into)
    assert kept.tolist() == [1, 1, 1] and into["step"] == 9 and into["lr"] == {"now": 0.5}


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
    into = {name: torch.zeros(1 << 20) for name in state}
    with pytest.raises(CorruptData, match="wrong bytes") as failed:
        store.get(1, into, atomic=atomic)
    if atomic:
        assert all(not bool(each.any()) for each in into.values())
        assert not isinstance(failed.value, CorruptVersion)
    else:
        assert isinstance(failed.value, CorruptVersion) and failed.value.mixed == tuple(state)
        assert "mixture in first, second, third" in str(failed.value)


def test_autograd_notices_that_a_tensor_was_filled(store: WeightStore) -> None:
    weight = torch.ones(3, requires_grad=True)
    store.publish(1, {"w": torch.full((3,), 2.0)})
    loss = (weight * weight).sum()
    store.get(1, {"w": weight})
    assert weight.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_that_a_get_failed_half_way(store: WeightStore) -> None:
    weight = torch.ones(1 << 20, requires_grad=True)
    store.publish(1, {"w": torch.full((1 << 20,), 2.0)})
    corrupted(store)
    loss = (weight * weight).sum()
    with pytest.raises(CorruptVersion):
        store.get(1, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
