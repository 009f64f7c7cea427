"""Tensors in memory that others access, or that share it with each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.comms import Communicator, RegionGone, memory
from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.ft.state import transfer
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import on_each_rank
from holdfast.store import WeightStore

COUNT = 1 << 16
PLANES = ["inproc", "shm", "ucx", "nixl"]


@pytest.fixture(scope="module", params=["inproc", "shm", "ucx", "mpi"])
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(2, request.param) as cluster:
        cluster.warm_up()
        yield cluster


def give_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((5,), 9.0)


def set_other(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((2 * COUNT,), 9.0))


def set_same_size(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((COUNT,), 9.0))


def shrink(tensor: torch.Tensor) -> None:
    tensor.resize_(3)


CHANGES = [give_data, set_other, set_same_size, shrink]


def refuses_to_be_resized(tensor: torch.Tensor) -> None:
    for resize in (
        lambda: tensor.untyped_storage().resize_(0),
        lambda: tensor.untyped_storage().resize_(8 * tensor.nbytes),
        lambda: tensor.resize_(2 * COUNT),
    ):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize()


@pytest.mark.parametrize("change", CHANGES)
def test_a_window_is_closed_when_its_tensor_gets_other_memory(
    ranks: LocalCluster, change: Callable[[torch.Tensor], None]
) -> None:
    def body(comm: Communicator) -> None:
        tensor = torch.full((COUNT,), 2.0)
        window = comm.window(tensor)
        comm.barrier()
        kept = []
        if comm.rank == 1:
            refuses_to_be_resized(tensor)
            change(tensor)
            kept = [torch.full((COUNT,), -1.0) for _ in range(8)]
        comm.barrier()
        if comm.rank == 0:
            got = torch.zeros(COUNT)
            with contextlib.suppress(RegionGone):  # the backend's thread may have closed the window already
                window.put(torch.full((COUNT,), 5.0), 1)
                window.get(got, 1)
                assert bool((got == 5.0).all())
        comm.barrier()
        if comm.rank == 1:
            assert all(bool((each == -1.0).all()) for each in kept)
            with pytest.raises(RegionGone, match=r"other memory .*copy_"):
                window.get(torch.zeros(1), 0)
            assert window.closed
            with pytest.raises(RegionGone, match="this rank has closed"):
                window.get(torch.zeros(1), 0)
            if change is not shrink:
                assert bool((tensor == 9.0).all())
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(RegionGone, match="rank 1 has closed"):
                window.get(torch.zeros(1), 1)
        comm.barrier()
        window.close()
        comm.barrier()

    ranks.run(body)


@on_each_rank
def test_the_tensor_of_a_closed_window_can_be_used_as_before(comm: Communicator) -> None:
    tensor = torch.full((COUNT,), 2.0)
    with comm.window(tensor):
        comm.barrier()
        if comm.rank == 1:
            tensor.data = torch.full((5,), 9.0)
        comm.barrier()
    assert bool((tensor == (9.0 if comm.rank == 1 else 2.0)).all())
    tensor.resize_(2 * COUNT) if comm.rank == 1 else tensor.add_(1)
    comm.barrier()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PLANES)
def test_a_region_is_closed_when_its_tensor_gets_other_memory(
    name: str, change: Callable[[torch.Tensor], None]
) -> None:
    with memory(name) as plane:
        tensor = torch.full((COUNT,), 2.0)
        region = plane.expose(tensor, writable=True)
        handle = region.handle
        refuses_to_be_resized(tensor)
        change(tensor)
        kept = [torch.full((COUNT,), -1.0) for _ in range(8)]
        got = torch.zeros(COUNT)
        plane.read(handle, got).wait()
        assert bool((got == 2.0).all())
        plane.write(handle, torch.full((COUNT,), 5.0)).wait()
        assert all(bool((each == -1.0).all()) for each in kept)
        with pytest.raises(RegionGone, match=r"other memory .*copy_"):
            assert region.handle
        with pytest.raises(RegionGone):
            plane.read(handle, got).wait()
        assert region.handle == handle, "a closed region keeps its handle"
        region.close()


class Named(torch.nn.Parameter):
    """A subclass, like the parameters of many libraries."""


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_exposed_memory_of_any_kind_keeps_its_size(kind: torch.dtype) -> None:
    for tensor in (
        torch.zeros(10, dtype=kind),
        torch.zeros(10, dtype=kind)[2:5],
        Named(torch.zeros(10, dtype=kind), requires_grad=kind.is_floating_point),
        torch.zeros(0, dtype=kind),
    ):
        exposed = ExposedMemory(tensor)
        with pytest.raises(RuntimeError):
            tensor.untyped_storage().resize_(1 << 20)
        assert not exposed.moved
        tensor.data = torch.zeros(3, dtype=kind)
        assert exposed.moved


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
