"""What a version is read into is checked as a whole: one error with all faults, before anything changes."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.store.data.manifest import TensorEntry
from holdfast.store.data.state_dicts import decode, flatten, flatten_targets
from holdfast.store.read.targets import assign, check_targets, check_writable
from support.samples.scaled_tensor import Rounding, scaled
from support.weights.state_dicts import named_leaves, same, state_dicts, values


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


def test_nothing_changes_when_there_is_a_fault() -> None:
    into = {"step": 1, "nested": {"lr": 0.5}, "a": torch.ones(3)}
    with pytest.raises(Mismatch, match=r"float32\[4\]"):
        check({"step": 2, "nested": {"lr": 0.1}, "a": torch.ones(4)}, into)
    assert into["step"] == 1 and into["nested"] == {"lr": 0.5}


def test_a_version_may_have_more_than_is_wanted() -> None:
    into: dict[str, Any] = {"a": torch.ones(4), "step": 0}
    check({**WEIGHTS, "step": 7, "lr": 0.1}, into, strict=False)
    assert into["step"] == 7 and "lr" not in into
    with pytest.raises(Mismatch, match="no 'c'"):
        check(WEIGHTS, {"c": torch.ones(1)}, strict=False)


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


def test_one_target_for_two_tensors_is_refused_unless_they_are_tied_or_equal() -> None:
    memory = torch.zeros(4)
    into = {"embedding": memory, "head": memory}
    apart = {"embedding": torch.ones(4), "head": torch.zeros(4)}
    with pytest.raises(Mismatch, match=r"'embedding' and 'head' of `into` share memory.*clone one of them"):
        check(apart, into)
    check(apart, into, equal=lambda one, other: {one, other} == {"embedding", "head"})
    tied = torch.ones(4)
    check({"embedding": tied, "head": tied}, into)


def test_a_tied_version_fits_targets_that_are_not_tied() -> None:
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


def test_values_that_cannot_be_assigned_are_refused_unless_they_are_equal() -> None:
    frozen = MappingProxyType({"lr": 0.1})
    check({"a": {"lr": 0.1}, "b": (1, 2)}, {"a": frozen, "b": (3, 4)})
    with pytest.raises(Mismatch, match=r"'a\.lr' of `into` is in a mappingproxy, which cannot be changed"):
        check({"a": {"lr": 0.2}}, {"a": frozen})


def test_missing_and_extra_values_are_reported_like_tensors() -> None:
    version = {"lr": 0.1, "groups": [1, 2, 3]}
    with pytest.raises(Mismatch, match=r"2 faults: the version has no 'x'; the version also has 'groups\.2'"):
        check(version, {"lr": 0.5, "groups": [4, 5], "x": None})
    check(version, {"lr": 0.5}, strict=False)
