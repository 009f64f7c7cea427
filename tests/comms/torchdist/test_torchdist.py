"""`torch.distributed` over holdfast: programs for plain gloo run unchanged, with the same results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.comms import Communicator, Mismatch, OpTimeout, Unsupported, Work
from holdfast.comms.executor import Executor
from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON, in_group, losses_of, on_each_rank_of, tiny_model, train_ddp, train_fsdp2


@pytest.fixture(
    scope="module", params=["shm", "gloo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ucx", "mpi"))]
)
def pair(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Two processes. The environment chooses their transport."""
    backend = str(request.param)
    with LocalCluster(2, backend, timeout=90.0, environ={**ENVIRON, "HOLDFAST_BACKEND": backend}) as cluster:
        cluster.warm_up()
        yield cluster


@pytest.fixture(scope="module")
def four() -> Iterator[LocalCluster]:
    with LocalCluster(4, "shm", timeout=90.0, environ={**ENVIRON, "HOLDFAST_BACKEND": "shm"}) as cluster:
        yield cluster


@pytest.mark.parametrize("train", [train_ddp, train_fsdp2])
def test_losses_equal_those_over_plain_gloo(
    pair: LocalCluster, tmp_path: Path, train: Callable[[int, int], list[float]]
) -> None:
    plain = in_group(pair, tmp_path, train, "gloo")
    assert in_group(pair, tmp_path, train) == plain
    assert plain[0] != plain[1]


def test_ddp_with_powersgd_whose_hook_waits_inside_a_callback(pair: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> list[float]:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(tiny_model())
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return losses_of(model, rank)

    losses = in_group(pair, tmp_path, body)
    assert losses[0][-1] < losses[0][0]


@on_each_rank_of("pair")
def test_dtensor_redistribution(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7.0 * 6).reshape(7, 6)
    by_rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(by_rows.full_tensor(), whole)
    by_columns = by_rows.redistribute(placements=[Shard(1)])
    assert by_columns.to_local().shape == (7, 6 // size)
    assert torch.equal(by_columns.redistribute(placements=[Replicate()]).to_local(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    assert torch.equal(partial.redistribute(placements=[Shard(1)]).full_tensor(), whole * size)
    assert torch.equal(partial.full_tensor(), whole * size)


def test_a_mesh_of_two_by_two_has_groups_of_its_rows_and_columns(four: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> tuple[float, float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        sums = []
        for name in ("replicas", "shards"):
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=mesh.get_group(name))
            sums.append(total.item())
        whole = torch.arange(24.0).reshape(4, 6)
        spread = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        assert torch.equal(spread.redistribute(placements=[Shard(0), Shard(1)]).full_tensor(), whole)
        return sums[0], sums[1]

    assert in_group(four, tmp_path, body) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


def test_hybrid_sharded_fsdp_and_overlapping_subgroups(four: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> float:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = fully_shard(tiny_model(), mesh=mesh)
        losses = losses_of(model, 0)
        low, high = dist.new_group([0, 1, 2]), dist.new_group([2, 3])
        total = torch.ones(1)
        if rank <= 2:
            dist.all_reduce(total, group=low)
        if rank >= 2:
            dist.all_reduce(total, group=high)
        assert total.item() == {0: 3, 1: 3, 2: 4, 3: 4}[rank] or rank >= 2
        return losses[-1]

    assert len(set(in_group(four, tmp_path, body))) == 1


def test_a_distributed_checkpoint_is_saved_and_loaded(pair: LocalCluster, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")

    def body(rank: int, size: int) -> None:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (size,))
        weight = torch.arange(20.0).reshape(5, 4)
        checkpoint.save({"weight": distribute_tensor(weight, mesh, [Shard(0)]), "step": 7}, checkpoint_id=folder)
        state = {"weight": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)]), "step": 0}
        checkpoint.load(state, checkpoint_id=folder)
        assert torch.equal(state["weight"].full_tensor(), weight) and state["step"] == 7

    in_group(pair, tmp_path, body)


@on_each_rank_of("pair")
def test_functional_collectives_plain_and_traced(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    mine = torch.full((2,), float(rank + 1))
    assert torch.equal(functional.all_reduce(mine, "sum", group), torch.full((2,), 3.0))
    assert functional.all_gather_tensor(mine, 0, group).tolist() == [1, 1, 2, 2]
    assert functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group).tolist() == [
        4.0 * rank,
        4.0 * rank + 2,
    ]
    assert functional.broadcast(mine, 1, group).tolist() == [2, 2]
    swapped = functional.all_to_all_single(torch.arange(4.0) + 10 * rank, [2, 2], [2, 2], group)
    assert swapped.tolist() == [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]
    several = functional.all_reduce_coalesced([mine, mine], "max", group)
    assert [each.tolist() for each in several] == [[2, 2], [2, 2]]
    gathered = functional.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
    assert [each.tolist() for each in gathered] == [[1, 1, 2, 2], [1, 2]]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def traced(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", group) + 1

    assert traced(mine).tolist() == [7, 7]


@on_each_rank_of("pair")
def test_object_collectives(rank: int, size: int) -> None:
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(size)]
    given = [[rank, "x"]]
    dist.broadcast_object_list(given, src=1)
    assert given == [[1, "x"]]
    taken: list[object] = [None]
    dist.scatter_object_list(taken, ["a", "b"] if rank == 0 else None, src=0)
    assert taken == ["ab"[rank]]
    out: list[object] | None = [None] * size if rank == 1 else None
    dist.gather_object(rank, out, dst=1)
    assert out is None or out == [0, 1]
    if rank == 0:
        dist.send_object_list([{"big": "y" * 10_000}], dst=1)
    else:
        dist.recv_object_list(taken, src=0)
        assert taken == [{"big": "y" * 10_000}]


@on_each_rank_of("pair")
def test_coalesced_ops_and_async_handles(rank: int, size: int) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 1000)]
    with _coalescing_manager(async_ops=True) as several:
        for tensor in tensors:
            dist.all_reduce(tensor)
    several.wait()
    assert all(bool((tensor == 3).all()) for tensor in tensors)
    work = dist.all_reduce(tensors[1], async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait() and work.is_completed() and work.is_success()
    assert bool((doubled.wait() == 12).all())
    inputs, output = torch.full((3,), float(rank)), torch.empty(3 * size)
    dist.all_gather_into_tensor(output, inputs)
    part = torch.empty(3)
    dist.reduce_scatter_tensor(part, output, op=dist.ReduceOp.AVG)
    assert bool((part == rank).all())


@on_each_rank_of("pair")
def test_sends_and_receives_run_concurrently(rank: int, size: int) -> None:
    """Both ranks send first, payloads too large to buffer; with tags, and with any-source receives."""

    peer = 1 - rank
    for count in (1, 300_000):
        mine, theirs = torch.full((count,), float(rank)), torch.empty(count)
        for work in [dist.isend(mine, peer), dist.irecv(theirs, peer)]:
            work.wait()
        assert bool((theirs == peer).all())
        operations = [dist.P2POp(dist.irecv, theirs, peer), dist.P2POp(dist.isend, mine, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    if rank == 0:
        late = [dist.isend(torch.full((300_000,), float(tag)), 1, tag=tag) for tag in (5, 6)]
        for work in late:
            work.wait()
        dist.send(torch.tensor([42.0]), 1)
    else:
        for tag in (6, 5):
            got = torch.empty(300_000)
            dist.recv(got, 0, tag=tag)
            assert got[0].item() == tag
        anything = torch.empty(1)
        assert dist.recv(anything) == 0 and anything.item() == 42


def test_monitored_barrier_names_the_missing_ranks(four: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> str:
        dist.monitored_barrier()
        if rank == 2:
            time.sleep(1.0)
            return "late"
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
        return str(caught.value)

    said = in_group(four, tmp_path, body)
    assert "Rank 2 failed to pass monitoredBarrier in 500 ms" in said[0]
    assert "rank 0" in said[1] and "rank 0" in said[3]


@on_each_rank_of("pair")
def test_a_missing_rank_raises_holdfasts_op_timeout(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(OpTimeout):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        time.sleep(1.0)


def test_a_killed_rank_raises_in_the_others_even_inside_backward(process_backend: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        from torch.nn.parallel import DistributedDataParallel

        import holdfast.comms.torchdist  # noqa: F401

        dist.init_process_group("holdfast", init_method=f"file://{tmp_path}/meet", rank=comm.rank, world_size=comm.size)
        model = DistributedDataParallel(tiny_model())
        other = torch.ones(1)
        for step in range(100):
            if comm.rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1)).backward()
                dist.all_reduce(other)
            except RuntimeError as error:
                (tmp_path / str(comm.rank)).write_text(str(error))
                break
        dist.destroy_process_group()

    with LocalCluster(
        3, process_backend, timeout=60.0, environ={**ENVIRON, "HOLDFAST_BACKEND": process_backend}
    ) as cluster:
        cluster.outcomes(body)
    for rank in (0, 2):
        said = (tmp_path / str(rank)).read_text()
        assert "rank 1" in said or "lost a connection" in said, said


def test_options_choose_the_transport_and_are_inherited(pair: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> tuple[str, str]:
        from holdfast.comms.torchdist import Options, behind

        chosen_by_environment = os.environ.pop("HOLDFAST_BACKEND")
        other = "gloo" if chosen_by_environment == "shm" else "shm"
        try:
            group = dist.new_group(pg_options=Options(other))
            chosen, inherited = behind(group), behind(dist.new_group())
        finally:
            os.environ["HOLDFAST_BACKEND"] = chosen_by_environment
        assert chosen is not None and inherited is not None
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2, 2, 2]
        with pytest.raises(TypeError, match="pg_options"):
            dist.new_group(pg_options="shm")
        return chosen.communicator.backend, inherited.options.backend

    first, second = in_group(pair, tmp_path, body)
    assert first == second and first[0] == ("gloo" if pair.backend == "shm" else "shm")
    assert first[1] in (pair.backend, "auto")


def test_a_group_may_have_another_backend_for_each_device_from_torch_2_14_on(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        from holdfast.comms.torchdist import behind, process_group

        def begin() -> None:
            meet = f"file://{tmp_path}/meet"
            backends = "cpu:holdfast_device,cuda:gloo"
            dist.init_process_group(backends, init_method=meet, rank=comm.rank, world_size=comm.size)

        if not process_group.AVAILABLE:
            with pytest.raises(Unsupported, match=r"torch 2\.14"):
                begin()
            return
        begin()
        ours = behind(dist.group.WORLD)
        assert ours is not None and ours.size() == dist.get_world_size() == 2
        total = torch.full((3,), float(comm.rank))
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
        part = dist.new_group([0, 1])
        given, taken = torch.arange(2.0), torch.empty(4)
        dist.all_gather_into_tensor(taken, given, group=part, async_op=True).wait()
        assert taken.tolist() == [0, 1, 0, 1]
        if comm.rank == 0:
            dist.send(given, 1)
        else:
            dist.recv(given.zero_(), 0)
        assert given.tolist() == [0, 1]
        dist.destroy_process_group()

    with LocalCluster(2, "shm", timeout=60.0, environ={**ENVIRON, "HOLDFAST_BACKEND": "shm"}) as cluster:
        cluster.run(body)


def test_the_entry_point_of_torch_2_14_registers_the_backend() -> None:
    from importlib.metadata import entry_points

    (point,) = [each for each in entry_points(group="torch.distributed.backends") if each.name == "holdfast"]
    point.load()()
    assert dist.is_backend_available("holdfast")


def test_ddps_builtin_fp16_hook_gives_the_results_of_plain_gloo(pair: LocalCluster, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> list[float]:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(tiny_model())
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        return losses_of(model, rank)

    assert in_group(pair, tmp_path, body) == in_group(pair, tmp_path, body, "gloo")


@on_each_rank_of("pair")
def test_groups_of_split_group(rank: int, size: int) -> None:
    group = dist.group.WORLD
    part = group.split_group([1, 0], timeout=timedelta(seconds=20), group_name="part")
    assert part.group_name == "part"
    total = torch.full((3,), float(rank))
    part.broadcast(total, root=1).wait()
    assert total.tolist() == [1, 1, 1]
    alone = group.split_group([1])
    assert (alone is None) == (rank == 0)
    for each in (alone, part):
        if each is not None:
            each.shutdown()


def test_the_debug_level_detail_finds_ranks_that_disagree(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        dist.set_debug_level_from_env()
        group = dist.new_group()
        if rank == 0:
            with pytest.raises(Mismatch, match="broadcast"):
                dist.broadcast(torch.ones(2), 0, group=group)
        else:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(2), group=group)

    environ = {**ENVIRON, "HOLDFAST_BACKEND": "shm", "HOLDFAST_CHECK": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    with LocalCluster(2, "shm", timeout=60.0, environ=environ) as cluster:
        in_group(cluster, tmp_path, body)


@on_each_rank_of("four")
def test_groups_with_equal_numbers_and_different_members_are_a_mismatch(rank: int, size: int) -> None:
    """Ranks 1 and 2 make a group without rank 0; rank 0's next group then takes the same number."""

    if rank in (1, 2):
        dist.new_group([1, 2])
    dist.barrier()
    if rank == 0:
        with pytest.raises(Mismatch, match=r"of ranks \[0, 2\] on rank 0, and of ranks \[1, 2\] on rank 1: every rank"):
            dist.new_group([0, 2])
    dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 4


def test_an_op_takes_the_short_path_unless_it_has_a_timeout_of_its_own(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> list[int]:
        group: Any = dist.group.WORLD
        executor, checked, found = group.communicator._executor, [], []

        def issue(*arguments: Any) -> Work:
            checked.append(arguments)
            return Executor.issue(executor, *arguments)

        executor.issue = issue
        for limit in (60.0, 30.0, 60.0):
            group.set_timeout(timedelta(seconds=limit))
            tensor = torch.full((2,), float(rank))
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1.0, 1.0]
            found.append(len(checked))
        return found

    environ = {**ENVIRON, "HOLDFAST_BACKEND": "shm", "HOLDFAST_CHECK": "0"}
    with LocalCluster(2, "shm", timeout=90.0, environ=environ) as cluster:
        assert in_group(cluster, tmp_path, body) == [[0, 1, 1]] * 2
