"""State dicts: taken apart into tensors and a skeleton, put together as they were, and checked as a whole as targets.

Skeletons come from other processes: any bytes give a valid skeleton or `CorruptData`, and parts are merged. Tensor
subclasses travel as their inner tensors, and come back as the class that this process has imported.
"""

from __future__ import annotations

import collections
import dataclasses
import mmap
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.comms.errors import CorruptData, Mismatch, Unsupported
from holdfast.store import CorruptVersion, WeightStore
from holdfast.store.data.manifest import TensorEntry
from holdfast.store.data.state_dicts import Skeleton, decode, encode, flatten, flatten_targets, merge, rebuild
from holdfast.store.read.targets import assign, check_targets, check_writable
from support.mutations import damages, mutated
from support.samples import scaled_tensor
from support.samples.scaled_tensor import Recipe, Rounding, ScaledTensor, scaled
from support.weights.layouts import as_rank
from support.weights.peers import site_of
from support.weights.state_dicts import bits, named_leaves, odd_targets, odd_tensors, same, state_dicts, values


def test_names_are_joined_with_dots_and_a_skeleton_is_little_more_than_them() -> None:
    flat = flatten({"model": {"layers": [{"w": torch.ones(1)}]}, "opt": {0: (torch.ones(3), 5)}})
    assert {name: len(tensor) for name, tensor in flat.tensors.items()} == {"model.layers.0.w": 1, "opt.0.0": 3}
    assert list(flat.values) == ["opt.0.1"]
    state = {f"layers.{number}.weight": torch.ones(4) for number in range(20_000)}
    flat = flatten(state)
    assert len(flat.skeleton) < sum(len(name) + 8 for name in state)
    again = rebuild(flat.skeleton, flat.published)
    assert list(again) == list(state) and all(again[name] is state[name] for name in state)


def test_tied_tensors_are_one_memory_again_whatever_they_are_made_of() -> None:
    tied, parameter = torch.randn(4, 5), nn.Parameter(torch.randn(3))
    state = {
        "c": [tied, {"b": tied.detach()}],
        "a": tied.view(4, 5),
        "transposed": tied.t(),
        "first row": tied[0],
        "parameter": parameter,
        "its data": parameter.data,
        "empty": (nothing := torch.empty(0, 3)),
        "empty, tied": nothing,
        "empty, apart": torch.empty(0, 3),
    }
    flat = flatten(state)
    assert flat.ties == {"c.0": "a", "c.1.b": "a", "parameter": "its data", "empty, tied": "empty"}
    again = rebuild(flat.skeleton, {name: tensor.clone() for name, tensor in flat.published.items()})
    assert again["c"][0] is again["a"] is again["c"][1]["b"] and again["empty"] is again["empty, tied"]
    assert again["parameter"].data_ptr() == again["its data"].data_ptr() and isinstance(
        again["parameter"], nn.Parameter
    )
    assert again["transposed"].data_ptr() != again["a"].data_ptr() != again["first row"].data_ptr()
    assert same(state, again)


def test_bumping_versions_tells_autograd_of_every_target() -> None:
    class Marked(torch.Tensor):
        pass

    weight, marked = nn.Parameter(torch.randn(3)), torch.randn(3).as_subclass(Marked)
    with torch.inference_mode():
        inferred = torch.ones(3)
    scale = torch.randn(3, requires_grad=True)
    stale = [(weight * scale).sum(), (marked * scale).sum()]
    flatten({"weight": weight, "marked": marked, "inferred": inferred}).bump_versions()
    for result in stale:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


def test_mappings_come_back_as_dicts_and_subclasses_of_values_as_their_type() -> None:
    class Text(str):
        __slots__ = ()

    state = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, x=[1]),
        "proxy": types.MappingProxyType({"y": 2}),
        "text": Text("t"),
        Text("key"): np.float32(1.5),
    }
    flat = flatten(state)
    again = rebuild(flat.skeleton, flat.published)
    assert again == {
        "ordered": {"b": 1, "a": 2}, "default": {"x": [1]}, "proxy": {"y": 2}, "text": "t", "key": np.float32(1.5)
    }  # fmt: skip
    assert [type(each) for each in again.values()] == [dict, dict, dict, str, np.float32]
    assert all(type(key) is str for key in again)


def refused() -> list[tuple[Any, type[Exception], str]]:
    class Colour(Enum):
        RED = 1

    class Pair(tuple[int, int]):
        __slots__ = ()

    endless: dict[str, Any] = {"x": 1}
    endless["again"] = [endless]
    deep: Any = 1
    for _ in range(250):
        deep = [deep]
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    return [
        ([torch.ones(1)], TypeError, "the state dict maps names to tensors; this is a list"),
        ({1: torch.ones(1)}, TypeError, "1: names in the state dict are strings, not int"),
        ({"a": {(1, 2): torch.ones(1)}}, TypeError, r"a\.\(1, 2\): names in the state dict are strings.*not tuple"),
        ({"a": {Colour.RED: 1}}, TypeError, "not Colour"),
        ({"a": {1 << 64: 1}}, ValueError, "more than 64 bits"),
        ({"a": [{}, {"b": object()}]}, TypeError, r"'a\.1\.b' is a object"),
        ({"a": Colour.RED}, TypeError, "'a' is a Colour: give its name or value"),
        ({"a": np.ones(3)}, TypeError, "'a' is a ndarray: give torch.from_numpy"),
        ({"a": {1}}, TypeError, "'a' is a set"),
        ({"a": Pair((1, 2))}, TypeError, "'a' is a Pair: give a plain tuple"),
        ({"a": print}, TypeError, "'a' is a builtin_function_or_method"),
        (endless, TypeError, "at most 200 levels"),
        ({"a": deep}, TypeError, "at most 200 levels"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, r"'a\.b' is in the state dict twice"),
        ({"a.b": torch.ones(1), "a": {"b": 3}}, ValueError, r"'a\.b' is in the state dict twice"),
        ({"a": {1: 2.0, "1": 3}}, ValueError, r"'a\.1' is in the state dict twice"),
        ({"\ud800": torch.ones(1)}, ValueError, r"'\\ud800', a name in the state dict, is not valid Unicode"),
        ({"a": ["\ud800"]}, ValueError, r"'a\.0' holds text that is not valid Unicode"),
        ({"a": torch.eye(3).to_sparse()}, Unsupported, r"'a' is a tensor of layout torch\.sparse_coo; .*to_dense"),
        ({"a": nested}, Unsupported, "'a' is a nested.*unbind"),
        ({"a": quantized}, Unsupported, r"'a' is a quantized tensor.*int_repr"),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("state", "kind", "words"), refused())
def test_what_no_state_dict_can_hold_is_refused_by_name(state: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        flatten(state)


def test_all_faults_are_in_one_error_and_its_class_is_that_of_the_worst() -> None:
    meta, clash = torch.ones(1, device="meta"), {"x.y": 1, "x": {"y": 2}}
    with pytest.raises(Unsupported, match=r"2 faults: 'a' is a meta tensor.*; 'b' is a meta"):
        flatten({"a": meta, "b": meta})
    with pytest.raises(ValueError, match=r"2 faults: 'a' is a meta tensor.*; 'x\.y' is in the state dict twice"):
        flatten({"a": meta, **clash})
    with pytest.raises(TypeError, match=r"3 faults: .*meta.*twice; 'z' is a object"):
        flatten({"a": meta, **clash, "z": object()})
    with pytest.raises(TypeError, match=r"11 faults: 'a0' .*'a7' is a object.*; and 3 more$") as caught:
        flatten({f"a{number}": object() for number in range(11)})
    assert "'a8'" not in str(caught.value) and not isinstance(caught.value, Mismatch)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_targets_are_filled_in_whatever_mode_they_and_the_caller_are(store: WeightStore, mode: Any) -> None:
    store.publish(1, odd_tensors(1))
    into, expected = odd_targets(), odd_tensors(1)
    with mode():
        store.publish(2, odd_tensors(1))
        for version in (1, 2):
            store.get(version, into)
    assert [name for name in expected if bits(into[name]) != bits(expected[name])] == []


# -- targets


def check(version: dict[str, Any], into: dict[str, Any], **options: Any) -> None:
    """Check that a version that `version` was published as can be read into `into`, and write its values."""
    flat = flatten(version)
    there = {
        name: TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), 0)
        for name, tensor in flat.published.items()
    }
    assign(check_targets(decode(flat.skeleton), there, flatten_targets(into), **options))


WEIGHTS = {"a": torch.ones(4), "b": torch.ones(3, 5)}


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({"a": torch.ones(4)}, r"^the version also has 'b', which was not asked for; give strict=False"),
        ({**WEIGHTS, "c": torch.ones(1)}, r"^the version has no 'c'$"),
        ({**WEIGHTS, "a": torch.ones(5)}, r"^the version has a float32\[4\], `into` has a float32\[5\]$"),
        ({**WEIGHTS, "a": torch.ones(4).half()}, r"the version has a float32\[4\], `into` has a float16\[4\]"),
        ({**WEIGHTS, "a": torch.ones(1).expand(4)}, r"^'a' of `into` is an expanded tensor"),
        ({**WEIGHTS, "a": 4}, r"^'a' is a tensor in the version, a int in `into`$"),
        ({**WEIGHTS, "a": [torch.ones(4)]}, r"no 'a\.0'; the version also has 'a'"),
    ],
)
def test_a_target_that_does_not_fit_is_named_with_the_reason(into: dict[str, Any], words: str) -> None:
    with pytest.raises(Mismatch, match=words):
        check(WEIGHTS, into)


def test_all_faults_are_in_one_error_of_the_worst_kind() -> None:
    into = {
        "a": torch.ones(5),
        "c": torch.ones(1),
        "meta": torch.ones(2, device="meta"),
        "sparse": torch.zeros(4).to_sparse(),
        "x": {1, 2},
        "lr": (1, torch.ones(1)),
    }
    version = {**WEIGHTS, "meta": torch.ones(2), "sparse": torch.ones(4), "x": 1.0, "lr": (2, torch.ones(1))}
    with pytest.raises(TypeError) as caught:
        check(version, into)
    message = str(caught.value)
    for words in (
        "7 faults", "'meta' is a meta tensor", "'sparse' is a tensor of layout",
        "'x' is a set", "float32[5]", "no 'c'", "also has 'b'",
        "'lr.0' of `into` is in a tuple, which cannot be changed",
    ):  # fmt: skip
        assert words in message
    assert "also has 'meta'" not in message and "also has 'x'" not in message


def test_a_state_dict_of_which_little_is_known_has_no_other_faults() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(TypeError, match=r"^a\.a\.a\..*at most 200 levels deep$"):
        check(WEIGHTS, endless)
    with pytest.raises(TypeError, match=r"^`into` maps names to tensors; this is a list$"):
        check(WEIGHTS, [torch.ones(4)])  # type: ignore[arg-type]


def test_nothing_changes_when_there_is_a_fault_of_a_tensor_or_of_a_value() -> None:
    into = {"step": 1, "nested": {"lr": 0.5}, "a": torch.ones(3)}
    with pytest.raises(Mismatch, match=r"float32\[4\]"):
        check({"step": 2, "nested": {"lr": 0.1}, "a": torch.ones(4)}, into)
    assert into["step"] == 1 and into["nested"] == {"lr": 0.5}
    frozen = MappingProxyType({"lr": 0.1})
    check({"a": {"lr": 0.1}, "b": (1, 2)}, {"a": frozen, "b": (3, 4)})
    with pytest.raises(Mismatch, match=r"'a\.lr' of `into` is in a mappingproxy, which cannot be changed"):
        check({"a": {"lr": 0.2}}, {"a": frozen})


def test_a_version_may_have_more_than_is_wanted_and_values_are_reported_like_tensors() -> None:
    into: dict[str, Any] = {"a": torch.ones(4), "step": 0}
    check({**WEIGHTS, "step": 7, "lr": 0.1}, into, strict=False)
    assert into["step"] == 7 and "lr" not in into
    with pytest.raises(Mismatch, match="no 'c'"):
        check(WEIGHTS, {"c": torch.ones(1)}, strict=False)
    version = {"lr": 0.1, "groups": [1, 2, 3]}
    with pytest.raises(Mismatch, match=r"2 faults: the version has no 'x'; the version also has 'groups\.2'"):
        check(version, {"lr": 0.5, "groups": [4, 5], "x": None})
    check(version, {"lr": 0.5}, strict=False)


# -- memory


def read_only_tensor(path: Path) -> torch.Tensor:
    """A tensor in a file that is mapped so that a write to it would end the process."""
    path.write_bytes(bytes(16))
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(mmap.mmap(file.fileno(), 16, prot=mmap.PROT_READ), dtype=torch.float32)


@pytest.mark.parametrize("kernel_answers", [True, False])
def test_read_only_targets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_answers: bool) -> None:
    """Kernels before 6.11 answer no question about one address; then the whole memory map is read."""
    if not kernel_answers:
        monkeypatch.setattr("holdfast.store.read.targets._PROCMAP_QUERY", 0)
    wrong = read_only_tensor(tmp_path / "weights")
    for _ in range(2):
        with pytest.raises(Mismatch, match=r"^'a' of `into` lies in memory that is mapped read-only; clone it$"):
            check(WEIGHTS, {**WEIGHTS, "a": wrong})
        check(WEIGHTS, {**WEIGHTS, "a": wrong.clone()})
    with pytest.raises(Mismatch, match="'a' of `into` lies in memory"):
        check({"a": torch.ones(2)}, {"a": wrong[::2]})


def test_targets_that_a_layout_fills_are_checked_for_their_memory(tmp_path: Path) -> None:
    check_writable(flatten_targets(WEIGHTS))
    into = {"a": torch.ones(3, device="meta"), "b": torch.ones(1).expand(3), "c": read_only_tensor(tmp_path / "c")}
    with pytest.raises(Unsupported, match=r"3 faults: 'a' is a meta.*; 'b' of .* expanded.*; 'c' of .*read-only"):
        check_writable(flatten_targets(into))


def test_one_target_for_two_tensors_is_refused_unless_they_are_tied_and_ties_may_be_filled_apart() -> None:
    memory = torch.zeros(4)
    into = {"embedding": memory, "head": memory}
    apart = {"embedding": torch.ones(4), "head": torch.zeros(4)}
    with pytest.raises(Mismatch, match=r"'embedding' and 'head' of `into` share memory.*clone one of them"):
        check(apart, into)
    check(apart, into, equal=lambda one, other: {one, other} == {"embedding", "head"})
    tied = torch.ones(4)
    check({"embedding": tied, "head": tied}, into)
    tied = torch.ones(4)
    version = {"embedding": tied, "head": tied}
    check(version, {"embedding": torch.zeros(4), "head": torch.zeros(4)})
    check(version, {"head": torch.zeros(4)}, strict=False)
    with pytest.raises(Mismatch, match="also has 'head'"):
        check(version, {"embedding": torch.zeros(4)})


# -- subclasses


@pytest.mark.parametrize(
    ("version", "into", "words"),
    [
        (scaled(1.0), torch.ones(2, 3), r"^'w' is a ScaledTensor\[2, 3\] of .* in the version, a plain tensor"),
        (torch.ones(2, 3), scaled(1.0), r"^'w' is a plain tensor in the version, a ScaledTensor\[2, 3\]"),
        (scaled(1.0), scaled(1.0, Rounding.STOCHASTIC), r"^'w' is a .*NEAREST.* in the version, a .*STOCHASTIC.*$"),
    ],
)
def test_subclasses_fit_only_their_like(version: torch.Tensor, into: torch.Tensor, words: str) -> None:
    with pytest.raises(Mismatch, match=words):
        check({"w": version}, {"w": into})
    check({"w": scaled(1.0)}, {"w": nn.Parameter(scaled(5.0), requires_grad=False)})


# -- values


@given(state_dicts(values))
def test_values_are_assigned_in_dicts_and_lists(state: dict[str, Any]) -> None:
    if len(set(named_leaves(state))) < len(named_leaves(state)):
        return

    def blank(value: Any) -> Any:
        """The same structure with other values; dicts, lists and tuples stay what they are."""
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        return [blank(item) for item in value] if type(value) is list else "blank"

    into = blank(state)
    check(state, into)
    assert same(into, state)


# -- skeletons of other processes


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
    with suppress(CorruptData, Unsupported, Mismatch):
        rebuild(skeleton, dict.fromkeys(skeleton.tensors, torch.ones(1)))


@given(st.lists(damages, min_size=1, max_size=4))
def test_a_mutated_skeleton_is_refused_or_is_one_of_another_state(changes: list[tuple[str, int, int]]) -> None:
    data = flatten(STATE).skeleton
    for damage in changes:
        data = b"".join(mutated([data], *damage)) or b"\0"
    with suppress(CorruptData):
        check_usable(decode(data))


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
    with suppress(CorruptData):
        check_usable(decode(msgspec.msgpack.encode(["state dict 1", root])))


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


def test_the_depth_of_a_skeleton_is_bounded_and_that_of_the_deepest_state_dict_decoded() -> None:
    data = msgspec.msgpack.encode(["state dict 1", ["d", ["a"], [0]]])[:-1]
    for levels in (201, 100_000):
        with pytest.raises(CorruptData):
            decode(data + b"\x92\xa1l\x91" * levels + msgspec.msgpack.encode(["v", 1]))
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
def test_a_state_dict_divided_among_parts_is_one_again_in_any_order(state: dict[str, Any], data: st.DataObject) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in data.draw(st.permutations(list(value)))}
        return type(value)(map(shuffled, value)) if type(value) in (list, tuple) else value

    try:
        whole = decode(flatten(state).skeleton)
    except ValueError:
        return
    owners = {key: data.draw(st.integers(0, 2)) for key in state}
    parts = [shuffled({key: state[key] for key in state if owners[key] in (part, 2)}) for part in range(2)]
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
    for gone, words in [
        ("ScaledTensor", r"'w' is a support\.samples\.scaled_tensor:ScaledTensor.*import support"),
        ("Recipe", r"'w' needs a dataclass support.*Recipe"),
        ("Rounding", r"'w' needs .*Rounding\.NEAREST"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(Unsupported, match=words):
            patch.delattr(scaled_tensor, gone)
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
    if (site := site_of("torchao")) is None:
        pytest.skip("needs torchao: make peers")
    if site:
        monkeypatch.syspath_prepend(site)
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
def test_dtypes_that_torch_cannot_compute_with_arrive_with_any_strides(store: WeightStore, dtype: torch.dtype) -> None:
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
def test_a_state_dict_is_loaded_as_published_unless_a_name_occurs_twice(tmp_path: Path, state: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("atomic", [True, False])
def test_a_get_that_fails_changes_nothing_if_atomic_or_says_what_is_mixed(store: WeightStore, atomic: bool) -> None:
    state = {name: torch.full((1 << 20,), 2.0) for name in ("first", "second", "third")}
    store.publish(1, state)
    (kept,) = store._replica_holder._kept.values()
    middle = kept.region.handle.nbytes // 2
    kept.memory[middle : middle + 8] ^= 255
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
