"""Tensors without memory of their own are refused by name in every call; all others are accepted."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast import comms
from holdfast.comms import Communicator, ReduceOp, Revoked, _native
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import Recv, Send
from holdfast.comms.tensors.packing import check_memory, is_sparse, locate, plain, plain_tensor, span
from holdfast.ft.state.codec import encode_state
from holdfast.harness import LocalCluster
from holdfast.store.data.state_dicts import flatten

COUNT = 4
MPI = pytest.param("mpi", marks=pytest.mark.thorough)


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


KINDS = [torch.Tensor, Tagged, Stubborn]


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
    """Every call that passes a tensor to a communicator."""
    good, peer, size = torch.ones(COUNT), 1 - comm.rank, comm.size
    whole = torch.ones(size * COUNT)
    several = [torch.ones(COUNT) for _ in range(size)]
    with_bad = [*several[1:], bad]
    yield "tensor", lambda: comm.all_reduce(bad)
    yield "tensor", lambda: comm.all_reduce(bad, async_op=True)
    yield "tensor", lambda: comm.all_reduce(bad, ReduceOp.MAX, timeout=5.0, reproducible=False)
    yield "tensor", lambda: comm.reduce(bad, 0)
    yield "tensor", lambda: comm.broadcast(bad, 0)
    yield "output", lambda: comm.reduce_scatter(bad, several)
    yield f"inputs[{size - 1}]", lambda: comm.reduce_scatter(good, with_bad)
    yield "tensor", lambda: comm.reduce_scatter_single(good, bad)
    yield "output", lambda: comm.reduce_scatter_single(bad, whole)
    yield f"outputs[{size - 1}]", lambda: comm.all_gather(with_bad, good)
    yield "tensor", lambda: comm.all_gather(several, bad)
    yield "output", lambda: comm.all_gather_single(bad, good)
    yield "tensor", lambda: comm.all_gather_single(whole, bad)
    yield f"inputs[{size - 1}]", lambda: comm.all_to_all(several, with_bad)
    yield f"outputs[{size - 1}]", lambda: comm.all_to_all(with_bad, several)
    yield "tensor", lambda: comm.all_to_all_single(good, bad)
    yield "output", lambda: comm.all_to_all_single(bad, good)
    yield "tensor", lambda: comm.gather(bad, several if comm.rank == 0 else None, 0)
    yield f"outputs[{size - 1}]", lambda: comm.gather(good, with_bad, comm.rank)
    yield "tensor", lambda: comm.scatter(bad, several if comm.rank == 0 else None, 0)
    yield f"inputs[{size - 1}]", lambda: comm.scatter(good, with_bad, comm.rank)
    yield "tensor", lambda: comm.send(bad, peer)
    yield "tensor", lambda: comm.recv(bad, peer)
    yield "batch[1]", lambda: comm.batch_send_recv([Send(good, peer), Recv(bad, peer)])
    yield "batch[0]", lambda: comm.batch_send_recv([Send(bad, peer), Recv(good, peer)])
    yield "tensor", lambda: comm.window(bad)


def not_refused(case: str, what: str, call: Callable[[], object]) -> list[str]:
    """A line unless the call raises `Unsupported` that names the argument `what`."""
    try:
        call()
    except Unsupported as error:
        return [] if what in str(error) else [f"{case}: {error}"]
    except Exception as error:
        return [f"{case}: {error!r}"]
    return [f"{case}: taken"]


fast_paths = pytest.mark.parametrize("checks", ["0"], indirect=True)
shared_code = pytest.mark.parametrize(
    "two_ranks",
    ["inproc", "shm", "gloo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ucx", "mpi"))],
    indirect=True,
)


@fast_paths
@shared_code
def test_every_op_refuses_a_tensor_without_memory_by_name_and_goes_on(
    two_ranks: LocalCluster,
) -> None:
    def refuse(comm: Communicator) -> list[str]:
        wrong = []
        for kind, make in MEMORYLESS.items():
            summed = 2 if kind == "sparse" else 0  # the first two calls add sparse tensors up
            for what, call in itertools.islice(_calls(comm, make()), summed, None):
                wrong += not_refused(f"{kind} as {what}", what, call)
        tensor = torch.ones(COUNT)
        comm.all_reduce(tensor)
        return wrong + ["the sum is wrong"] * (tensor.tolist() != [comm.size] * COUNT)

    assert two_ranks.run(refuse) == [[], []]


@fast_paths
@shared_code
def test_every_tensor_with_plain_memory_is_taken(two_ranks: LocalCluster) -> None:
    def take(comm: Communicator) -> list[str]:
        wrong = []
        for kind, make in WITH_MEMORY.items():
            tensor, output = make(), torch.zeros(2 * COUNT)
            comm.all_gather_single(output, tensor)
            comm.all_reduce(tensor)
            comm.all_reduce(tensor, async_op=True).wait()
            with torch._C.DisableTorchFunctionSubclass():
                if output.tolist() != [1] * 2 * COUNT or tensor.tolist() != [4] * COUNT:
                    wrong.append(f"{kind}: {output.tolist()} {tensor.tolist()}")
        return wrong

    assert two_ranks.run(take) == [[], []]


@fast_paths
@pytest.mark.parametrize("two_ranks", ["inproc", "shm", "ucx", MPI], indirect=True)
def test_a_window_refuses_tensors_without_memory_and_takes_all_others(two_ranks: LocalCluster) -> None:
    def use(comm: Communicator) -> list[str]:
        wrong = []
        with comm.window(WITH_MEMORY["named parameter"]()) as window:
            for kind, make in MEMORYLESS.items():
                for what, call in (("src", window.put), ("dst", window.get)):
                    wrong += not_refused(f"{kind} as {what}", what, partial(call, make(), 1 - comm.rank))
            comm.barrier()
            for make in WITH_MEMORY.values():
                window.put(make(), 1 - comm.rank)
                window.get(make(), 1 - comm.rank)
            comm.barrier()
        return wrong

    assert two_ranks.run(use) == [[], []]


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
        for make in (WITH_MEMORY[kind] for kind in ("parameter", "named parameter", "tagged")):
            with plane.expose(make(), writable=True) as other:
                plane.write(other.handle, make()).wait()
                plane.read(other.handle, make()).wait()


@pytest.mark.parametrize("make", MEMORYLESS.values(), ids=MEMORYLESS)
def test_a_state_dict_names_the_path_of_a_tensor_without_memory(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(Unsupported, match=r"'model\.weight'"):
        flatten({"model": {"weight": make()}})
    with pytest.raises(TypeError, match=r"state\['model'\]\[0\]"):
        encode_state({"model": [make()]})


@pytest.mark.parametrize("make", WITH_MEMORY.values(), ids=WITH_MEMORY)
def test_a_state_dict_takes_every_tensor_with_memory(make: Callable[[], torch.Tensor]) -> None:
    assert flatten({"weight": make()}).tensors["weight"].sum() == COUNT
    assert encode_state({"weight": make()})[1][0].sum() == COUNT


def _sharded(comm: Communicator) -> list[str]:
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
        said = []
        for bad in (module.weight, module.weight.grad, gathered):
            with pytest.raises(Unsupported) as caught:
                comm.all_reduce(bad)
            said.append(str(caught.value))
        comm.all_reduce(module.weight.grad.to_local())
        return said
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_that_fsdp_has_freed_are_refused_with_what_to_do() -> None:
    with LocalCluster(1, "shm", timeout=60.0) as cluster:
        ((parameter, gradient, gathered),) = cluster.run(_sharded)
    assert "to_local()" in parameter and "to_local()" in gradient
    assert "holds 0 bytes" in gathered and "unshard()" in gathered


def test_the_error_mentions_to_local_only_for_tensors_that_have_it() -> None:
    with pytest.raises(Unsupported, match=r"to_local\(\)"):
        check_memory(wrapper())
    for kind, make in MEMORYLESS.items():
        if kind != "wrapper":
            with pytest.raises(Unsupported) as caught:
                check_memory(make())
            assert "to_local" not in str(caught.value)


@pytest.mark.parametrize("make", [make for kind, make in MEMORYLESS.items() if kind != "uninitialized"])
def test_native_code_never_takes_the_address_of_a_tensor_without_memory(make: Callable[[], torch.Tensor]) -> None:
    assert not plain(make())
    with pytest.raises(Unsupported):
        span(make())


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
    st.sampled_from(KINDS),
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


def test_a_tensor_of_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        tensor = strided()
        assert plain_tensor(tensor) is tensor
    plain_tensor(tensor).zero_()
    assert not tensor.any()


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
    with pytest.raises(Unsupported):
        plain_tensor(torch.empty(1, device="meta"), device=torch.device("meta"))


def test_a_tensor_without_memory_is_named_by_its_kind() -> None:
    with pytest.raises(Unsupported, match="mine is a meta tensor that has no memory"):
        plain_tensor(torch.empty(1, device="meta"), "mine")
    with pytest.raises(Unsupported, match="mine is a FakeTensor that has no memory"):
        plain_tensor(fake(), "mine")
    with pytest.raises(TypeError, match="mine: expected a tensor, not list"):
        plain_tensor([1.0], "mine")


def test_the_one_stretch_of_memory_of_a_tensor_is_found() -> None:
    tensor = tagged()
    assert locate(tensor) == (tensor.data_ptr(), 4 * COUNT)
    with pytest.raises(ValueError, match="not contiguous"):
        locate(strided())
    with pytest.raises(Unsupported):
        locate(holding(0))


def test_a_sparse_tensor_is_known_whatever_its_class() -> None:
    assert is_sparse(sparse()) and is_sparse(torch.nn.Parameter(sparse()))
    assert not any(is_sparse(each) for each in (torch.ones(COUNT), tagged(), WITH_MEMORY["stubborn"](), "sparse"))
    assert is_sparse(Wrapper(sparse())) and not is_sparse(wrapper())


def register(comm: Communicator) -> str:
    tensor = torch.arange(4 << 20).float()
    with comm.register(tensor) as registration:
        comm.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(4 << 20).float() * comm.size), "its contents and its address stay"
    assert "closed" in repr(registration)
    registration.close()
    small = comm.register(torch.ones(4))
    assert "nothing to gain" in small.info
    with pytest.raises(ValueError, match="contiguous"):
        comm.register(torch.ones(4, 4).t())
    with pytest.raises(TypeError, match="tensor"):
        comm.register([1.0])  # type: ignore[arg-type]
    comm.close()
    with pytest.raises(Revoked):
        comm.register(tensor)
    return registration.info


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", "ucx", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_every_backend_says_what_it_did_with_the_memory(backend: str) -> None:
    with LocalCluster(2, backend) as cluster:
        for info in cluster.run(register):
            assert "nothing to gain" in info or (backend == "shm" and "huge pages" in info)


def test_an_empty_tensor_begins_on_a_huge_page_and_can_be_used_as_any() -> None:
    tensor = comms.empty((3, 1 << 20), torch.float32)
    assert tensor.data_ptr() % (2 << 20) == 0 and tensor.shape == (3, 1 << 20) and tensor.is_contiguous()
    assert not tensor.any()
    view = tensor[1:].fill_(2.0)
    del tensor
    assert view.sum().item() == 4 << 20
    assert comms.empty(5, torch.int64).tolist() == [0] * 5
    assert comms.empty((0, 4)).shape == (0, 4)
