"""What torch's process groups, works, windows and transports offer works over holdfast, or is refused by name."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from holdfast.comms import (
    BackendUnavailable,
    Communicator,
    CorruptData,
    HoldfastError,
    Mismatch,
    NotConnected,
    RegionGone,
    Revoked,
    Unsupported,
)
from holdfast.comms.torchdist import Options
from holdfast.comms.torchdist.process_group import AVAILABLE, HoldfastBackend, HoldfastProcessGroup
from holdfast.comms.torchdist.works import TorchWork
from support.comms import nccl_stand_in as stand_in
from support.comms.meeting import registered
from support.comms.ranks import on_ranks, second_tier
from support.comms.torch_groups import default_group, group_cluster, on_each_rank_of, shared_groups
from support.programs import torch_suite
from support.programs.torch_names import table, uses
from support.source_tree import ROOT

_distributed_c10d: Any = torch._C._distributed_c10d
HOOKS = pytest.mark.skipif(not hasattr(_distributed_c10d, "PreHookArgs"), reason="torch has hooks from 2.14 on")

INHERITED: dict[type, set[str]] = {
    HoldfastProcessGroup: {
        # of the C++ object itself
        *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
        *("_backend_id", "_id", "_register_backend", "_set_default_backend", "bound_device_id", "boxed", "unbox"),
    },
    HoldfastBackend: {
        *("Options", "bound_device_id", "_set_group_uid", "setUsePgForSymmMemRendezvous"),
        # torch's base raises an error that names them
        *("_start_time_estimate", "_end_time_estimate", "allocate_tensor", "mem_allocator"),
        # says False; never called, since `supports_splitting` is False
        *("supports_tensor_alloc", "eager_connect_single_device"),
    },
    TorchWork: {
        # of the C++ object itself
        *("_get_op_type", "boxed", "unbox"),
        # torch's base raises an error that names them
        "get_future_result",
    },
}


@pytest.mark.parametrize("ours", INHERITED, ids=lambda ours: str(ours.__name__))
def test_every_name_of_torchs_class_is_ours_or_known_to_work_as_inherited(ours: type) -> None:
    """A new torch may add what its C++ would accept and ignore for a group in Python."""
    theirs = next(base for base in ours.__mro__ if not base.__module__.startswith("holdfast"))
    names = {name for name in dir(theirs) if not name.startswith("__") and not name.startswith("_pybind11")}
    defined = {name for base in ours.__mro__ if base.__module__.startswith("holdfast") for name in vars(base)}
    assert names - defined - INHERITED[ours] == set()


@pytest.fixture
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HoldfastProcessGroup]:
    """A default group of this process alone, in an environment of the test's parameters."""
    for name, value in {"HOLDFAST_BACKEND": "shm", **getattr(request, "param", {})}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("holdfast", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    made: Any = dist.group.WORLD
    yield made
    dist.destroy_process_group()


def test_what_a_group_cannot_do_is_refused_by_name(group: Any) -> None:
    with pytest.raises(Unsupported, match="memory_stats"):
        group.memory_stats()
    with pytest.raises(Unsupported, match="merge_remote_group"):
        group.merge_remote_group(dist.HashStore(), 2)


def test_a_work_tells_its_timeout_and_its_number(group: Any) -> None:
    works: list[Any] = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
    works.append(group.barrier(timeout=timedelta(seconds=7)))
    group._add_ephemeral_timeout(timedelta(seconds=5))
    works.append(dist.all_reduce(torch.ones(1), async_op=True))
    works[-1].wait()
    works.append(dist.all_reduce(torch.ones(1), async_op=True))
    for work in works:
        work.wait()
        work.block_current_stream()
    assert [work.timeout.total_seconds() for work in works] == [30, 30, 7, 35, 30]
    assert [work._get_sequence_number() for work in works] == [1, 2, 3, 4, 5]
    assert group._get_sequence_number_for_group() == 5


def test_a_work_tells_how_long_it_ran_once_the_group_measures(group: Any) -> None:
    before: Any = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(Unsupported, match="_enable_collectives_timing"):
        before._get_duration()
    group._enable_collectives_timing()
    began, several = time.perf_counter(), [torch.ones(1 << 16), torch.ones(3)]
    works: list[Any] = [dist.all_reduce(torch.ones(1 << 16), async_op=True), group.allreduce_coalesced(several)]
    options = dist.AllreduceOptions()
    options.asyncOp = False
    works.append(group.allreduce([torch.ones(1 << 16)], options))
    for work in works:
        work.wait()
    durations = [work._get_duration() for work in works]
    assert all(duration > 0 for duration in durations)
    assert sum(durations) < 1e3 * (time.perf_counter() - began)


def test_a_suspended_group_refuses_ops_until_it_resumes_with_its_hooks(group: Any) -> None:
    seen: list[Any] = []
    group._register_on_completion_hook(seen.append)
    for _ in range(2):
        group.suspend()
        with pytest.raises(NotConnected, match="is suspended; call resume"):
            dist.all_reduce(torch.ones(1))
        group.resume()
        dist.all_reduce(torch.ones(1))
    assert len(seen) == 2
    if AVAILABLE:
        backend: Any = HoldfastBackend(group)
        backend.suspend()
        backend.resume()
        dist.all_reduce(torch.ones(1))


def test_gather_single_puts_the_inputs_one_after_the_other(group: Any) -> None:
    output = torch.zeros(2, 3)
    group.gather_single(output, torch.ones(2, 3)).wait()
    assert output.tolist() == [[1, 1, 1]] * 2
    with pytest.raises(ValueError, match="1 times the 6 elements"):
        group.gather_single(torch.zeros(5), torch.ones(2, 3))


@HOOKS
def test_hooks_run_before_and_after_each_op_in_the_order_of_their_ids(group: Any) -> None:
    seen: list[Any] = []

    def note(what: str) -> Any:
        return lambda op: seen.append((what, op.name.name, op.op_id, op.async_op))

    group.register_pre_hook(2, note("second"))
    group.register_pre_hook(1, note("first"))
    group.register_post_hook(1, note("after"))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0, async_op=True).wait()
    assert seen == [
        *[(what, "ALLREDUCE", 0, False) for what in ("first", "second", "after")],
        *[(what, "BROADCAST", 1, True) for what in ("first", "second", "after")],
    ]
    group.unregister_post_hook(1)
    group.unregister_pre_hook(2)
    seen.clear()
    arguments: list[Any] = []
    group.register_pre_hook(3, arguments.append)
    dist.reduce(tensor, 0)
    dist.barrier()
    assert [what for what, *_ in seen] == ["first", "first"]
    assert [(op.root, len(op.input_tensors), len(op.output_tensors)) for op in arguments] == [(0, 1, 0), (-1, 0, 0)]


@HOOKS
def test_an_error_of_a_hook_keeps_the_op_from_being_issued(group: Any) -> None:
    def refuse(op: Any) -> None:
        raise ValueError(op.name.name)

    group.register_pre_hook(1, refuse)
    with pytest.raises(ValueError, match="ALLREDUCE"):
        dist.all_reduce(torch.ones(1))
    group.unregister_pre_hook(1)
    assert group._get_sequence_number_for_group() == 0


def test_hooks_on_completed_ops_get_each_op_once_with_its_times(group: Any) -> None:
    assert group.supports_completion_hooks and not group._has_hooks()
    found: list[Any] = []
    group._register_on_completion_hook(found.append)
    assert group._has_hooks()
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    dist.barrier()
    group._wait_for_pending_works()
    assert [work.wait() for work in works] == [True] * 3
    assert sorted(each.seq for each in found) == [0, 1, 2, 3]
    assert all(each.time_started <= each.time_finished for each in found)
    assert all(each.active_duration == each.time_finished - each.time_started for each in found)


def test_hooks_of_the_abort_run_once_each_and_can_be_removed(group: Any) -> None:
    assert group.supports_abort_hooks
    seen: list[int] = []

    def fails() -> None:
        seen.append(1)
        raise ValueError("of a hook")

    group.register_abort_hook(2, lambda: seen.append(2))
    group.register_abort_hook(1, fails)
    group.register_abort_hook(3, lambda: seen.append(3))
    group.unregister_abort_hook(3)
    group.abort()
    group.abort()
    assert seen == [1, 2], "one that raises keeps no other from running"


@pytest.mark.parametrize("group", [{"TORCH_DIST_NAN_CHECK": "1"}], indirect=True, ids=["checked"])
def test_the_check_for_nan_refuses_inputs_and_no_outputs(group: Any) -> None:
    nan = torch.tensor([0.0, float("nan")])
    sparse = torch.sparse_coo_tensor([[0]], [float("nan")], (2,), check_invariants=True)
    for tensor in (nan, nan.to(torch.complex64), nan.to(torch.float8_e5m2), sparse):
        with pytest.raises(RuntimeError, match="allreduce: input tensor 0 holds NaN"):
            dist.all_reduce(tensor)
    dist.all_gather_into_tensor(nan, torch.ones(2))
    assert nan.tolist() == [1, 1]
    dist.all_reduce(torch.ones(2, dtype=torch.int8))


# -- one-sided access: windows of a process group, and torch 2.15's transport over a plane


two = shared_groups(2, "shm", "gloo", *second_tier("ucx", "mpi"))


@on_each_rank_of("two")
def test_a_put_signals_and_a_window_is_registered_again(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    assert group.supports_window
    peer, exposed, later = 1 - rank, torch.full((8,), -1.0), torch.zeros(3, 2)
    halves = [-1.0] * 4 + [1.0] * 4, [0.0] * 4 + [-1.0] * 4
    window = group.new_window(exposed)
    window.put(torch.full((4,), float(rank)), peer, 4 * rank, False).wait()
    window.wait_signal(peer, True).wait()
    got = torch.empty(8)
    window.get(got, peer, 0, True).wait()
    window.signal(peer)
    window.wait_signal(peer)  # the peer has read what this rank holds
    assert (exposed.tolist(), got.tolist()) == (halves[rank], halves[peer])
    with pytest.raises(ValueError, match="7"):
        window.put(torch.ones(2), peer, 7, False)
    window.tensor_deregister()
    with pytest.raises(RegionGone):
        window.put(torch.ones(1), peer, 0, False)
    window.tensor_register(later, owning=False)
    window.put(torch.ones(3, 2) * (rank + 1), peer, 0, True).wait()
    window.wait_signal(peer, False).wait()
    dist.barrier()
    window.close()
    assert later.view(-1).tolist() == [peer + 1.0] * 6


@on_each_rank_of("two")
def test_a_mapped_tensor_is_the_peers_own_or_is_refused_by_name(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    exposed = torch.zeros(2, 2)
    window = group.new_window(exposed)
    mapped = window.info.access == "mapped"
    window.map_remote_tensor(rank)[0, 0] = 7.0
    if mapped:
        window.map_remote_tensor(1 - rank)[1, 0] = 40.0 + rank
    else:
        with pytest.raises(Unsupported, match="map"):
            window.map_remote_tensor(1 - rank)
    if hasattr(torch._C._distributed_c10d, "WindowAttr"):
        assert window.get_attr(1 - rank).access_type.name == ("UNIFIED" if mapped else "SEPARATE")
    else:
        with pytest.raises(Unsupported, match="get_attr"):
            window.get_attr(1 - rank)
    dist.barrier()
    window.close()
    assert exposed.view(-1).tolist() == [7.0, 0.0, 41.0 - rank if mapped else 0.0, 0.0]


NEWEST = pytest.mark.skipif(
    find_spec("torch.distributed._transport") is None, reason="torch has transports, and the table, from 2.15 on"
)


def new_transport(**options: Any) -> Any:
    return importlib.import_module("torch.distributed._transport").new_transport("holdfast", "cpu", **options)


@NEWEST
@pytest.mark.parametrize("plane", ["shm", "ucx"])
@on_ranks(2, "shm")
def test_two_processes_write_and_read_each_others_memory(comm: Communicator, plane: str) -> None:
    with new_transport(plane=plane) as transport:
        exposed, source, back = torch.zeros(8), torch.arange(8.0) + comm.rank, torch.zeros(8)
        memory = transport.register_memory(exposed)
        told = comm.all_gather_object((transport.bind(), memory.to_remote_buffer().serialize()))
        url, descriptor = told[1 - comm.rank]
        assert transport.connect(url) == 0 and transport.connected()
        remote = type(memory.to_remote_buffer()).deserialize(descriptor)
        here, into = transport.register_memory(source), transport.register_memory(back)
        transport.write(here.to_view(8, 16), remote, async_op=True).wait()
        comm.barrier()
        first = 3.0 - comm.rank
        assert exposed.tolist() == [first, first + 1, first + 2, first + 3, 0.0, 0.0, 0.0, 0.0]
        assert transport.read(into.to_mutable_view(0, 12), remote) == 0
        asyncio.run(transport.read_async(into.to_mutable_view(12, 4), remote))
        first = 2.0 + comm.rank
        assert back[:4].tolist() == [first, first + 1, first + 2, first]
        with pytest.raises(ValueError, match="mutable"):
            transport.read(into.to_view(), remote)
        with pytest.raises(ValueError, match="not within"):
            into.to_view(16, 17)
        comm.barrier()
        transport.unregister_memory(memory)
        transport.unregister_memory(memory)
        comm.barrier()
        with pytest.raises(RegionGone):
            transport.read(into.to_mutable_view(), remote)


@NEWEST
def test_ends_that_do_not_fit_are_refused() -> None:
    with new_transport(plane="shm") as transport:
        memory = transport.register_memory(torch.zeros(4))
        remote = memory.to_remote_buffer()
        with pytest.raises(Mismatch, match="not connected"):
            transport.read(memory.to_mutable_view(), remote)
        with pytest.raises(CorruptData, match="URL"):
            transport.connect(b"https://elsewhere")
        with pytest.raises(Mismatch, match="plane"):
            transport.connect(b"holdfast-plane 1 other")
        with pytest.raises(ValueError, match="contiguous"):
            transport.register_memory(torch.zeros(4, 4).t())
        transport.connect(transport.bind())
        with pytest.raises(ValueError, match="bytes"):
            transport.read(transport.register_memory(torch.zeros(5)).to_mutable_view(), remote)
    for call in (transport.bind, lambda: transport.register_memory(torch.zeros(1))):
        with pytest.raises(RegionGone, match="closed"):
            call()


@NEWEST
@given(data=st.binary(max_size=80))
def test_no_bytes_make_a_descriptor_raise_anything_but_our_error(data: bytes) -> None:
    remote = importlib.import_module("holdfast.comms.torchdist.transport").RemoteMemory
    try:
        found = remote.deserialize(data)
    except CorruptData:
        return
    assert remote.deserialize(found.serialize()) == found


# -- the names that torch's versions have


TABLE = table()


def test_there_is_a_table_for_each_version_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    specifier = next(each.specifier for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    allowed = [f"2.{minor}" for minor in range(100) if specifier.contains(f"2.{minor}.0")]
    assert sorted(TABLE, key=lambda version: int(version[2:])) == allowed


@pytest.mark.parametrize("version", TABLE)
def test_each_name_that_is_imported_from_torch_is_in_the_version(version: str) -> None:
    missing = [
        f"{place}: {module}.{name}"
        for module, names in uses().items()
        for name, place in names.items()
        if name not in TABLE[version].get(module, ())
    ]
    missing += [module for module in uses() if module not in TABLE[version]]
    assert not missing, "take another name, or look for it with getattr; torch_names.py makes the tables anew"


SELECTION: list[str] = tomllib.loads(torch_suite.TABLE.read_text())["selection"]["tests"]


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", torch_suite.TRANSPORTS)
def test_what_passes_over_plain_gloo_passes_over_holdfast(transport: str) -> None:
    """Runs all of the selection over shm, and one test in four over each other transport."""
    names = SELECTION if transport == "shm" else SELECTION[torch_suite.TRANSPORTS.index(transport) :: 4]
    report = torch_suite.Report.of(names, torch_suite.outcomes("holdfast", transport, names))
    assert not report.failed
    assert report.passed > 0.7 * len(names), report


def test_a_test_of_torch_that_does_not_end_has_failed() -> None:
    report = torch_suite.Report.of(["a", "b"], {"a": {"outcome": "passed", "why": ""}})
    assert (report.passed, report.failed) == (1, {"b": "did not end"})


# -- docs/reference/torch-surface.toml: what each new name of torch 2.15 does over each transport. Each check runs in a
# default group of its own, and calls the name as a program would: by torch's function where there is one. Over `nccl`
# runs its stand-in, which has this package's code and host memory.


ROWS: list[dict[str, Any]] = tomllib.loads((ROOT / "docs/reference/torch-surface.toml").read_text())["row"]
TRANSPORTS = ("shm", "gloo", "ucx", "mpi", "nccl")
c10d: Any = dist.distributed_c10d


@dataclass(frozen=True)
class Case:
    """One rank of the default group in which a check runs."""

    group: Any
    rank: int
    outer: Communicator
    transport: str

    @property
    def peer(self) -> int:
        return 1 - self.rank

    @contextmanager
    def window(self) -> Iterator[Any]:
        made = c10d._new_window(torch.zeros(4))
        yield made
        made.close()

    def total(self) -> float:
        tensor = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        return float(tensor[0])


def supports_window(case: Case) -> None:
    if not c10d._supports_window():
        raise Unsupported("_supports_window() is False")


def window(case: Case) -> None:
    with case.window() as window:
        window.put(torch.ones(2), case.peer, 1, False)
        window.wait_signal(case.peer, False)
        window.signal(case.peer, True).wait()
        assert window.wait_signal(case.peer, True).wait()
        assert window.get_attr(case.peer).access_type.name in ("UNIFIED", "SEPARATE")
        window.tensor_deregister()
        window.tensor_register(torch.zeros(2), owning=False)


def map_remote_tensor(case: Case) -> None:
    with case.window() as window:
        try:
            window.map_remote_tensor(case.peer)
        finally:
            dist.barrier()


def hooks(case: Case) -> None:
    seen: list[Any] = []
    case.group.register_pre_hook(1, seen.append)
    case.group.register_post_hook(1, seen.append)
    case.group._register_on_completion_hook(seen.append)
    case.group.register_abort_hook(1, lambda: seen.append("aborted"))
    assert case.total() == 3
    case.group._wait_for_pending_works()
    case.outer.barrier()
    case.group.abort()
    assert len(seen) == 4 and seen[3] == "aborted"


def nan_check(case: Case) -> None:
    case.group._hooks.refuse_nan = True  # as TORCH_DIST_NAN_CHECK=1 sets it when the group is made
    with pytest.raises(HoldfastError, match="NaN"):
        dist.all_reduce(torch.tensor([float("nan")]))
    assert case.total() == 3


def health_check(case: Case) -> None:
    _distributed_c10d.HealthCheckHook.attach(case.group)
    case.outer.barrier()
    case.group.abort()
    answers: list[str] = []

    class Answer(_distributed_c10d._Response):  # type: ignore[misc]  # of torch's debug server
        def set_content(self, content: str, content_type: str) -> None:
            answers.append(content)

        def set_status(self, status: int) -> None:
            """Does nothing."""

    _distributed_c10d._get_handler("c10d_health_check")(_distributed_c10d._Request(), Answer())
    if not json.loads(answers[0])["unhealthy_backends"]:
        raise Unsupported("torch calls it for groups in C++ alone; register_abort_hook is called")


def flight_recorder(case: Case) -> None:
    try:
        _distributed_c10d.FlightRecorderHook.attach(case.group, [0, 1])
    except RuntimeError as error:
        raise Unsupported(str(error).splitlines()[0]) from error


def reconfigure(case: Case) -> None:
    assert c10d._supports_reconfigure()
    handles = case.outer.all_gather_object(c10d._get_reconfigure_handle())
    assert c10d._reconfigure(5, list(reversed(handles))).wait()
    assert (dist.get_rank(), case.total()) == (case.peer, 3)
    assert c10d._reconfigure(6, set(handles), timeout=timedelta(seconds=20)).wait()
    assert case.total() == 3


def split_group(case: Case) -> None:
    part = dist.split_group(split_ranks=[[0], [1]])
    assert dist.get_world_size(part) == 1


def shrink_group(case: Case) -> None:
    if case.rank == 0:
        dist.shrink_group([1])
        assert case.total() == 1
    case.outer.barrier()


def gather_single(case: Case) -> None:
    output = torch.empty(2) if case.rank == 0 else None
    c10d.gather_single(torch.full((1,), float(case.rank)), output, dst=0)
    assert output is None or output.tolist() == [0, 1]


def work(case: Case) -> None:
    c10d.set_timeout(timedelta(seconds=17), dist.group.WORLD)
    issued: Any = dist.all_reduce(torch.ones(1), async_op=True)
    assert issued.wait() and issued._get_sequence_number() == 1
    assert issued.timeout == timedelta(seconds=17)


def duration(case: Case) -> None:
    if case.transport == "nccl":  # the stand-in has no streams, which the transport has
        type(case.group.communicator.transport).streams = True
    try:
        case.group._enable_collectives_timing()
    finally:
        if case.transport == "nccl":
            type(case.group.communicator.transport).streams = False
    work: Any = dist.all_reduce(torch.ones(1000), async_op=True)
    work.wait()
    assert 0 < work._get_duration() < 60_000


def suspend_and_resume(case: Case) -> None:
    group: Any = c10d.get_backend_impl(device=torch.device("cpu"))
    assert group is case.group
    group.suspend()
    with pytest.raises(NotConnected, match=r"resume\(\)"):
        case.total()
    group.resume()
    assert case.total() == 3


def memory_stats(case: Case) -> None:
    c10d.get_backend_impl(device=torch.device("cpu")).memory_stats()


def merge_remote_group(case: Case) -> None:
    case.group.merge_remote_group(dist.HashStore(), 2)


def mesh_abort(case: Case) -> None:
    mesh: Any = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    case.outer.barrier()
    mesh.abort()
    with pytest.raises(Revoked):
        case.group.allreduce(torch.ones(1)).wait()
    c10d._update_default_pg(None)  # torch removes the default group from its tables, and keeps it as the default


def transport(case: Case) -> None:
    try:
        made = new_transport(plane=case.transport)
    except RuntimeError as error:  # torch's own, of the error that says why
        assert isinstance(error.__cause__, BackendUnavailable)
        raise Unsupported("it has no memory plane") from error
    with made:
        assert made.connect(made.bind()) == 0


CHECKS: dict[Callable[[Case], None], tuple[str, ...]] = {
    supports_window: ("_supports_window",),
    window: (
        "_new_window", "Window.put", "Window.signal", "Window.wait_signal", "Window.get_attr",
        "Window.tensor_register", "Window.tensor_deregister",
    ),
    map_remote_tensor: ("Window.map_remote_tensor",),
    hooks: ("register_pre_hook", "register_post_hook", "_register_on_completion_hook", "register_abort_hook"),
    nan_check: ("NanCheckHook",),
    health_check: ("HealthCheckHook",),
    flight_recorder: ("FlightRecorderHook",),
    reconfigure: (
        "_supports_reconfigure", "_get_reconfigure_handle", "_reconfigure",
        "init_process_group(enable_reconfigure=True)",
    ),
    split_group: ("split_group",),
    shrink_group: ("shrink_group",),
    gather_single: ("gather_single",),
    work: ("set_timeout", "Work.timeout", "Work._get_sequence_number"),
    duration: ("_enable_collectives_timing", "Work._get_duration"),
    suspend_and_resume: ("get_backend_impl", "Backend.suspend", "Backend.resume"),
    memory_stats: ("Backend.memory_stats",),
    merge_remote_group: ("merge_remote_group",),
    mesh_abort: ("DeviceMesh.abort",),
    transport: ("_transport.new_transport",),
}  # fmt: skip


def all_checks(outer: Communicator, transport: str, folder: Path) -> dict[str, str]:
    """What each name does on this rank: "works", or the text of its `Unsupported`."""
    found: dict[str, str] = {}
    with registered(stand_in) if transport == "nccl" else nullcontext():
        for number, (check, names) in enumerate(CHECKS.items()):
            options: dict[str, Any] = {"init_method": f"file://{folder}/{number}"}
            options["pg_options"] = Options(stand_in.NAME if transport == "nccl" else transport)
            if check is reconfigure:
                options["enable_reconfigure"] = True
            said = "works"
            try:
                with default_group(outer, folder, **options):
                    check(Case(dist.group.WORLD, outer.rank, outer, transport))
            except Unsupported as error:
                said = str(error).removeprefix("unsupported: ").replace(stand_in.NAME, "nccl")
            except Exception as error:
                error.add_note(f"in the check of {names} over {transport}")
                raise
            found |= dict.fromkeys(names, said)
            outer.barrier()
    return found


@NEWEST
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_name_does_what_the_table_says(transport: str, tmp_path: Path) -> None:
    # "works", or words of the error
    expected = {row["name"]: str(row.get(transport, row.get("all", "works"))) for row in ROWS}
    with group_cluster(2, "gloo" if transport == "nccl" else transport, timeout=200.0) as cluster:
        for found in cluster.run(all_checks, transport, tmp_path):
            assert {name: text for name, text in found.items() if expected[name] not in text} == {}


def test_the_table_has_a_row_for_each_check_and_no_other_transports() -> None:
    assert sorted(row["name"] for row in ROWS) == sorted(name for names in CHECKS.values() for name in names)
    assert all({"name", "since"} <= set(row) <= {"name", "since", "all", *TRANSPORTS} for row in ROWS)
