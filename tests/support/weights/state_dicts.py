"""State dicts for tests: strategies that draw them, and an exact comparison."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from holdfast.store import WeightStore

Tensor = torch.Tensor

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2, torch.uint16, torch.int1, torch.int4, torch.uint4, torch.uint7,
]  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, in order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize)
    plain = tensor.view(width) if width else tensor
    return bytes(torch.empty(plain.shape, dtype=plain.dtype).copy_(plain).view(-1).view(torch.uint8).numpy())


def same(one: Any, other: Any) -> bool:
    """Whether two state dicts are equal to the bit and the type; mappings are equal to dicts."""
    if isinstance(one, Tensor):
        kinds = (isinstance(one, nn.Parameter), one.requires_grad, one.dtype, one.shape)
        return kinds == (isinstance(other, nn.Parameter), other.requires_grad, other.dtype, other.shape) and (
            bits(one) == bits(other)
        )
    if isinstance(one, dict):
        return (
            type(other) is dict
            and [(type(key), repr(key)) for key in one] == [(type(key), repr(key)) for key in other]
            and all(map(same, one.values(), other.values()))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    return bool(one == other)


def weights(value: float = 1.0, size: int = 1000) -> dict[str, Tensor]:
    """Two tensors of two dtypes, of which all elements have one value."""
    return {"a": torch.full((size,), float(value)), "b": torch.full((3, 5), float(value), dtype=torch.float64)}


def value_in(store: WeightStore, version: int, size: int = 1000) -> float:
    """The one value that all elements of a version of `weights` have."""
    into = weights(-1, size)
    assert store.get(version, into, timeout=10) == version
    return value_of(into)


def of_many_dtypes() -> dict[str, Tensor]:
    """Tensors of each dtype that safetensors has, of odd shapes, and some that need more than one file."""
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    eights = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
    signed = (torch.int8, torch.int16, torch.int32, torch.int64)
    unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    state = {str(dtype): torch.randn(13, 3).abs().to(dtype) for dtype in (*floats, *eights, *signed, *unsigned)}
    layers = {f"layers.{number}.weight": torch.randn(100, 200) for number in range(12)}
    odd = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "bool": torch.rand(7) > 0.5}
    return {**state, **layers, **odd}


def odd_tensors(seed: int) -> dict[str, Tensor]:
    """Unusual tensors, the same in every process; the layout keeps small and large ones apart, and reads differ."""
    torch.manual_seed(seed)
    state: dict[str, Tensor] = {
        "a scalar": torch.randn(()),
        "nothing": torch.empty(0, 3),
        "one element of a stride": torch.randn(4)[2::4],
        "expanded": torch.randn(2).expand(5, 2),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    for side in (3, 80):
        state[f"{side} filters"] = torch.randn(side, side, 3, 3).to(memory_format=torch.channels_last)
    for size in (5, 70_000):
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
            f"{size} transposed": torch.randn(2, size).t(),
            f"{size} float8, strided": pairs.to(torch.float8_e4m3fn)[:, 1],
            f"{size} unsigned, strided": pairs.view(torch.uint32)[:, 0],
            f"{size} parameter": nn.Parameter(torch.randn(size)),
            f"{size} leaf": torch.randn(size).requires_grad_(),
            f"{size} inferred": inferred,
        }
    return state


def odd_targets() -> dict[str, Tensor]:
    """Tensors of the same layout as those of `odd_tensors`, with other content; what is expanded cannot be filled."""
    return odd_tensors(99) | {"expanded": torch.zeros(5, 2)}


def a_llama(tied: bool) -> Any:
    """A small language model of transformers; skips the test without them."""
    transformers = pytest.importorskip("transformers", reason="pip install 'holdfast[rl]'")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def value_of(state: Mapping[str, Tensor]) -> float:
    """The one value that all elements have."""
    (value,) = {float(value) for tensor in state.values() for value in tensor.detach().unique()}
    return value


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of many dtypes and shapes, some of them Parameters or leaves."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.empty(shape, dtype=dtype)
    raw = torch.tensor(list(draw(st.binary(min_size=made.nbytes, max_size=made.nbytes))), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    if made.nbytes:
        made = raw.view(dtype).view(shape)
    kind = draw(st.sampled_from(["tensor", "leaf", "parameter", "frozen parameter"]))
    if kind == "tensor" or (kind != "frozen parameter" and not (dtype.is_floating_point or dtype.is_complex)):
        return made
    return made.requires_grad_() if kind == "leaf" else nn.Parameter(made, requires_grad=kind == "parameter")


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1 << 200)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from(DTYPES)
    | st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
)
_word = st.text("abc", min_size=1, max_size=2)
_inner_keys = _word | st.integers(-(1 << 63), (1 << 63) - 1) | st.booleans() | st.none() | st.floats(allow_nan=False)


def state_dicts(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[dict[str, Any]]:
    """Nested state dicts with tensors and values; names may clash."""
    nested = st.recursive(
        leaves if leaves is not None else tensors() | values,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(_inner_keys, inner, max_size=3)
        ),
        max_leaves=12,
    )
    return st.dictionaries(_word, nested, max_size=4)


def named_leaves(state: Any, name: str = "") -> list[str]:
    """The dotted names of all tensors and values; a tuple without tensors is one value."""
    if type(state) not in (dict, list, tuple) or (type(state) is tuple and not holds_tensors(state)):
        return [name]
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    return [leaf for key, item in pairs for leaf in named_leaves(item, f"{name}.{key}" if name else str(key))]


def holds_tensors(state: Any) -> bool:
    if type(state) in (dict, list, tuple):
        return any(map(holds_tensors, state.values() if isinstance(state, dict) else state))
    return isinstance(state, Tensor)
