"""A state dict taken apart into tensors and a skeleton is put together as it was, with unusual tensors too.

What a version is read into is checked as a whole: one error with all faults, before anything changes.
"""

from __future__ import annotations

import collections
import mmap
import types
import warnings
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.store import WeightStore
from holdfast.store.data.manifest import TensorEntry
from holdfast.store.data.state_dicts import decode, flatten, flatten_targets, rebuild
from holdfast.store.read.targets import assign, check_targets, check_writable
from support.children import Start
from support.samples.scaled_tensor import Rounding, scaled
from support.samples.store_processes import Holders, a_publisher
from support.weights.state_dicts import bits, named_leaves, odd_targets, odd_tensors, same, state_dicts, values


@given(state_dicts(), st.randoms())
def test_the_digest_of_a_skeleton_does_not_depend_on_the_order_of_dicts(state: dict[str, Any], random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = list(value)
            random.shuffle(keys)
            return {key: shuffled(value[key]) for key in keys}
        return type(value)(map(shuffled, value)) if type(value) in (list, tuple) else value

    names = named_leaves(state)
    if len(set(names)) == len(names):
        one, other = flatten(state), flatten(shuffled(state))
        assert decode(one.skeleton).digest == decode(other.skeleton).digest
        assert one.published.keys() == other.published.keys()


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
    freed = torch.ones(9)
    freed.untyped_storage().resize_(0)
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
        ({"a": torch.ones(3, device="meta")}, Unsupported, "'a' is a meta tensor"),
        ({"a": nested}, Unsupported, "'a' is a nested.*unbind"),
        ({"a": nn.UninitializedParameter()}, Unsupported, "'a' is a"),
        ({"a": freed}, Unsupported, "'a'"),
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


def test_odd_tensors_outlive_their_publisher_bit_for_bit(url: str, holders: Holders, start: Start) -> None:
    holders(2)
    publisher = start(a_publisher, url, 1, partial(odd_tensors, 1), "published")
    publisher.hear()
    publisher.kill()
    expected, into = odd_tensors(1), odd_targets()
    with WeightStore(url, hold=False) as store:
        assert store.get(1, into) == 1
    assert [name for name in expected if bits(into[name]) != bits(expected[name])] == []


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_targets_are_filled_in_whatever_mode_they_and_the_caller_are(
    tmp_path: Path, mode: Callable[..., object]
) -> None:
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, odd_tensors(1))
        into, expected = odd_targets(), odd_tensors(1)
        with mode():  # type: ignore[attr-defined]
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
    with pytest.raises(Unsupported, match=r"2 faults: 'meta' is a meta tensor.*; the version has no 'c'"):
        check({"meta": torch.ones(2)}, {"meta": torch.ones(2, device="meta"), "c": torch.ones(1)})


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
def test_targets_in_memory_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_answers: bool
) -> None:
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
