"""What torch's process groups, backends and works offer: each of it works over holdfast, or is refused by name."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch._C import _distributed_c10d

import holdfast.comms.torchdist  # noqa: F401  # registers the backend
from holdfast.comms import NotConnected, Unsupported
from holdfast.comms.torchdist.process_group import AVAILABLE, HoldfastBackend, HoldfastProcessGroup
from holdfast.comms.torchdist.works import TorchWork
from support.programs.torch_names import table, uses
from support.programs.torch_suite import TABLE as SUITE
from support.programs.torch_suite import TRANSPORTS, Report, outcomes
from support.source_tree import ROOT

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
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[HoldfastProcessGroup]:
    """A default group of this process alone."""
    monkeypatch.setenv("HOLDFAST_BACKEND", "shm")
    dist.init_process_group("holdfast", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    made: Any = dist.group.WORLD
    yield made
    dist.destroy_process_group()


def test_what_a_group_cannot_do_is_said_or_refused_by_name(group: Any) -> None:
    assert group._supports_time_estimate is False
    for name in ("supports_window", "supports_abort_hooks", "supports_completion_hooks", "_supports_time_estimate"):
        assert getattr(HoldfastBackend, name) is False
    calls: dict[str, tuple[Any, ...]] = {
        "memory_stats": (),
        "merge_remote_group": (dist.HashStore(), 2),
    }
    for name, arguments in calls.items():
        with pytest.raises(Unsupported, match=name):
            getattr(group, name)(*arguments)


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


def test_the_check_for_nan_refuses_inputs_and_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    monkeypatch.setenv("HOLDFAST_BACKEND", "shm")
    dist.init_process_group("holdfast", store=dist.HashStore(), rank=0, world_size=1)
    nan = torch.tensor([0.0, float("nan")])
    try:
        sparse = torch.sparse_coo_tensor([[0]], [float("nan")], (2,), check_invariants=True)
        for tensor in (nan, nan.to(torch.complex64), nan.to(torch.float8_e5m2), sparse):
            with pytest.raises(RuntimeError, match="allreduce: input tensor 0 holds NaN"):
                dist.all_reduce(tensor)
        dist.all_gather_into_tensor(nan, torch.ones(2))
        assert nan.tolist() == [1, 1]
        dist.all_reduce(torch.ones(2, dtype=torch.int8))
    finally:
        dist.destroy_process_group()


TABLE = table()
ADVICE = "take another name, or look for it with getattr; tests/support/programs/torch_names.py makes the tables anew"


def claimed() -> list[str]:
    """The versions of torch that pyproject.toml allows, as "2.11"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    specifier = next(each.specifier for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    return [f"2.{minor}" for minor in range(100) if specifier.contains(f"2.{minor}.0")]


def test_there_is_a_table_for_each_claimed_version() -> None:
    assert sorted(TABLE, key=lambda version: int(version[2:])) == claimed()


@pytest.mark.parametrize("version", TABLE)
def test_each_name_that_is_imported_from_torch_is_in_the_version(version: str) -> None:
    missing = [
        f"{place}: {module}.{name}"
        for module, names in uses().items()
        for name, place in names.items()
        if name not in TABLE[version].get(module, ())
    ]
    missing += [module for module in uses() if module not in TABLE[version]]
    assert not missing, ADVICE


def test_the_modules_of_the_installed_version_have_the_names_too() -> None:
    """As an import finds them, without the table."""
    for name, place in uses()["torch.distributed"].items():
        assert hasattr(dist, name) or name.startswith("ProcessGroup"), place


SELECTION: list[str] = tomllib.loads(SUITE.read_text())["selection"]["tests"]


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_passes_over_plain_gloo_passes_over_holdfast(transport: str) -> None:
    """Runs all of the selection over shm, and one test in four over each other transport."""
    names = SELECTION if transport == "shm" else SELECTION[TRANSPORTS.index(transport) :: 4]
    report = Report.of(names, outcomes("holdfast", transport, names))
    assert not report.failed
    assert report.passed > 0.7 * len(names), report


def test_what_torch_skips_by_the_backends_name_is_told_apart_from_what_fails() -> None:
    ended = {
        "a": {"outcome": "passed", "why": ""},
        "b": {"outcome": "skipped", "why": "a rank's output\nTest requires backend holdfast to be one of {'nccl'}"},
        "c": {"outcome": "failed", "why": "wrong sum"},
    }
    report = Report.of(["a", "b", "c", "d"], ended)
    assert (report.passed, list(report.skipped), report.failed) == (1, ["b"], {"c": "wrong sum", "d": "did not end"})
    assert str(report).splitlines() == [
        "1 of 4 pass, 2 fail, torch skips 1",
        "  failed: c: wrong sum",
        "  failed: d: did not end",
        "  skipped by torch: b: Test requires backend holdfast to be one of {'nccl'}",
    ]
