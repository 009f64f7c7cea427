"""Tensors without memory of their own are refused by name in every call; all others are accepted."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast import comms
from holdfast.comms import Communicator, ReduceOp, RegionGone, Revoked, _native, memory
from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.comms.onesided.shared_pages import HeldPages, SharedPages
from holdfast.comms.ops import Recv, Send
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.tensors.packing import check_memory, is_sparse, locate, packed, plain, plain_tensor, span, unpack
from holdfast.ft.state import transfer
from holdfast.ft.state.codec import encode_state
from holdfast.store import WeightStore
from holdfast.store.data.state_dicts import flatten
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import on_ranks, on_ranks_of, second_tier, shared_ranks

COUNT = 4


class Wrapper(torch.Tensor):
    """A subclass with its data in an inner tensor, like DTensor and AsyncCollectiveTensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, layout=inner.layout
        )
        made.inner = inner
        return made

    def to_local(self) -> torch.Tensor:
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a wrapper")


class Stubborn(torch.Tensor):
    """A subclass with memory that refuses torch functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a stubborn tensor")


class Tagged(torch.Tensor):
    """An ordinary subclass."""


class Named(torch.nn.Parameter):
    """A parameter subclass, as models use them to mark how a parameter is loaded."""


Make = Callable[[], torch.Tensor]


def holding(nbytes: int) -> torch.Tensor:
    """A tensor of 16 bytes with `nbytes` of storage, which are fewer."""
    tensor = torch.ones(COUNT)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(COUNT)


def of_vmap() -> torch.Tensor:
    seen: list[torch.Tensor] = []
    torch.vmap(lambda row: (seen.append(row), row)[1])(torch.ones(2, COUNT))
    return seen[0]


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(COUNT - 1)])


def sparse() -> torch.Tensor:
    return torch.ones(COUNT).to_sparse()


def wrapper() -> torch.Tensor:
    return Wrapper(torch.ones(COUNT))


MEMORYLESS: dict[str, Make] = {
    "freed": lambda: holding(0),
    "shortened": lambda: holding(4 * COUNT - 1),
    "fake": fake,
    "of vmap": of_vmap,
    "functional": lambda: torch._to_functional_tensor(torch.ones(COUNT)),  # type: ignore[no-any-return]
    "nested": nested,
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(COUNT - 1)], layout=torch.jagged),
    "sparse": sparse,
    "wrapper": wrapper,
    "uninitialized": torch.nn.UninitializedParameter,
    "zero": lambda: torch._efficientzerotensor(COUNT),
}


def tagged() -> torch.Tensor:
    return torch.ones(COUNT).as_subclass(Tagged)


def strided() -> torch.Tensor:
    return torch.ones(COUNT, 2)[:, 0]


WITH_MEMORY: dict[str, Make] = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(COUNT)),
    "named parameter": lambda: Named(torch.ones(COUNT)),
    "tagged": tagged,
    "stubborn": lambda: torch.ones(COUNT).as_subclass(Stubborn),
    "strided": strided,
    "of inference": torch.inference_mode()(lambda: torch.ones(COUNT)),
}


def _calls(comm: Communicator, bad: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every call that passes a tensor to a communicator, and the name under which it passes the bad one."""
    good, peer, last = torch.ones(COUNT), 1 - comm.rank, f"[{comm.size - 1}]"
    yield "tensor", lambda: comm.all_reduce(bad, async_op=True)
    for op in COLLECTIVES:
        call, arguments = getattr(comm, op), collective(op, comm.rank, comm.size, COUNT, root=comm.rank).arguments
        for at, (name, argument) in enumerate(zip(inspect.signature(call).parameters, arguments, strict=False)):
            if isinstance(argument, torch.Tensor):
                yield name, partial(call, *arguments[:at], bad, *arguments[at + 1 :])
            elif name in ("outputs", "inputs"):
                yield name + last, partial(call, *arguments[:at], [*argument[1:], bad], *arguments[at + 1 :])
    yield "tensor", lambda: comm.all_reduce(bad, ReduceOp.MAX, timeout=5.0, reproducible=False)
    yield "tensor", lambda: comm.send(bad, peer)
    yield "tensor", lambda: comm.recv(bad, peer)
    yield "batch[1]", lambda: comm.batch_send_recv([Send(good, peer), Recv(bad, peer)])
    yield "batch[0]", lambda: comm.batch_send_recv([Send(bad, peer), Recv(good, peer)])
    yield "tensor", lambda: comm.window(bad)


fast_paths = pytest.mark.parametrize("checks", ["0"], indirect=True)
shared_code = pytest.mark.parametrize("two_ranks", ["shm", "gloo", *second_tier("inproc", "ucx", "mpi")], indirect=True)


@fast_paths
@shared_code
@on_ranks_of("two_ranks")
def test_every_op_refuses_a_tensor_without_memory_by_name_and_goes_on(comm: Communicator) -> None:
    for kind, make in MEMORYLESS.items():
        summed = 2 if kind == "sparse" else 0  # the first two calls add sparse tensors up
        for what, call in itertools.islice(_calls(comm, make()), summed, None):
            with pytest.raises(Unsupported, match=re.escape(what)):
                call()
    tensor = torch.ones(COUNT)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [comm.size] * COUNT


@fast_paths
@shared_code
@on_ranks_of("two_ranks")
def test_every_tensor_with_plain_memory_is_taken(comm: Communicator) -> None:
    for kind, make in WITH_MEMORY.items():
        tensor, output = make(), torch.zeros(2 * COUNT)
        comm.all_gather_single(output, tensor)
        comm.all_reduce(tensor)
        comm.all_reduce(tensor, async_op=True).wait()
        with torch._C.DisableTorchFunctionSubclass():
            assert output.tolist() == [1] * 2 * COUNT and tensor.tolist() == [4] * COUNT, kind


@fast_paths
@pytest.mark.parametrize("two_ranks", ["shm", *second_tier("inproc", "ucx", "mpi")], indirect=True)
@on_ranks_of("two_ranks")
def test_a_window_refuses_tensors_without_memory_and_takes_all_others(comm: Communicator) -> None:
    peer = 1 - comm.rank
    with comm.window(WITH_MEMORY["named parameter"]()) as window:
        for make in MEMORYLESS.values():
            for what, call in (("src", window.put), ("dst", window.get)):
                with pytest.raises(Unsupported, match=what):
                    call(make(), peer)
        comm.barrier()
        for make in WITH_MEMORY.values():
            window.put(make(), peer)
            window.get(make(), peer)
        comm.barrier()


@pytest.mark.parametrize("name", ["inproc", "shm", "ucx"])
def test_a_plane_refuses_tensors_without_memory_and_takes_parameters_and_subclasses(name: str) -> None:
    with comms.memory(name) as plane, plane.expose(torch.ones(COUNT), writable=True) as region:
        for make in MEMORYLESS.values():
            with pytest.raises(Unsupported, match="an exposed tensor"):
                plane.expose(make())
            with pytest.raises(Unsupported, match="into"):
                plane.read(region.handle, make())
            with pytest.raises(Unsupported, match="source"):
                plane.write(region.handle, make())
        for made in (strided(), torch.zeros(COUNT, dtype=torch.complex64).conj()):
            with pytest.raises(ValueError, match="contiguous and resolved"):
                plane.expose(made)
        with pytest.raises(TypeError, match="into: expected a tensor, not list"):
            plane.read(region.handle, [0.0] * COUNT)  # type: ignore[arg-type]
        for make in (WITH_MEMORY[kind] for kind in ("parameter", "named parameter", "tagged")):
            with plane.expose(make(), writable=True) as other:
                plane.write(other.handle, make()).wait()
                plane.read(other.handle, make()).wait()


@pytest.mark.parametrize("make", WITH_MEMORY.values(), ids=WITH_MEMORY)
def test_a_state_dict_takes_every_tensor_with_memory(make: Make) -> None:
    assert flatten({"weight": make()}).tensors["weight"].sum() == COUNT
    assert encode_state({"weight": make()})[1][0].sum() == COUNT


@on_ranks(1, "shm")
def test_parameters_that_fsdp_has_freed_are_refused_with_what_to_do(comm: Communicator) -> None:
    """Parameters and gradients of FSDP2, while they are sharded and after they were gathered."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        from torch.distributed.fsdp import fully_shard

        module = torch.nn.Linear(4, 4)
        fully_shard(module)
        module(torch.ones(1, 4)).sum().backward()
        module.unshard()
        gathered = module.weight
        comm.all_reduce(gathered.detach())
        module.reshard()
        for bad in (module.weight, module.weight.grad):
            with pytest.raises(Unsupported, match=r"to_local\(\)"):
                comm.all_reduce(bad)
        with pytest.raises(Unsupported, match=r"holds 0 bytes.*unshard\(\)"):
            comm.all_reduce(gathered)
        comm.all_reduce(module.weight.grad.to_local())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", MEMORYLESS)
def test_native_code_takes_no_address_and_a_state_dict_no_tensor_where_there_is_no_memory(kind: str) -> None:
    """The error mentions `to_local` only for tensors that have it; that of a state dict names the path."""
    tensor = MEMORYLESS[kind]()
    with pytest.raises(Unsupported, match="mine") as caught:
        check_memory(tensor, "mine")
    assert ("to_local()" in str(caught.value)) == (kind == "wrapper")
    assert ("mine is a FakeTensor that has no memory" in str(caught.value)) == (kind == "fake")
    with pytest.raises(Unsupported, match=r"'model\.weight'"):
        flatten({"model": {"weight": tensor}})
    with pytest.raises(TypeError, match=r"state\['model'\]\[0\]"):
        encode_state({"model": [tensor]})
    if kind != "uninitialized":
        assert not plain(tensor)
        with pytest.raises(Unsupported):
            span(tensor)


def test_native_functions_refuse_a_null_address() -> None:
    calls: list[Callable[[], object]] = [
        lambda: _native.copy(0, 8, 8),
        lambda: _native.copy(8, 0, 8),
        lambda: _native.combine(_native.kind("float32", "sum"), 0, 8, 8, 1),
        lambda: _native.sum_exactly("float32", 8, 1, (0,)),
        lambda: _native.make_nans_alike("float32", 0, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="no address"):
            call()
    _native.copy(0, 0, 0)


@given(
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(0, 80),
    st.sampled_from([torch.Tensor, Tagged, Stubborn]),
)
def test_plain_memory_is_what_its_storage_covers(
    offset: int, rows: int, columns: int, stride: int, held: int, kind: type[torch.Tensor]
) -> None:
    """Native code and Python code agree on it, for tensors of any strides and of any class."""
    tensor = torch.zeros(40).as_strided((rows, columns), (stride, 1), offset)
    tensor.untyped_storage().resize_(held)
    covered = not tensor.numel() or 4 * (offset + (rows - 1) * stride + columns) <= held
    assert plain(tensor) == (covered and tensor.is_contiguous()) or not tensor.numel()
    given_tensor = tensor if kind is torch.Tensor else tensor.as_subclass(kind)
    if covered:
        found = plain_tensor(given_tensor)
        assert type(found) is torch.Tensor and (found is tensor) == (kind is torch.Tensor)
        assert (found.stride(), found.storage_offset()) == ((stride, 1), offset)
        assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if tensor.is_contiguous():
            assert locate(given_tensor) == (tensor.data_ptr(), tensor.nbytes)
        else:
            with pytest.raises(ValueError, match="not contiguous"):
                locate(given_tensor)
    else:
        with pytest.raises(Unsupported, match=f"holds {held} bytes.*freed or resized"):
            plain_tensor(given_tensor)


@pytest.mark.parametrize("make", [lambda it: it.conj(), lambda it: it.conj().imag, lambda it: it])
def test_a_subclass_is_used_as_the_numbers_that_it_has(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Conjugates and negatives that are not worked out yet remain so."""
    tensor = make(torch.tensor([1 + 2j, 3 - 4j]))
    found = plain_tensor(tensor.as_subclass(Tagged))
    assert type(found) is torch.Tensor and torch.equal(found, tensor)
    assert (found.is_conj(), found.is_neg(), found.data_ptr()) == (tensor.is_conj(), tensor.is_neg(), tensor.data_ptr())


@pytest.mark.parametrize(
    ("tensor", "writes"),
    [(torch.ones(4, 2).t(), 1), (torch.ones(4, requires_grad=True), 0), (torch.ones((), requires_grad=True), 0)],
)
def test_results_are_copied_back_only_where_the_op_ran_on_other_memory(tensor: torch.Tensor, writes: int) -> None:
    before, flat = tensor._version, packed(tensor)
    unpack(flat, tensor)
    assert flat is not tensor and tensor._version == before + writes


def test_a_tensor_of_another_device_than_the_communicators_is_refused() -> None:
    with FakeTensorMode():
        second = torch.ones(COUNT, device="cuda:1")
    for device in ("cpu", "cuda:0"):
        with pytest.raises(ValueError, match=f"mine is on cuda:1, which a communicator on {device} cannot use"):
            plain_tensor(second, "mine", torch.device(device))
    for device in ("cuda", "cuda:1"):
        with pytest.raises(Unsupported, match="no memory of its own"):
            plain_tensor(second, "mine", torch.device(device))
    for tensor in (torch.ones(COUNT), torch.nn.Parameter(torch.ones(COUNT)), tagged()):
        with pytest.raises(ValueError, match="tensor is on cpu"):
            plain_tensor(tensor, device=torch.device("cuda"))
    with pytest.raises(Unsupported, match="tensor is a meta tensor that has no memory"):
        plain_tensor(torch.empty(1, device="meta"), device=torch.device("meta"))


def test_a_sparse_tensor_is_known_whatever_its_class() -> None:
    assert is_sparse(sparse()) and is_sparse(torch.nn.Parameter(sparse()))
    assert not any(is_sparse(each) for each in (torch.ones(COUNT), tagged(), WITH_MEMORY["stubborn"](), "sparse"))
    assert is_sparse(Wrapper(sparse())) and not is_sparse(wrapper())


@on_ranks(2, "inproc", "shm", *second_tier("gloo", "ucx", "mpi"))
def test_every_backend_says_what_it_did_with_the_memory(comm: Communicator) -> None:
    tensor = torch.arange(4 << 20).float()
    with comm.register(tensor) as registration:
        comm.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(4 << 20).float() * comm.size), "its contents and its address stay"
    assert "closed" in repr(registration)
    registration.close()
    info = registration.info
    assert "nothing to gain" in info or (comm.backend == "shm" and "huge pages" in info)
    assert "nothing to gain" in comm.register(torch.ones(4)).info
    with pytest.raises(ValueError, match="contiguous"):
        comm.register(torch.ones(4, 4).t())
    with pytest.raises(TypeError, match="tensor"):
        comm.register([1.0])  # type: ignore[arg-type]
    comm.close()
    with pytest.raises(Revoked):
        comm.register(tensor)


def test_an_empty_tensor_begins_on_a_huge_page_and_can_be_used_as_any() -> None:
    tensor = comms.empty((3, 1 << 20), torch.float32)
    assert tensor.data_ptr() % (2 << 20) == 0 and tensor.shape == (3, 1 << 20) and tensor.is_contiguous()
    assert not tensor.any()
    view = tensor[1:].fill_(2.0)
    del tensor
    assert view.sum().item() == 4 << 20
    assert comms.empty(5, torch.int64).tolist() == [0] * 5
    assert comms.empty((0, 4)).shape == (0, 4)


# -- memory that others access, or that tensors share


LARGE = 1 << 16
ranks = shared_ranks(2, "inproc", "shm", "ucx", "mpi")


def give_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((5,), 9.0)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": give_data,
    "another size": lambda tensor: tensor.set_(torch.full((2 * LARGE,), 9.0)),
    "the same size": lambda tensor: tensor.set_(torch.full((LARGE,), 9.0)),
    "smaller": lambda tensor: tensor.resize_(3),
}


def refuses_to_be_resized(tensor: torch.Tensor) -> None:
    for resize in (
        lambda: tensor.untyped_storage().resize_(0),
        lambda: tensor.untyped_storage().resize_(8 * tensor.nbytes),
        lambda: tensor.resize_(2 * LARGE),
    ):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize()


@pytest.mark.parametrize("change", CHANGES)
@on_ranks_of("ranks")
def test_a_window_is_closed_when_its_tensor_gets_other_memory(comm: Communicator, change: str) -> None:
    """And once it was closed, by a call or by `close` alone, the tensor can be used as before."""
    tensor, got, kept = torch.full((LARGE,), 2.0), torch.zeros(LARGE), list[torch.Tensor]()
    window, without_calls = comm.window(tensor), comm.window(tensor)
    comm.barrier()
    if comm.rank == 1:
        refuses_to_be_resized(tensor)
        CHANGES[change](tensor)
        kept = [torch.full((LARGE,), -1.0) for _ in range(8)]
    comm.barrier()
    if comm.rank == 0:
        with contextlib.suppress(RegionGone):  # the backend's thread may have closed the window already
            window.put(torch.full((LARGE,), 5.0), 1)
            window.get(got, 1)
            assert bool((got == 5.0).all())
    comm.barrier()
    if comm.rank == 1:
        assert all(bool((each == -1.0).all()) for each in kept)
        for words in (r"other memory .*copy_", "this rank has closed"):
            with pytest.raises(RegionGone, match=words):
                window.get(torch.zeros(1), 0)
            assert window.closed
        assert change == "smaller" or bool((tensor == 9.0).all())
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(RegionGone, match="rank 1 has closed"):
            window.get(torch.zeros(1), 1)
    comm.barrier()
    for each in (window, without_calls):
        each.close()
    assert change == "smaller" or bool((tensor == (9.0 if comm.rank == 1 else 2.0)).all())
    tensor.resize_(2 * LARGE) if comm.rank == 1 and change != "smaller" else tensor.add_(1)
    comm.barrier()


mapping_ranks = shared_ranks(2, "shm", *second_tier("ucx", "mpi"))


@on_ranks_of("mapping_ranks")
def test_views_of_one_storage_go_on_sharing_it_without_the_peers_once_windows_over_them_are_closed(
    comm: Communicator,
) -> None:
    whole, peer = torch.zeros(8), 1 - comm.rank
    first, last = whole[:4], whole[4:]
    windows = [comm.window(first), comm.window(last)]
    lasting = [window.map(peer) for window in windows]
    for value, window in enumerate(windows, 1):
        comm.barrier()
        window.close()
        whole.fill_(value)
        assert first.tolist() == last.tolist() == [value] * 4
        first[0] = last[0] = 9.0
        assert whole.tolist() == [9.0, value, value, value] * 2
    comm.barrier()
    for mapped in lasting:
        mapped.fill_(7.0)
    comm.barrier()
    assert whole.tolist() == [9.0, 2.0, 2.0, 2.0] * 2
    with comm.window(first) as again:
        comm.barrier()
        for mapped in lasting:
            mapped.fill_(8.0)
        again.put(torch.tensor([5.0]), peer, 3)
        comm.barrier()
        assert whole.tolist() == [9.0, 2.0, 2.0, 5.0, 9.0, 2.0, 2.0, 2.0], "it shares none with the windows before it"
        comm.barrier()
    comm.barrier()


def test_a_thread_that_reads_a_tensor_sees_its_numbers_while_windows_over_it_are_closed() -> None:
    tensor, seen = torch.arange(1 << 18), list[bool]()
    expected, over = tensor.clone(), threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.append(torch.equal(tensor, expected))

    SharedPages(tensor).release()  # torch moves the storage once
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):
            SharedPages(tensor[5:]).release()
    finally:
        over.set()
        reader.join()
    assert all(seen) and torch.equal(tensor, expected)


def test_a_storage_leaves_its_file_once_nobody_needs_its_pages() -> None:
    """Neither another window, nor a network that has them registered. A holder that is dropped needs them no more."""
    tensor = torch.arange(1000)
    one, other = SharedPages(tensor), SharedPages(tensor[5:])
    registered, dropped = HeldPages(tensor), HeldPages(tensor)
    assert (one.descriptor, one.offset, other.offset) == (other.descriptor, 0, 40)
    at, file = tensor.data_ptr(), os.fstat(one.descriptor).st_ino
    del dropped
    for holder in (other, one, one):
        holder.release()
        assert os.fstat(one.descriptor).st_ino == file
    registered.release()
    assert os.fstat(one.descriptor).st_ino != file and tensor.data_ptr() == at
    assert torch.equal(tensor, torch.arange(1000))
    registered.release()
    assert torch.equal(torch.from_file(f"/proc/self/fd/{one.descriptor}", size=1000, dtype=torch.int64), tensor)


@pytest.mark.parametrize("name", ["inproc", "shm", "ucx", "nixl"])
def test_a_region_is_closed_when_its_tensor_gets_other_memory(name: str) -> None:
    with memory(name) as plane:
        for change in CHANGES.values():
            tensor, got = torch.full((LARGE,), 2.0), torch.zeros(LARGE)
            region = plane.expose(tensor, writable=True)
            handle = region.handle
            refuses_to_be_resized(tensor)
            change(tensor)
            kept = [torch.full((LARGE,), -1.0) for _ in range(8)]
            plane.read(handle, got).wait()
            assert bool((got == 2.0).all())
            plane.write(handle, torch.full((LARGE,), 5.0)).wait()
            assert all(bool((each == -1.0).all()) for each in kept)
            with pytest.raises(RegionGone, match=r"other memory .*copy_"):
                assert region.handle
            with pytest.raises(RegionGone):
                plane.read(handle, got).wait()
            assert region.handle == handle, "a closed region keeps its handle"
            region.close()


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
        assert [name for name in state if not torch.equal(into[name], state[name])] == []


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
