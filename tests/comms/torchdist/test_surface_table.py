"""docs/reference/torch-surface.toml holds for each new name of torch 2.15 what it does over each transport.

Each check runs in a default group of its own, and calls the name as a program would: by torch's function where there is
one. Over `nccl` runs its stand-in, which has this package's code and host memory.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from holdfast import comms
from holdfast.comms import BackendUnavailable, Communicator, HoldfastError, NotConnected, Revoked, Unsupported
from holdfast.comms.torchdist import Options
from holdfast.harness import LocalCluster
from support import nccl_stand_in as stand_in
from support.source_tree import ROOT
from support.torch_groups import ENVIRON

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
    def window(self) -> Iterator[tuple[Any, torch.Tensor]]:
        exposed = torch.zeros(4)
        made = c10d._new_window(exposed)
        yield made, exposed
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


def put(case: Case) -> None:
    with case.window() as (window, exposed):
        window.put(torch.ones(2), case.peer, 1, False)
        window.wait_signal(case.peer, False)
        assert exposed.tolist() == [0, 1, 1, 0]


def signal(case: Case) -> None:
    with case.window() as (window, _):
        window.signal(case.peer, True).wait()
        assert window.wait_signal(case.peer, True).wait()


def map_remote_tensor(case: Case) -> None:
    with case.window() as (window, exposed):
        try:
            window.map_remote_tensor(case.peer)[0] = 7.0
        finally:
            dist.barrier()
        assert exposed[0] == 7


def get_attr(case: Case) -> None:
    with case.window() as (window, _):
        assert window.get_attr(case.peer).access_type.name in ("UNIFIED", "SEPARATE")


def register(case: Case) -> None:
    with case.window() as (window, _):
        window.tensor_deregister()
        window.tensor_register(torch.zeros(2), owning=False)


def pre_hook(case: Case) -> None:
    seen: list[Any] = []
    case.group.register_pre_hook(1, seen.append)
    assert case.total() == 3
    assert (seen[0].name.name, len(seen[0].input_tensors)) == ("ALLREDUCE", 1)


def post_hook(case: Case) -> None:
    seen: list[Any] = []
    case.group.register_post_hook(1, seen.append)
    assert case.total() == 3
    assert seen[0].name.name == "ALLREDUCE"


def abort_hook(case: Case) -> None:
    seen: list[int] = []
    case.group.register_abort_hook(1, lambda: seen.append(1))
    case.outer.barrier()
    case.group.abort()
    assert seen == [1]


def completion_hook(case: Case) -> None:
    seen: list[Any] = []
    case.group._register_on_completion_hook(seen.append)
    assert case.total() == 3
    case.group._wait_for_pending_works()
    assert len(seen) == 1


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


def supports_reconfigure(case: Case) -> None:
    assert c10d._supports_reconfigure()


def reconfigure(case: Case) -> None:
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


def set_timeout(case: Case) -> None:
    c10d.set_timeout(timedelta(seconds=17), dist.group.WORLD)
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.timeout == timedelta(seconds=17)


def backend_impl(case: Case) -> None:
    assert c10d.get_backend_impl(device=torch.device("cpu")) is case.group


def sequence_number(case: Case) -> None:
    works: list[Any] = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
    assert [(work.wait(), work._get_sequence_number()) for work in works] == [(True, 1), (True, 2)]


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
    assert case.total() == 3
    group: Any = c10d.get_backend_impl(device=torch.device("cpu"))
    group.suspend()
    with pytest.raises(NotConnected, match=r"resume\(\)"):
        case.total()
    group.resume()
    assert (case.total(), dist.get_rank()) == (3, case.rank)


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


CHECKS: dict[str, Callable[[Case], None]] = {
    "_supports_window": supports_window,
    "_new_window": window,
    "Window.put": put,
    "Window.signal": signal,
    "Window.wait_signal": signal,
    "Window.map_remote_tensor": map_remote_tensor,
    "Window.get_attr": get_attr,
    "Window.tensor_register": register,
    "Window.tensor_deregister": register,
    "register_pre_hook": pre_hook,
    "register_post_hook": post_hook,
    "register_abort_hook": abort_hook,
    "_register_on_completion_hook": completion_hook,
    "NanCheckHook": nan_check,
    "HealthCheckHook": health_check,
    "FlightRecorderHook": flight_recorder,
    "_supports_reconfigure": supports_reconfigure,
    "_get_reconfigure_handle": reconfigure,
    "_reconfigure": reconfigure,
    "init_process_group(enable_reconfigure=True)": reconfigure,
    "split_group": split_group,
    "shrink_group": shrink_group,
    "gather_single": gather_single,
    "set_timeout": set_timeout,
    "get_backend_impl": backend_impl,
    "Work.timeout": set_timeout,
    "Work._get_sequence_number": sequence_number,
    "_enable_collectives_timing": duration,
    "Work._get_duration": duration,
    "Backend.suspend": suspend_and_resume,
    "Backend.resume": suspend_and_resume,
    "Backend.memory_stats": memory_stats,
    "merge_remote_group": merge_remote_group,
    "DeviceMesh.abort": mesh_abort,
    "_transport.new_transport": transport,
}


def all_checks(outer: Communicator, transport: str, folder: str) -> dict[str, str]:
    """What each name does on this rank: "works", or the text of its `Unsupported`."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    store = dist.FileStore(f"{folder}/store", -1)
    backend = transport
    if transport == "nccl":
        comms.register(stand_in)
        backend = stand_in.NAME
    for name, check in CHECKS.items():
        if any(check is CHECKS[earlier] for earlier in found):
            found[name] = next(text for earlier, text in found.items() if CHECKS[earlier] is check)
            continue
        more: Any = {"enable_reconfigure": True} if check is reconfigure else {}
        dist.init_process_group(
            "holdfast",
            store=dist.PrefixStore(name, store),
            rank=outer.rank,
            world_size=outer.size,
            timeout=timedelta(seconds=60),
            pg_options=Options(backend),
            **more,
        )
        try:
            check(Case(dist.group.WORLD, outer.rank, outer, transport))
            found[name] = "works"
        except Unsupported as error:
            found[name] = str(error).removeprefix("unsupported: ").replace(stand_in.NAME, "nccl")
        except Exception as error:
            error.add_note(f"in the check of {name} over {transport}")
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        outer.barrier()
    if transport == "nccl":
        comms.unregister(stand_in)
    return found


def expected(name: str, transport: str) -> str:
    """What the table says: "works", or words of the error."""
    row = next(row for row in ROWS if row["name"] == name)
    return str(row.get(transport, row.get("all", "works")))


@pytest.mark.skipif(find_spec("torch.distributed._transport") is None, reason="the table is of torch 2.15")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_name_does_what_the_table_says(transport: str, tmp_path: Path) -> None:
    outer = "gloo" if transport == "nccl" else transport
    with LocalCluster(2, outer, timeout=200.0, environ=ENVIRON) as cluster:
        for found in cluster.run(all_checks, transport, str(tmp_path)):
            wrong = {name: text for name, text in found.items() if expected(name, transport) not in text}
            assert not wrong


def test_the_table_has_a_row_for_each_check_and_no_other_transports() -> None:
    assert [row["name"] for row in ROWS] == list(CHECKS)
    assert all({"name", "since"} <= set(row) <= {"name", "since", "all", *TRANSPORTS} for row in ROWS)
