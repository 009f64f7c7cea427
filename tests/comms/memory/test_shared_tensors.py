"""Tensors that share memory, filled by name: each gets its bytes, or nothing changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.overlap import groups_sharing_memory, overlaps_itself, span
from holdfast.ft.state import transfer
from holdfast.store import WeightStore

Tensor = torch.Tensor
BASE, MEMORY = 64, 1024
"""The range of bytes in which views begin, and the size of the memory that holds them."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightStore]:
    with WeightStore(f"memory://{tmp_path_factory.mktemp('store')}") as opened:
        yield opened


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of the first bytes of some memory: (dtype, shape, strides, offset); elements may coincide."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]))
    elements = BASE // dtype.itemsize
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(1, 6)) for _ in shape]
    reach = sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    offset = draw(st.integers(0, max(elements - 1 - reach, 0)))
    memory = torch.zeros(MEMORY, dtype=torch.uint8).view(dtype)
    return memory.as_strided(shape, strides, offset)


def over(memory: Tensor, like: Tensor) -> Tensor:
    return memory.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def bits(tensor: Tensor) -> bytes:
    return bytes(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8).numpy())


version = iter(range(1 << 30))


@given(st.lists(views(), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**31))
def test_views_of_one_base_all_get_their_bytes_or_nothing_changes(
    store: WeightStore, kinds: list[Tensor], agreeing: bool, seed: int
) -> None:
    """With `agreeing`, the version was also published from views of one base: equal addresses get equal bytes."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 3, (MEMORY,), dtype=torch.uint8, generator=generator)
    state = {}
    for number, kind in enumerate(kinds):
        own = torch.randint(0, 3, (MEMORY,), dtype=torch.uint8, generator=generator)
        state[f"view {number}"] = over(content if agreeing else own, kind).clone()
    number = next(version)
    store.publish(number, state)
    memory = torch.full((MEMORY,), 7, dtype=torch.uint8)
    into = {name: over(memory, kind) for name, kind in zip(state, kinds, strict=True)}
    try:
        store.get(number, into)
    except Mismatch as error:
        assert "share memory" in str(error) and not agreeing
        assert bool((memory == 7).all())
    else:
        assert [name for name in state if bits(into[name]) != bits(state[name])] == []


@given(st.lists(views(), min_size=1, max_size=4))
def test_tensors_outside_all_groups_have_no_byte_in_common(kinds: list[Tensor]) -> None:
    memory = torch.zeros(MEMORY, dtype=torch.uint8)
    into = {str(number): over(memory, kind) for number, kind in enumerate(kinds)}
    together = {name for group in groups_sharing_memory(into) for name in group}
    alone = [each for name, each in into.items() if name not in together and each.numel()]
    for each in alone:
        first, last = span(each)
        assert memory.data_ptr() <= first < last <= memory.data_ptr() + memory.nbytes
        assert not overlaps_itself(each)
    taken = [place for each in alone for place in places(each)]
    assert len(taken) == len(set(taken))


def places(tensor: Tensor) -> list[int]:
    """The address of every byte of a tensor."""
    addresses = [tensor.data_ptr()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = [at + step * stride * tensor.itemsize for at in addresses for step in range(size)]
    return [at + byte for at in addresses for byte in range(tensor.itemsize)]


@pytest.mark.parametrize("size", [10, 300_000], ids=["small", "large"])
def test_tied_weights_are_filled_if_the_version_has_equal_bytes_for_them(store: WeightStore, size: int) -> None:
    tied = torch.zeros(size)
    into = {"embedding": tied, "head": tied, "other": torch.zeros(3)}
    alike, apart = next(version), next(version)
    store.publish(alike, {"embedding": torch.ones(size), "head": torch.ones(size), "other": torch.ones(3)})
    store.publish(apart, {"embedding": torch.ones(size), "head": torch.full((size,), 2.0), "other": torch.ones(3)})
    with pytest.raises(Mismatch, match=r"'embedding' and 'head' of `into` share memory.*clone one of them"):
        store.get(apart, into)
    assert all(float(each.sum()) == 0 for each in into.values())
    store.get(alike, into)
    assert all(bool((each == 1).all()) for each in into.values())


def test_views_that_interleave_without_a_common_byte_are_filled(store: WeightStore) -> None:
    state = {"left": torch.randn(500, 300), "right": torch.randn(500, 400), "conjugate": torch.randn(5, 2).cfloat()}
    base, pairs = torch.zeros(500, 700), torch.zeros(5, 2, dtype=torch.complex64)
    number = next(version)
    store.publish(number, state)
    store.get(number, {"left": base[:, :300], "right": base[:, 300:], "conjugate": pairs.conj()})
    assert torch.equal(base, torch.cat([state["left"], state["right"]], 1))
    assert torch.equal(pairs.conj(), state["conjugate"])


def test_a_real_part_and_its_whole_agree_or_are_refused(store: WeightStore) -> None:
    whole = torch.randn(9, dtype=torch.complex64)
    number, wrong = next(version), next(version)
    store.publish(number, {"whole": whole, "negated": -whole.imag.clone()})
    store.publish(wrong, {"whole": whole, "negated": whole.imag.clone()})
    into = torch.zeros(9, dtype=torch.complex64)
    targets = {"whole": into, "negated": into.conj().imag}
    with pytest.raises(Mismatch, match="share memory"):
        store.get(wrong, targets)
    store.get(number, targets)
    assert torch.equal(into, whole)


def test_a_session_refuses_a_state_with_other_tied_weights_than_its_model() -> None:
    def model(tied: bool) -> nn.Module:
        made = nn.ModuleDict({"embedding": nn.Embedding(7, 5), "head": nn.Linear(5, 7, bias=False)})
        if tied:
            made["head"].weight = made["embedding"].weight
        return made

    ours, before = model(True), model(False)
    optimizer = torch.optim.AdamW(ours.parameters())
    before.load_state_dict(ours.state_dict())
    attached = {"optimizer": optimizer, "model": ours}
    with pytest.raises(Mismatch, match=r"'embedding.weight' and 'head.weight' of 'model' share memory"):
        transfer.load({"optimizer": optimizer.state_dict(), "model": model(False).state_dict()}, attached)
    assert torch.equal(ours.state_dict()["head.weight"], before.state_dict()["head.weight"])
    theirs = model(True).state_dict()
    transfer.load({"optimizer": optimizer.state_dict(), "model": theirs}, attached)
    assert torch.equal(ours.state_dict()["head.weight"], theirs["embedding.weight"])
