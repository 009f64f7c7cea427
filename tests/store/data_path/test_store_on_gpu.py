"""Tensors on CUDA devices in the store. Needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.store import WeightStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_tensors_of_a_device_are_published_and_filled(tmp_path: Path) -> None:
    state = {"large": torch.randn(1 << 20, device="cuda"), "small": torch.arange(7, device="cuda")}
    state["transposed"] = torch.randn(30, 40, device="cuda").t()
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, state)
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        store.get(1, into)
        assert all(torch.equal(into[name], each) for name, each in state.items())
        loaded = store.load(1)
        assert all(torch.equal(loaded[name], each.cpu()) for name, each in state.items())


def test_what_is_queued_on_the_stream_before_a_publish_is_published(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 22, device="cuda")
    with WeightStore(f"memory://{tmp_path}") as store:
        for version in range(1, 6):
            for _ in range(50):
                weight.add_(1)
            store.publish(version, {"w": weight})
            weight.add_(0)
        assert store.load(5)["w"].unique().tolist() == [250.0]


def test_a_follower_swaps_staged_versions_into_tensors_of_a_device(tmp_path: Path) -> None:
    into = {"w": torch.zeros(1 << 20, device="cuda"), "small": torch.zeros(3, device="cuda")}
    with WeightStore(f"memory://{tmp_path}") as store:
        for version in range(1, 4):
            store.publish(version, {name: torch.full_like(each, version) for name, each in into.items()})
            with store.follow(into) as follower:
                assert follower.catch_up() == version
            assert into["w"].unique().tolist() == into["small"].unique().tolist() == [version]
