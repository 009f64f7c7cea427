"""Skeletons come from other processes: any bytes give a valid skeleton or `CorruptData`, and parts are merged.

Tensor subclasses travel as their inner tensors, and come back as the class that this process has imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.comms.errors import CorruptData, Mismatch, Unsupported
from holdfast.store import CorruptVersion, WeightStore
from holdfast.store.data.state_dicts import Skeleton, decode, encode, flatten, flatten_targets, merge, rebuild
from support.mutations import damages, mutated
from support.samples import scaled_tensor
from support.samples.scaled_tensor import Recipe, Rounding, ScaledTensor, scaled
from support.weights.layouts import as_rank
from support.weights.peers import make_importable
from support.weights.state_dicts import bits, named_leaves, same, state_dicts

tied = torch.ones(2)
STATE: dict[str, Any] = {
    "model": {"w": nn.Parameter(torch.ones(3)), "head": tied, "embedding": tied},
    "opt": {0: {"step": torch.tensor(3.0), "big": 1 << 90}, "betas": (0.9, complex(1, 2)), "list": [None, b"x", "y"]},
    "dtype": torch.bfloat16,
    "size": torch.Size([3, 4]),
}


def check_usable(skeleton: Skeleton) -> None:
    """A skeleton that was accepted can be encoded, rebuilt and digested, or refuses its tensors with a typed error."""
    assert decode(encode(skeleton.root)) == skeleton
    assert len(skeleton.digest) == 16
    try:
        rebuild(skeleton, dict.fromkeys(skeleton.tensors, torch.ones(1)))
    except (CorruptData, Unsupported, Mismatch):
        pass


@given(st.lists(damages, min_size=1, max_size=4))
def test_a_mutated_skeleton_is_refused_or_is_one_of_another_state(changes: list[tuple[str, int, int]]) -> None:
    data = flatten(STATE).skeleton
    for damage in changes:
        data = b"".join(mutated([data], *damage)) or b"\0"
    try:
        check_usable(decode(data))
    except CorruptData:
        pass


_nodes = st.recursive(
    st.sampled_from([["v", 1], ["v", "x"], ["T", 0], ["T", 3], ["=", "a", 0], ["=", "b.c", 1], ["i", "ff"], ["i", "?"]])
    | st.sampled_from([["n", "<f8", b"12345678"], ["n", "O", b""], ["y", "torch.float32"], ["y", "os.system"]])
    | st.sampled_from([["e", "os:X", "Y"], ["z", [1, -2]], ["b", b"1"], ["c", 1.0, 2.0]]),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: ["l", items])
        | st.lists(inner, max_size=2).map(lambda items: ["t", items])
        | st.tuples(st.lists(st.sampled_from(["a", "b", "c", 1, True]), max_size=2), st.lists(inner, max_size=2)).map(
            lambda pair: ["d", *pair]
        )
        | st.tuples(inner, inner, st.sampled_from(["torch.nn:Parameter", "os:system", "torch:Tensor", "x:", ":"])).map(
            lambda three: ["w", three[2], ["p"], [three[0]], three[1], [2], [1], 0]
        )
        | inner.map(lambda item: ["r", "torch:Size", ["x"], [item]])
    ),
    max_leaves=8,
)


@given(st.lists(_nodes, max_size=3))
def test_forged_trees_are_refused_or_usable(nodes: list[Any]) -> None:
    root = ["d", [str(number) for number in range(len(nodes))], nodes]
    try:
        check_usable(decode(msgspec.msgpack.encode(["state dict 1", root])))
    except CorruptData:
        pass


@pytest.mark.parametrize(
    ("root", "words"),
    [
        (["l", []], "not the skeleton"),
        (["d", ["a"], []], "do not fit together"),
        (["d", ["a", "a"], [["T", 0], ["T", 0]]], "do not fit together"),
        (["d", [1, True], [["T", 0], ["T", 0]]], "do not fit together"),
        (["d", ["a.b", "a"], [["T", 0], ["d", ["b"], [["T", 0]]]]], "has 'a.b' twice|a name twice"),
        (["d", ["a.b", "a"], [["T", 0], ["d", ["b"], [["v", 1]]]]], "a name twice"),
        (["d", ["a"], [["=", "b", 0]]], "'a' is tied to 'b', which is no tensor"),
        (["d", ["a"], [["T", 4]]], "not the skeleton"),
        (["d", ["a"], [["e", "enum:Enum", "X"]]], "outside of a subclass"),
        (["d", ["a"], [["y", "torch.nonsense"]]], "not a dtype"),
        (["d", ["a"], [["w", "torch:Tensor", ["p"], [["v", 1]], ["v", 1], [2], [1], 0]]], "no tensor"),
        (["d", ["a"], [["w", "torch:Tensor", ["p"], [["T", 0]], ["T", 0], [2], [1], 0]]], "a tensor in the context"),
        (["d", ["a"], [["w", "torch:Tensor", ["p"], [["T", 0]], ["v", 1], [2], [], 0]]], "impossible shape"),
    ],
)
def test_a_forged_tree_is_refused_with_the_reason(root: Any, words: str) -> None:
    with pytest.raises(CorruptData, match=words):
        decode(msgspec.msgpack.encode(["state dict 1", root]))


@pytest.mark.parametrize("levels", [201, 100_000])
def test_the_depth_of_a_skeleton_is_bounded(levels: int) -> None:
    def packed(inner: bytes, levels: int) -> bytes:
        return b"\x92\xa1l\x91" * levels + inner

    data = msgspec.msgpack.encode(["state dict 1", ["d", ["a"], [0]]])[:-1]
    with pytest.raises(CorruptData):
        decode(data + packed(msgspec.msgpack.encode(["v", 1]), levels))


def test_a_state_dict_of_the_greatest_depth_is_decoded() -> None:
    state: dict[str, Any] = {"a": torch.ones(1)}
    for _ in range(199):
        state = {"a": state}
    flat = flatten(state)
    assert same(rebuild(flat.skeleton, flat.published), state)


@pytest.mark.parametrize("name", ["this:Tensor", "builtins:print", "torch:Tensor", "torch.nn:Module", "os:system"])
def test_a_class_that_is_no_imported_tensor_subclass_is_neither_imported_nor_called(name: str) -> None:
    """`this` would be importable, and was not imported."""
    assert "this" not in sys.modules
    node = ["w", name, ["p"], [["T", 0]], ["v", None], [1], [1], 0]
    skeleton = decode(msgspec.msgpack.encode(["state dict 1", ["d", ["a"], [node]]]))
    with pytest.raises(Unsupported, match=rf"'a' is a {name}, .* not imported as a tensor subclass.*; import"):
        rebuild(skeleton, {"a.p": torch.ones(1)})
    assert "this" not in sys.modules


def test_tensors_that_are_missing_or_do_not_suit_their_place_are_named() -> None:
    flat = flatten({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(CorruptData, match="tensor 'b', which is not there"):
        rebuild(flat.skeleton, {"a": torch.ones(1)})
    skeleton = flatten({"a": nn.Parameter(torch.ones(1))}).skeleton
    with pytest.raises(CorruptData, match=r"'a' of torch\.int64 requires grad"):
        rebuild(skeleton, {"a": torch.ones(1, dtype=torch.int64)})
    flat = flatten({"w": scaled(2.0)})
    halves = {name: tensor.half() for name, tensor in flat.tensors.items()}
    with pytest.raises(Mismatch, match="ScaledTensor here cannot be made of the inner tensors of 'w'"):
        rebuild(flat.skeleton, halves)


# -- parts


def merged(*parts: dict[str, Any]) -> Skeleton:
    return merge([decode(flatten(part).skeleton) for part in parts])


@given(state_dicts(), st.data())
def test_a_state_dict_divided_among_parts_is_one_again(state: dict[str, Any], data: st.DataObject) -> None:
    try:
        whole = decode(flatten(state).skeleton)
    except ValueError:
        return
    owners = {key: data.draw(st.integers(0, 2)) for key in state}
    parts = [{key: state[key] for key in state if owners[key] in (part, 2)} for part in range(2)]
    assert merged(*parts).digest == whole.digest


def test_dicts_of_parts_are_united_at_every_level_and_what_disagrees_is_refused_with_all_names() -> None:
    one = {"model": {"layers": {"0": torch.ones(1)}}, "step": 5}
    other = {"model": {"layers": {"1": torch.ones(1)}, "head": torch.ones(2)}, "step": 5}
    skeleton = merged(one, other)
    assert list(skeleton.tensors) == ["model.layers.0", "model.layers.1", "model.head"]
    one = {"step": 5, "lr": float("nan"), "w": torch.ones(1), "list": [1, 2], "opt": [torch.ones(1), "x"]}
    other = {"step": 6, "lr": float("nan"), "w": 3, "list": [1], "opt": [torch.ones(1), "y"]}
    with pytest.raises(Mismatch, match=r"4 faults: 'step' in part 1.*'w' .*'list' .*'opt\.1' in part 1 of the version"):
        merged(one, other)
    shared = torch.ones(1)
    skeleton = merged({"a": shared, "b": shared}, {"a": torch.ones(1), "b": torch.ones(1)})
    assert not skeleton.ties and list(skeleton.tensors) == ["a", "b"]


def test_subclasses_within_subclasses_are_taken_apart_and_restored_without_a_call_of_their_dataclasses() -> None:
    nested = ScaledTensor(scaled(2.0), torch.ones(1), None)  # type: ignore[arg-type]
    flat = flatten({"w": nested})
    assert list(flat.tensors) == ["w.inner.inner", "w.inner.scale", "w.scale"]
    again = rebuild(flat.skeleton, flat.published)["w"]
    assert type(again.inner) is ScaledTensor and again.inner.recipe == nested.inner.recipe
    flat = flatten({"weight": scaled(2.0)})
    scaled_tensor.constructed.clear()
    assert rebuild(flat.skeleton, flat.published)["weight"].recipe.block == (1, 3)
    assert scaled_tensor.constructed == []


def test_a_context_that_cannot_travel_and_a_class_that_is_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    for context, words in [(object(), "it has a object"), (Local(1), "it has a Local"), ([{1, 2}], "it has a set")]:
        tensor = ScaledTensor(torch.ones(2), torch.ones(1), context)
        with pytest.raises(TypeError, match=f"'a.w' is a ScaledTensor whose context cannot travel: {words}"):
            flatten({"a": {"w": tensor}})
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


# -- what a store's readers get


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
