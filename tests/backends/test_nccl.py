"""`nccl` and `rccl` on a GPU where there is one (`-m gpu`), also with two ranks on one GPU.

Without a GPU: what they report, how they carry reductions, and what they ask of torch's group, with torch's gloo group
in its place.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.backends.nccl import transport as nccl
from holdfast.backends.nccl.device_reduction import DeviceReduction, combine, device_reduction_of
from holdfast.comms import Communicator, HoldfastError, ReduceOp, Unsupported, arithmetic
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS
from holdfast.comms.collectives import plan_usual
from holdfast.comms.ops import OpPlan
from holdfast.comms.plugins.spec import Unavailable
from holdfast.comms.transport.base import Context
from holdfast.harness import LocalCluster
from support.comms import nccl_stand_in as stand_in
from support.comms.meeting import alone, registered, run_in_threads, soon
from support.comms.nccl_stand_in import HostWork, OnTheHost
from support.comms.python_calls import functions_entered
from support.comms.ranks import on_ranks, on_ranks_of, running
from support.programs.forked_programs import run_python
from support.waiting import PATIENCE, eventually

Tensor = torch.Tensor
NAMES: tuple[Any, ...] = ("sum", "product", "min", "max", "avg", "band", "bor", "bxor")
OPS_BY_NAME = {each.name: each for each in (*map(ReduceOp, NAMES), ReduceOp.premul_sum(0.5))}

# Without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nccl_and_rccl_say_what_is_missing_and_what_to_install() -> None:
    for library, maker in (("nccl", "NVIDIA"), ("rccl", "AMD")):
        status = nccl.probe(library)
        assert isinstance(status, Unavailable) and maker in status.install_hint
    with pytest.raises(comms.BackendUnavailable, match="NVIDIA GPU"):
        comms.connect("nccl", rank=0, size=1, rendezvous=dist.HashStore(), device="cuda")
    assert {"nccl", "rccl"} <= comms.backends().keys()


def test_a_rocm_build_of_torch_has_rccl_and_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    refused = nccl.probe("nccl")
    assert isinstance(refused, Unavailable) and "rccl" in refused.install_hint
    asked = nccl.probe("rccl")
    assert "ROCm" not in (asked.reason if isinstance(asked, Unavailable) else "")


def test_nccl_and_rccl_refuse_host_tensors() -> None:
    context = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(Unsupported, match="device='cuda'"):
        nccl.connect_over(cast(Context, context), "nccl")


def test_the_options_are_those_of_the_installed_torch() -> None:
    """torch ships the signatures of ProcessGroupNCCL even where it was built without it."""
    stubs = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    declared = stubs[stubs.index("class ProcessGroupNCCL") : stubs.index("class ProcessGroupUCC")]
    for name in ("class Options", "config", "blocking", "def abort", "store: Store", "rank: int", "size: int"):
        assert name in declared
    group = set(dir(torch._C._distributed_c10d.Backend))
    asked = set(re.findall(r"_group\.([a-z_]+)", Path(nccl.__file__).read_text()))
    assert [name for name in (*(asked - group), "_group_end") if f"def {name}(" not in declared] == []


def numbers(dtype: torch.dtype, seed: int, count: int = 37) -> Tensor:
    """Values of every kind: both signs, values that wrap around, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        values = torch.randn(count, generator=generator).to(dtype).float()
        values[seed % 5 :: 9] = [float("nan"), float("inf"), -0.0, float("-inf"), 0.0][seed % 5]
        return values.to(dtype)
    bits = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator)
    return bits.view(torch.uint8)[: count * dtype.itemsize].view(dtype).clone()


def reduced_by_library(given: list[Tensor], op: ReduceOp) -> Tensor:
    """The reduction of the ranks' tensors as NCCL computes it; its comparisons drop NaNs."""
    assert given[0].dtype in (
        torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )  # fmt: skip
    combined = {"min": torch.fmin, "max": torch.fmax, "product": torch.mul}.get(op.name, torch.add)
    total = reduce(combined, given[1:], given[0].clone())
    factor = {"avg": 1 / len(given), "premul_sum": op.factor}.get(op.name)
    return total if factor is None else (total * factor).to(total.dtype)


def carried(plan: DeviceReduction | None, inputs: list[Tensor], op: ReduceOp) -> Tensor:
    """The ranks' tensors, reduced as `plan` says; None: gathered and combined on each rank."""
    found = inputs[0].clone()
    if plan is None:
        combine(inputs, op, found)
    else:
        given = [plan.given(each.clone()) for each in inputs]
        plan.finish(reduced_by_library(given, plan.native), found, len(inputs))
    return found


@example(torch.uint16, "avg", 2, 0)
@example(torch.uint32, "avg", 2, 0)
@example(torch.uint64, "avg", 2, 0)
@given(
    st.sampled_from([*arithmetic.REDUCIBLE, *EIGHT_BIT_FLOATS]),
    st.sampled_from(sorted(OPS_BY_NAME)),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_every_reduction_is_carried_by_one_that_nccl_has(dtype: torch.dtype, name: str, ranks: int, seed: int) -> None:
    op = OPS_BY_NAME[name]
    inputs = [numbers(dtype, seed + rank) for rank in range(ranks)]
    try:
        plan = device_reduction_of(dtype, op)
    except Unsupported as error:
        assert name != "avg" or dtype == torch.bool or "uint64" in str(error)
        return
    assert plan is not None or name != "avg"
    found = carried(plan, inputs, op)
    if dtype in EIGHT_BIT_FLOATS:
        expected = reduced_by_library([each.float() for each in inputs], op) if op.name not in ("min", "max") else None
        if expected is not None:
            torch.testing.assert_close(found.float(), expected.to(dtype).float(), equal_nan=True)
        return
    wide = dtype if dtype.is_floating_point else arithmetic.accumulation_dtype(dtype, op) or dtype
    first, *others = [arithmetic.prescale(each.to(wide), op) for each in inputs]
    expected = first.clone()
    for each in others:
        arithmetic.combine(expected, each, op)
    arithmetic.postscale(expected, op, ranks)
    expected = expected.to(dtype)
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        assert bytes(found.view(torch.uint8).numpy()) == bytes(expected.view(torch.uint8).numpy())
    else:
        torch.testing.assert_close(found, expected, equal_nan=True)


def on_the_host(size: int, body: Callable[[OnTheHost], None]) -> None:
    store = dist.HashStore()
    run_in_threads(size, lambda rank: body(OnTheHost(rank, size, store)), 60.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_op_and_its_prepared_form_call_the_counterpart_of_torchs_group(size: int) -> None:
    def body(transport: OnTheHost) -> None:
        rank = transport.rank
        for dtype in (torch.float32, torch.int64, torch.int16, torch.bool, torch.complex64, torch.uint8):
            for op in (ReduceOp.SUM, ReduceOp.BXOR, ReduceOp.AVG, ReduceOp.MAX):
                try:
                    arithmetic.check_reducible(dtype, op)
                except Unsupported:
                    continue
                inputs = [(torch.arange(6) + r).to(dtype) for r in range(size)]
                expected = carried(device_reduction_of(dtype, op), inputs, op)
                mine, again = inputs[rank].clone(), inputs[rank].clone()
                transport.all_reduce(mine, op, soon())
                transport.function(OpPlan.make("all_reduce", dtype, mine.nbytes, 0, op, 5.0))(again, soon())
                assert torch.equal(mine, expected) and torch.equal(again, expected), (dtype, op)
                part, again = torch.empty(6, dtype=dtype), torch.empty(6, dtype=dtype)
                transport.reduce_scatter(part, [inputs[rank].clone() for _ in range(size)], op, soon())
                prepared = transport.function(OpPlan.make("reduce_scatter", dtype, part.nbytes, 0, op, 5.0))
                prepared(again, inputs[rank].repeat(size), soon())
                assert torch.equal(part, expected) and torch.equal(again, expected), (dtype, op)
                mine = inputs[rank].clone()
                transport.reduce(mine, size - 1, op, soon())
                assert torch.equal(mine, expected if rank == size - 1 else inputs[rank])
        uneven = torch.empty(rank + 1)
        transport.reduce_scatter(uneven, [torch.full((r + 1,), 2.0) for r in range(size)], ReduceOp.SUM, soon())
        assert torch.equal(uneven, torch.full((rank + 1,), 2.0 * size))

    on_the_host(size, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_movement_and_its_prepared_form_call_the_counterpart_of_torchs_group(size: int) -> None:
    def body(transport: OnTheHost) -> None:
        rank = transport.rank
        lists = [torch.full((r,), r, dtype=torch.int16) for r in range(size)]
        outputs = [torch.empty_like(each) for each in lists]
        transport.all_gather(outputs, lists[rank], soon())
        assert all(map(torch.equal, outputs, lists))
        whole = torch.empty(size * 2, dtype=torch.float16)
        transport.all_gather(list(whole.view(size, 2)), torch.full((2,), rank, dtype=torch.float16), soon())
        assert whole.tolist() == [r for r in range(size) for _ in range(2)]
        taken = torch.empty(rank, dtype=torch.int16)
        transport.scatter(taken, lists if rank == 0 else None, 0, soon())
        assert torch.equal(taken, lists[rank])
        transport.gather(lists[rank], outputs if rank == size - 1 else None, size - 1, soon())
        given = torch.tensor([rank + 0.5])
        transport.broadcast(given, size - 1, soon())
        assert given.item() == size - 0.5
        if size > 1:
            right, left = (rank + 1) % size, (rank - 1) % size
            got = torch.empty(3)
            transport.batch_send_recv([(torch.full((3,), float(rank)), right, 0)], [(got, left, 0)], soon())
            assert got.tolist() == [left] * 3
        tensor = torch.full((2,), float(rank))
        transport.function(OpPlan.make("broadcast", tensor.dtype, tensor.nbytes, size - 1, None, 5.0))(tensor, soon())
        assert tensor.tolist() == [size - 1.0] * 2
        rows = torch.empty(size, 2)
        gather = transport.function(OpPlan.make("all_gather", tensor.dtype, tensor.nbytes, 0, None, 5.0))
        gather(rows, torch.full((2,), float(rank)), soon())
        assert rows.tolist() == [[float(r)] * 2 for r in range(size)]

    on_the_host(size, body)


def test_an_op_that_torchs_group_takes_as_it_is_costs_few_calls_of_python(fast_paths: None, tmp_path: Path) -> None:
    """20 of them cost 22 us beside torch's 14 on an H100 (docs/experiments/layers.py has the time)."""
    with registered(stand_in), alone(tmp_path, stand_in.NAME) as comm:
        tensor = torch.ones(2)
        for async_op in (False, True):
            comm.all_reduce(tensor, async_op=async_op).wait()
        assert functions_entered(partial(comm.all_reduce, tensor)) == ["all_reduce", "start"]
        launched = functions_entered(partial(comm.all_reduce, tensor, async_op=True))
        assert pickle.loads(pickle.dumps(comm.all_reduce(tensor, async_op=True))).done()
        assert launched[:3] == ["all_reduce", "_launch_planned", "launch"] and len(launched) <= 6, launched
        assert tensor.tolist() == [1, 1] and comm.progress[0] == 5


@on_ranks(2, "gloo", killed=(1,), timeout=60.0, threads=1)
def test_an_asynchronous_op_that_hangs_ends_as_a_synchronous_one_does(outer: Communicator, tmp_path: Path) -> None:
    """Over the stand-in, and on the usual path: without a timeout of its own, hooks and checks."""
    comms.register(stand_in)
    for how, reason in (("abort", r"enough"), ("timeout", r"timed out"), ("kill", r"rank 1.* the process is gone")):
        meeting, waits = f"file://{tmp_path}/{how}", tmp_path / f"{how} waits"
        with comms.connect(stand_in.NAME, rank=outer.rank, size=2, rendezvous=meeting, timeout=20.0) as comm:
            outer.barrier()
            if outer.rank == 1:
                if how == "kill":
                    eventually(waits.exists)
                    os.kill(os.getpid(), signal.SIGKILL)
                outer.barrier()
                continue
            if how == "timeout":
                comm._executor.timeout = 2.0
            unchecked(comm)
            work = comm.all_reduce(torch.ones(2), async_op=True)
            assert isinstance(work, HostWork) and comm.progress[0] == 1
            with pytest.raises(comms.StillRunning):
                work.wait(0.01)
            waits.touch()
            if how == "abort":
                comm.abort("enough")
            with pytest.raises(HoldfastError, match=reason):
                work.wait()
            with pytest.raises(HoldfastError, match=reason):
                comm.all_reduce(torch.ones(2), async_op=True)
            if how != "kill":
                outer.barrier()


# With a GPU -------------------------------------------------------------------------------------------------------


def ON_A_GPU(test: Callable[..., None]) -> Callable[..., None]:  # noqa: N802  (as a mark)
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


def unchecked(comm: Communicator) -> None:
    """Let ops take the usual way, which the checks of the tests rule out."""
    comm._executor._agreement = None
    comm._fast = comm._executor.fast_path(partial(plan_usual, comm._transport, comm._check, comm._executor.timeout))


def connected(outer: Communicator, place: str, timeout: float = 20.0, size: int = 2) -> Communicator:
    """Rank `outer.rank` of `size` on GPU 0. NCCL refuses two ranks on one GPU unless each says it is another host."""
    os.environ["NCCL_HOSTID"] = f"rank-{outer.rank}"
    library = "rccl" if torch.version.hip else "nccl"
    return comms.connect(
        library, rank=outer.rank, size=size, rendezvous=f"file://{place}", device="cuda:0", timeout=timeout
    )


@pytest.fixture(params=[1, 2])
def gpu_ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """1 or 2 ranks, which connect on GPU 0."""
    with running(request.param, "gloo", timeout=120.0) as cluster:
        yield cluster


@ON_A_GPU
@on_ranks_of("gpu_ranks")
def test_gpu_ops_are_right_and_in_stream_order(outer: Communicator, tmp_path: Path) -> None:
    with connected(outer, f"{tmp_path}/meet", 30.0, outer.size) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
            tensor = torch.ones(1000, dtype=dtype, device="cuda")
            comm.all_reduce(tensor)
            assert torch.equal(tensor, torch.full_like(tensor, comm.size if dtype != torch.bool else 1))
        large = torch.ones(1 << 22, device="cuda")
        for _ in range(10):  # each needs the one before: no op may overtake a kernel
            large.mul_(2)
            work = comm.all_reduce(large, ReduceOp.AVG, async_op=True)
            work.wait()
        assert bool((large == 1024).all())
        assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
        lists = [torch.full((r,), float(r), device="cuda") for r in range(comm.size)]
        outputs = [torch.empty_like(each) for each in lists]
        comm.all_gather(outputs, lists[comm.rank])
        assert all(map(torch.equal, outputs, lists))
        comm.barrier()


@ON_A_GPU
@on_ranks_of("gpu_ranks")
def test_gpu_a_graph_holds_an_all_reduce(outer: Communicator, tmp_path: Path) -> None:
    with connected(outer, f"{tmp_path}/meet", 30.0, outer.size) as comm:
        unchecked(comm)  # checks go through the host, which a graph cannot
        tensor = torch.ones(1024, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            comm.all_reduce(tensor)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            comm.all_reduce(tensor)
            tensor.add_(1)
            comm.all_reduce(tensor, async_op=True).wait()
        tensor.fill_(1)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        expected = 1.0
        for _ in range(3):
            expected = (expected * comm.size + 1) * comm.size
        assert bool((tensor == expected).all())


@ON_A_GPU
@on_ranks(2, "gloo", killed=(1,), timeout=120.0)
def test_gpu_a_close_that_the_other_rank_does_not_join_is_bounded(outer: Communicator, tmp_path: Path) -> None:
    comm = connected(outer, f"{tmp_path}/meet")
    comm.all_reduce(torch.ones(8, device="cuda:0"))
    torch.cuda.synchronize()
    if outer.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    comm.close()
    assert time.monotonic() - began < PATIENCE


@ON_A_GPU
@on_ranks(2, "gloo", killed=(1,), timeout=120.0)
def test_gpu_connecting_to_a_rank_that_dies_is_bounded_and_the_next_connect_works(
    outer: Communicator, tmp_path: Path
) -> None:
    if outer.rank == 1:

        def die(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        nccl.NcclTransport = die  # type: ignore[misc,assignment]
        connected(outer, f"{tmp_path}/meet")
    began = time.monotonic()
    with pytest.raises(HoldfastError):
        connected(outer, f"{tmp_path}/meet", timeout=8.0)
    assert time.monotonic() - began < PATIENCE
    with connected(outer, f"{tmp_path}/alone", size=1) as single:
        ones = torch.ones(4, device="cuda:0")
        single.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1, 1]


@ON_A_GPU
def test_gpu_a_process_that_has_probed_can_fork_children_that_use_cuda() -> None:
    program = (
        "import os, torch\nfrom holdfast.comms.plugins.registry import registry\n"
        "print([str(registry().backend(each).status) for each in ('nccl', 'rccl')])\n"
        "child = os.fork()\nif child == 0:\n    torch.ones(2, device='cuda').sum().item()\n    os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    run_python("-c", program)
