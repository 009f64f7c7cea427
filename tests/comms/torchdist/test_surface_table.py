"""docs/reference/torch-surface.toml holds for each new name of torch 2.15 what it does over each transport.

Each check runs in a default group of its own, and calls the name as a program would: by torch's function where there is
one. Over `nccl` runs its stand-in, which has this package's code and host memory.
"""

from __future__ import annotations

import importlib
import json
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
from torch._C import _distributed_c10d

from holdfast.comms import BackendUnavailable, Communicator, HoldfastError, NotConnected, Revoked, Unsupported
from holdfast.comms.torchdist import Options
from support.comms import nccl_stand_in as stand_in
from support.comms.meeting import registered
from support.comms.torch_groups import default_group, group_cluster
from support.source_tree import ROOT

ROWS: list[dict[str, Any]] = tomllib.loads((ROOT / "docs/reference/torch-surface.toml").read_text())["row"]
TRANSPORTS = ("shm", "gloo", "ucx", "mpi", "nccl")
c10d: Any = dist.distributed_c10d
types: Any = _distributed_c10d


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
    with case.window():
        pass


def put_and_signal(case: Case) -> None:
    with case.window() as window:
        window.put(torch.ones(2), case.peer, 1, False)
        window.wait_signal(case.peer, False)
        window.signal(case.peer, True).wait()
        assert window.wait_signal(case.peer, True).wait()


def map_remote_tensor(case: Case) -> None:
    with case.window() as window:
        try:
            window.map_remote_tensor(case.peer)
        finally:
            dist.barrier()


def get_attr(case: Case) -> None:
    with case.window() as window:
        assert window.get_attr(case.peer).access_type.name in ("UNIFIED", "SEPARATE")


def register(case: Case) -> None:
    with case.window() as window:
        window.tensor_deregister()
        window.tensor_register(torch.zeros(2), owning=False)


def op_hooks(case: Case) -> None:
    seen: list[Any] = []
    case.group.register_pre_hook(1, seen.append)
    case.group.register_post_hook(1, seen.append)
    case.group._register_on_completion_hook(seen.append)
    assert case.total() == 3
    case.group._wait_for_pending_works()
    assert len(seen) == 3


def abort_hook(case: Case) -> None:
    seen: list[int] = []
    case.group.register_abort_hook(1, lambda: seen.append(1))
    case.outer.barrier()
    case.group.abort()
    assert seen == [1]


def nan_check(case: Case) -> None:
    case.group._hooks.refuse_nan = True  # as TORCH_DIST_NAN_CHECK=1 sets it when the group is made
    with pytest.raises(HoldfastError, match="NaN"):
        dist.all_reduce(torch.tensor([float("nan")]))
    assert case.total() == 3


def health_check(case: Case) -> None:
    types.HealthCheckHook.attach(case.group)
    case.outer.barrier()
    case.group.abort()
    answers: list[str] = []

    class Answer(types._Response):  # type: ignore[misc]  # of torch's debug server
        def set_content(self, content: str, content_type: str) -> None:
            answers.append(content)

        def set_status(self, status: int) -> None:
            """Does nothing."""

    types._get_handler("c10d_health_check")(types._Request(), Answer())
    if not json.loads(answers[0])["unhealthy_backends"]:
        raise Unsupported("torch calls it for groups in C++ alone; register_abort_hook is called")


def flight_recorder(case: Case) -> None:
    try:
        types.FlightRecorderHook.attach(case.group, [0, 1])
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
    new_transport = importlib.import_module("torch.distributed._transport").new_transport
    try:
        made = new_transport("holdfast", "cpu", plane=case.transport)
    except RuntimeError as error:  # torch's own, of the error that says why
        assert isinstance(error.__cause__, BackendUnavailable)
        raise Unsupported("it has no memory plane") from error
    with made:
        memory = made.register_memory(torch.arange(2.0))
        url, descriptor = case.outer.all_gather_object((made.bind(), memory.to_remote_buffer().serialize()))[case.peer]
        assert made.connect(url) == 0
        into = torch.empty(2)
        remote = type(memory.to_remote_buffer()).deserialize(descriptor)
        made.read(made.register_memory(into).to_mutable_view(), remote)
        assert into.tolist() == [0, 1]
        case.outer.barrier()


CHECKS: dict[Callable[[Case], None], tuple[str, ...]] = {
    supports_window: ("_supports_window",),
    window: ("_new_window",),
    put_and_signal: ("Window.put", "Window.signal", "Window.wait_signal"),
    map_remote_tensor: ("Window.map_remote_tensor",),
    get_attr: ("Window.get_attr",),
    register: ("Window.tensor_register", "Window.tensor_deregister"),
    op_hooks: ("register_pre_hook", "register_post_hook", "_register_on_completion_hook"),
    abort_hook: ("register_abort_hook",),
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


def expected(name: str, transport: str) -> str:
    """What the table says: "works", or words of the error."""
    row = next(row for row in ROWS if row["name"] == name)
    return str(row.get(transport, row.get("all", "works")))


@pytest.mark.skipif(find_spec("torch.distributed._transport") is None, reason="the table is of torch 2.15")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_name_does_what_the_table_says(transport: str, tmp_path: Path) -> None:
    with group_cluster(2, "gloo" if transport == "nccl" else transport, timeout=200.0) as cluster:
        for found in cluster.run(all_checks, transport, tmp_path):
            assert {name: text for name, text in found.items() if expected(name, transport) not in text} == {}


def test_the_table_has_a_row_for_each_check_and_no_other_transports() -> None:
    assert sorted(row["name"] for row in ROWS) == sorted(name for names in CHECKS.values() for name in names)
    assert all({"name", "since"} <= set(row) <= {"name", "since", "all", *TRANSPORTS} for row in ROWS)
