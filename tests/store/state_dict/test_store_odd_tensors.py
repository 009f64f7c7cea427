"""State dicts of unusual tensors outlive a publisher or first holder that dies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.store import WeightStore
from support.children import Child
from support.samples.store_processes import Holders, a_publisher
from support.weights.state_dicts import bits

Tensor = torch.Tensor
SIZES = (5, 70_000)
"""Elements of a small and of a large tensor: the layout keeps them apart, and reads differ."""


def odd(seed: int) -> dict[str, Tensor]:
    """Unusual tensors, the same in every process."""
    torch.manual_seed(seed)
    state: dict[str, Tensor] = {
        "a scalar": torch.randn(()),
        "nothing": torch.empty(0, 3),
        "one element of a stride": torch.randn(4)[2::4],
        "expanded": torch.randn(2).expand(5, 2),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    for size in SIZES:
        tied = torch.randn(size)
        pairs = torch.randn(size, 2)
        with torch.inference_mode():
            inferred = torch.randn(size)
        state |= {
            f"{size} tied": tied,
            f"{size} tied to it": tied,
            f"{size} bool": torch.rand(size) > 0.5,
            f"{size} complex": torch.randn(size, dtype=torch.complex64),
            f"{size} conjugate": torch.randn(size, dtype=torch.complex64).conj(),
            f"{size} negated": torch.randn(size, dtype=torch.complex64).conj().imag,
            f"{size} bfloat16": torch.randn(size).bfloat16(),
            f"{size} float8, strided": pairs.to(torch.float8_e4m3fn)[:, 1],
            f"{size} unsigned, strided": pairs.view(torch.uint32)[:, 0],
            f"{size} parameter": nn.Parameter(torch.randn(size)),
            f"{size} leaf": torch.randn(size).requires_grad_(),
            f"{size} inferred": inferred,
        }
    return state


def targets() -> dict[str, Tensor]:
    """Tensors of the same layout as those of `odd`, with other content; what is expanded cannot be filled."""
    return odd(99) | {"expanded": torch.zeros(5, 2)}


def test_odd_tensors_outlive_their_publisher_bit_for_bit(
    url: str, holders: Holders, start: Callable[..., Child]
) -> None:
    holders(2)
    publisher = start(a_publisher, url, 1, partial(odd, 1), "published")
    publisher.hear()
    publisher.kill()
    expected, into = odd(1), targets()
    with WeightStore(url, hold=False) as store:
        assert store.get(1, into) == 1
    assert [name for name in expected if bits(into[name]) != bits(expected[name])] == []


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_targets_are_filled_in_whatever_mode_they_and_the_caller_are(
    tmp_path: Path, mode: Callable[..., object]
) -> None:
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, odd(1))
        into, expected = targets(), odd(1)
        with mode():  # type: ignore[attr-defined]
            store.publish(2, odd(1))
            for version in (1, 2):
                store.get(version, into)
        assert [name for name in expected if bits(into[name]) != bits(expected[name])] == []


def test_a_tensor_without_memory_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    freed = torch.ones(9)
    freed.untyped_storage().resize_(0)
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, {"there": torch.ones(9), "other": torch.ones(9)})
        for other in (torch.ones(9, device="meta"), freed):
            there = torch.zeros(9)
            with pytest.raises(Unsupported, match="'other'"):
                store.get(1, {"there": there, "other": other})
            with pytest.raises(Unsupported, match="'other'"):
                store.publish(2, {"there": there, "other": other})
            assert float(there.sum()) == 0
        with pytest.raises(Mismatch, match="float32"):
            store.get(1, {"there": torch.zeros(9), "other": torch.zeros(9, dtype=torch.int32)})
        assert store.versions() == [1]
