"""Tensor subclasses travel as their inner tensors, and come back as the class that this process has imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.store.data.skeleton import decode, rebuild
from holdfast.store.data.tree import flatten, flatten_targets
from support.samples import scaled_tensor
from support.samples.scaled_tensor import ScaledTensor, scaled
from support.weights.layouts import as_rank
from support.weights.peers import make_importable


def test_a_dataclass_of_a_context_is_restored_without_calling_it() -> None:
    flat = flatten({"weight": scaled(2.0)})
    scaled_tensor.constructed.clear()
    assert rebuild(flat.skeleton, flat.published)["weight"].recipe.block == (1, 3)
    assert scaled_tensor.constructed == []


def test_the_inner_tensors_of_a_target_are_the_targets_own_memory() -> None:
    target = scaled(1.0)
    flat = flatten_targets({"weight": target})
    flat.tensors["weight.scale"].fill_(7.0)
    assert bool((target.scale == 7).all())
    before = target._version
    flat.bump_versions()
    assert target._version > before and target.inner._version > 0


def test_subclasses_within_subclasses_are_taken_apart() -> None:
    nested = ScaledTensor(scaled(2.0), torch.ones(1), None)  # type: ignore[arg-type]
    flat = flatten({"w": nested})
    assert list(flat.tensors) == ["w.inner.inner", "w.inner.scale", "w.scale"]
    again = rebuild(flat.skeleton, flat.published)["w"]
    assert type(again.inner) is ScaledTensor and again.inner.recipe == nested.inner.recipe


def test_a_context_that_cannot_travel_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    for context, words in [(object(), "it has a object"), (Local(1), "it has a Local"), ([{1, 2}], "it has a set")]:
        tensor = ScaledTensor(torch.ones(2), torch.ones(1), context)
        with pytest.raises(TypeError, match=f"'a.w' is a ScaledTensor whose context cannot travel: {words}"):
            flatten({"a": {"w": tensor}})


def test_a_class_that_is_gone_is_named_with_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flatten({"w": scaled(2.0)})
    with monkeypatch.context() as patch:
        patch.delattr(scaled_tensor, "ScaledTensor")
        with pytest.raises(Unsupported, match=r"'w' is a support\.samples\.scaled_tensor:ScaledTensor.*import support"):
            rebuild(flat.skeleton, flat.published)
    with monkeypatch.context() as patch:
        patch.delattr(scaled_tensor, "Recipe")
        with pytest.raises(Unsupported, match=r"'w' needs a dataclass support.*Recipe"):
            rebuild(flat.skeleton, flat.published)
    with monkeypatch.context() as patch:
        patch.delattr(scaled_tensor, "Rounding")
        with pytest.raises(Unsupported, match=r"'w' needs .*Rounding\.NEAREST"):
            rebuild(flat.skeleton, flat.published)


def test_a_class_that_refuses_its_inner_tensors_is_a_mismatch() -> None:
    flat = flatten({"w": scaled(2.0)})
    halves = {name: tensor.half() for name, tensor in flat.tensors.items()}
    with pytest.raises(Mismatch, match="ScaledTensor here cannot be made of the inner tensors of 'w'"):
        rebuild(flat.skeleton, halves)


def torchao_models() -> Iterator[Any]:
    from torchao import quantization

    granularity = quantization.PerGroup(32)
    for config in (
        quantization.Int8WeightOnlyConfig(),
        quantization.Int8DynamicActivationInt8WeightConfig(),
        quantization.Float8WeightOnlyConfig(),
        quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity),
    ):
        model = nn.Sequential(
            nn.Linear(64, 64, dtype=torch.bfloat16), nn.ReLU(), nn.Linear(64, 32, dtype=torch.bfloat16)
        )
        quantization.quantize_(model, config)
        yield model


@pytest.mark.filterwarnings("ignore")
def test_models_quantized_by_torchao_compute_the_same_bits_after_the_journey(monkeypatch: pytest.MonkeyPatch) -> None:
    make_importable("torchao", monkeypatch)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for model, other, target in zip(torchao_models(), torchao_models(), torchao_models(), strict=True):
        flat = flatten(model.state_dict())
        assert all(type(tensor) is torch.Tensor for tensor in flat.tensors.values())
        assert any(name.endswith("weight.qdata") for name in flat.tensors)
        again = rebuild(flat.skeleton, {name: tensor.clone() for name, tensor in flat.published.items()})
        other.load_state_dict(again, assign=True)
        for name, inner in flatten_targets(target.state_dict()).tensors.items():
            inner.copy_(flat.tensors[name])
        assert torch.equal(model(x), other(x)) and torch.equal(model(x), target(x))


def test_dtensors_pass_untouched_also_within_a_subclass() -> None:
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        scale = DTensor.from_local(torch.ones(2, 1), mesh, [Replicate()])
        parameter = nn.Parameter(sharded.detach())
        state = {"w": sharded, "q": ScaledTensor(sharded, scale, None), "p": parameter, "again": sharded.detach()}
        flat = flatten(state)
        assert flat.tensors["w"] is sharded and flat.tensors["q.scale"] is scale and flat.tensors["p"] is parameter
        assert flat.ties == dict.fromkeys(["p", "q.inner", "w"], "again")
        versions = sharded._version, sharded.to_local()._version
        flat.bump_versions()
        assert sharded._version > versions[0] and sharded.to_local()._version > versions[1]


def test_every_rank_has_the_same_skeleton_and_ties_also_where_its_shards_are_empty() -> None:
    def skeleton_of(rank: int) -> bytes:
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            rows = 1 if rank < 2 else 0
            head = DTensor.from_local(torch.ones(rows, 3), mesh, [Shard(0)], shape=(2, 3), stride=(3, 1))
            apart = DTensor.from_local(torch.ones(rows, 3), mesh, [Shard(0)], shape=(2, 3), stride=(3, 1))
            flat = flatten({"embedding": head, "head": head.detach(), "apart": apart, "rank": "any"})
            assert flat.ties == {"head": "embedding"}
            return flat.skeleton

    assert len({skeleton_of(rank) for rank in range(4)}) == 1
    assert list(decode(skeleton_of(3)).tensors) == ["embedding", "apart"]
