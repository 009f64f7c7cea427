"""`torch.distributed` over holdfast: programs for plain gloo run unchanged, and groups get other members."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.comms import Communicator, Mismatch, OpTimeout, PeerFailed, Revoked, Unsupported, Work
from holdfast.comms.torchdist import Options, behind, process_group
from holdfast.comms.torchdist.process_group import HoldfastProcessGroup
from holdfast.harness import LocalCluster
from support.comms import torch_groups
from support.comms.ranks import on_ranks, on_ranks_of, second_tier
from support.comms.torch_groups import ENVIRON, default_group, in_group, on_each_rank_of, shared_groups

pair = shared_groups(2, "shm", "gloo", *second_tier("ucx", "mpi"))
four = shared_groups(4, "shm")
unchecked = shared_groups(2, "shm", HOLDFAST_CHECK="0")
in_detail = shared_groups(2, "shm", HOLDFAST_CHECK="0", TORCH_DISTRIBUTED_DEBUG="DETAIL")
compiling = shared_groups(2, "shm", timeout=300.0, TORCHINDUCTOR_COMPILE_THREADS="1")


def train_with_fp16_hook(rank: int, size: int) -> list[float]:
    model = DistributedDataParallel(torch_groups.tiny_model())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return torch_groups.losses_of(model, rank)


@pytest.mark.parametrize("train", [torch_groups.train_ddp, torch_groups.train_fsdp2, train_with_fp16_hook])
def test_losses_equal_those_over_plain_gloo(
    pair: LocalCluster, tmp_path: Path, train: Callable[[int, int], list[float]]
) -> None:
    plain = in_group(pair, tmp_path, train, "gloo")
    assert in_group(pair, tmp_path, train) == plain
    assert plain[0] != plain[1]


@on_each_rank_of("pair")
def test_ddp_with_powersgd_whose_hook_waits_inside_a_callback(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(torch_groups.tiny_model())
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = torch_groups.losses_of(model, rank)
    assert rank == 1 or losses[-1] < losses[0]


@on_each_rank_of("pair")
def test_dtensor_redistribution(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(7.0 * 6).reshape(7, 6)
    by_rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(by_rows.full_tensor(), whole)
    by_columns = by_rows.redistribute(placements=[Shard(1)])
    assert by_columns.to_local().shape == (7, 6 // size)
    assert torch.equal(by_columns.redistribute(placements=[Replicate()]).to_local(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    assert torch.equal(partial.redistribute(placements=[Shard(1)]).full_tensor(), whole * size)
    assert torch.equal(partial.full_tensor(), whole * size)


@on_each_rank_of("four")
def test_a_mesh_of_two_by_two_shards_in_rows_and_columns_and_subgroups_overlap(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for name, sums in (("replicas", [2, 4, 2, 4]), ("shards", [1, 1, 5, 5])):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=mesh.get_group(name))
        assert total.item() == sums[rank]
    whole = torch.arange(24.0).reshape(4, 6)
    spread = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    assert torch.equal(spread.redistribute(placements=[Shard(0), Shard(1)]).full_tensor(), whole)
    losses: list[object] = [None] * size
    dist.all_gather_object(losses, torch_groups.losses_of(fully_shard(torch_groups.tiny_model(), mesh=mesh), 0)[-1])
    assert len(set(losses)) == 1
    for members in ([0, 1, 2], [2, 3]):
        group, total = dist.new_group(members), torch.ones(1)
        if rank in members:
            dist.all_reduce(total, group=group)
            assert total.item() == len(members)


@on_each_rank_of("pair")
def test_a_distributed_checkpoint_is_saved_and_loaded(rank: int, size: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint

    mesh, folder = dist.init_device_mesh("cpu", (size,)), str(tmp_path / "checkpoint")
    weight = torch.arange(20.0).reshape(5, 4)
    checkpoint.save({"weight": distribute_tensor(weight, mesh, [Shard(0)]), "step": 7}, checkpoint_id=folder)
    state = {"weight": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)]), "step": 0}
    checkpoint.load(state, checkpoint_id=folder)
    assert torch.equal(state["weight"].full_tensor(), weight) and state["step"] == 7


@on_each_rank_of("pair")
def test_functional_collectives_plain_and_traced(rank: int, size: int) -> None:
    group = dist.group.WORLD
    mine = torch.full((2,), float(rank + 1))
    assert torch.equal(functional.all_reduce(mine, "sum", group), torch.full((2,), 3.0))
    assert functional.all_gather_tensor(mine, 0, group).tolist() == [1, 1, 2, 2]
    part = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group)
    assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]
    assert functional.broadcast(mine, 1, group).tolist() == [2, 2]
    swapped = functional.all_to_all_single(torch.arange(4.0) + 10 * rank, [2, 2], [2, 2], group)
    assert swapped.tolist() == [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]
    several = functional.all_reduce_coalesced([mine, mine], "max", group)
    assert [each.tolist() for each in several] == [[2, 2], [2, 2]]
    gathered = functional.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
    assert [each.tolist() for each in gathered] == [[1, 1, 2, 2], [1, 2]]
    if os.environ["HOLDFAST_BACKEND"] != "shm":  # a trace is the same over all
        return

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
    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 1000)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as several:
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
    """Both ranks send first, payloads too large to buffer, and receive in another order."""
    peer = 1 - rank
    for count in (1, 300_000):
        theirs = torch.empty(count)
        works = [dist.isend(torch.full((count,), 10.0 * rank + tag), peer, tag=tag) for tag in (5, 6)]
        for tag in (6, 5):
            dist.recv(theirs, peer, tag=tag)
            assert bool((theirs == 10 * peer + tag).all())
        mine = torch.full((count,), float(rank))
        operations = [dist.P2POp(dist.irecv, theirs, peer), dist.P2POp(dist.isend, mine, peer)]
        for work in [*works, *dist.batch_isend_irecv(operations)]:
            work.wait()
        assert bool((theirs == peer).all())


@on_each_rank_of("four")
def test_monitored_barrier_names_the_missing_ranks(rank: int, size: int) -> None:
    group = dist.new_group()
    dist.monitored_barrier(group)
    if rank != 2:
        words = "rank 0" if rank else "Rank 2 failed to pass monitoredBarrier in 3000 ms"
        with pytest.raises(RuntimeError, match=words):
            dist.monitored_barrier(group, timeout=timedelta(seconds=3.0), wait_all_ranks=True)
    dist.barrier()


@on_each_rank_of("pair")
def test_a_missing_rank_raises_holdfasts_op_timeout(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3.0))
    if rank == 0:
        with pytest.raises(OpTimeout):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


@on_each_rank_of("pair")
def test_options_choose_the_transport_and_are_inherited(rank: int, size: int) -> None:
    chosen_by_environment = os.environ.pop("HOLDFAST_BACKEND")
    other = "gloo" if chosen_by_environment == "shm" else "shm"
    try:
        group = dist.new_group(pg_options=Options(other))
        chosen, inherited = behind(group), behind(dist.new_group())
    finally:
        os.environ["HOLDFAST_BACKEND"] = chosen_by_environment
    assert chosen is not None and inherited is not None
    assert chosen.communicator.backend == other and inherited.options.backend in (chosen_by_environment, "auto")
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="pg_options"):
        dist.new_group(pg_options="shm")


@on_ranks(2, "shm", environ={**ENVIRON, "HOLDFAST_BACKEND": "shm"})
def test_a_group_may_have_another_backend_for_each_device_from_torch_2_14_on(
    comm: Communicator, tmp_path: Path
) -> None:
    group = default_group(comm, tmp_path, "cpu:holdfast_device,cuda:gloo", init_method=f"file://{tmp_path}/meet")
    if not process_group.AVAILABLE:
        with pytest.raises(Unsupported, match=r"torch 2\.14"), group:
            pass
        return
    with group:
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


def test_the_entry_point_of_torch_2_14_registers_the_backend() -> None:
    (point,) = [each for each in entry_points(group="torch.distributed.backends") if each.name == "holdfast"]
    point.load()()
    assert dist.is_backend_available("holdfast")


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


@on_each_rank_of("in_detail")
def test_the_debug_level_detail_finds_ranks_that_disagree(rank: int, size: int) -> None:
    dist.set_debug_level_from_env()
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(Mismatch, match="broadcast"):
            dist.broadcast(torch.ones(2), 0, group=group)
    else:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(2), group=group)


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


@on_each_rank_of("unchecked")
def test_an_op_takes_the_fast_path_unless_it_has_a_timeout_of_its_own(rank: int, size: int) -> None:
    """An op of the fast path whose peer is late ends on the slow path, so only its beginning is counted."""
    group: Any = dist.group.WORLD
    fast, begun = group.communicator._fast, list[Any]()

    def all_reduce(*arguments: Any) -> Work | None:
        begun.append(arguments)
        return fast.all_reduce(*arguments)

    group.communicator._fast = SimpleNamespace(all_reduce=all_reduce)
    for limit, times in ((60.0, 1), (30.0, 1), (60.0, 2)):
        group.set_timeout(timedelta(seconds=limit))
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0] and len(begun) == times


@pytest.mark.thorough
@on_each_rank_of("compiling")
def test_a_compiled_ddp_model_has_the_gradients_of_ddp(rank: int, size: int) -> None:
    """Uses dynamo's DDP optimizer, which splits the graph at the two buckets."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
    compiled = torch.compile(model, backend="aot_eager")
    data = torch.full((4, 8), rank + 1.0)

    def gradients(forward: object) -> list[torch.Tensor]:
        model.zero_grad()
        assert callable(forward)
        forward(data).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain, fast = gradients(model), gradients(compiled)
    assert len(plain) == len(fast) == 6
    for one, other in zip(plain, fast, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.thorough
@on_each_rank_of("compiling")
def test_inductor_moves_computation_between_a_collective_and_its_wait(rank: int, size: int) -> None:
    """One graph without a break, in the order that inductor gives gloo's collectives, too."""

    from torch._inductor.utils import run_and_get_code

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return total + 1, weight @ weight

    passes: dict[str, object] = {"reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"]}
    compiled = torch.compile(step, fullgraph=True, options={"reorder_for_compute_comm_overlap": True, **passes})
    arguments = torch.full((4,), rank + 1.0), torch.eye(8)
    (total, product), (code, *_) = run_and_get_code(compiled, *arguments)
    assert total.tolist() == [7.0] * 4
    assert torch.equal(product, torch.eye(8))
    calls = ["_c10d_functional.all_reduce_.default(", "extern_kernels.mm(", "_c10d_functional.wait_tensor.default("]
    places = [code.index(call) for call in calls]
    assert places == sorted(places)


@pytest.mark.thorough
@on_each_rank_of("compiling")
def test_compiled_collectives_have_the_gradients_of_torchs(rank: int, size: int) -> None:
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor_autograd(x, 0, group)
        swapped = functional.all_to_all_single_autograd(gathered * (rank + 1), None, None, group)
        return functional.reduce_scatter_tensor_autograd(swapped**2, "sum", 0, group).sum()

    x = torch.tensor([1.0, 2.0]) + rank
    x.requires_grad_()
    loss(x).backward()
    # Each rank sends y_r = (r + 1) * [x_0, x_1]; the square of y_r's elements is in the loss of one rank.
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([2 * (1 + 4) * value for value in x.tolist()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("train", [torch_groups.train_ddp, torch_groups.train_fsdp2])
def test_gpu_losses_equal_those_of_torchs_own_nccl(
    train: Callable[[int, int, str], list[float]], tmp_path: Path
) -> None:
    def body(comm: Communicator) -> list[list[float]]:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
        losses = []
        for name, options in (("nccl", None), ("holdfast", Options("nccl", device="cuda:0"))):
            with default_group(comm, tmp_path, name, pg_options=options):
                losses.append(train(comm.rank, comm.size, "cuda:0"))
        return losses

    with torch_groups.group_cluster(2, "gloo", timeout=120.0) as cluster:
        (plain, ours), (other_plain, other_ours) = cluster.run(body)
    assert (ours, other_ours) == (plain, other_plain) and plain != other_plain


# -- `reconfigure` changes the members of a group, as in torch's own `test_c10d_fault_tolerance.py`


def sum_of_ranks() -> float:
    tensor = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert len(set(tensor.tolist())) == 1
    return float(tensor[0])


@contextmanager
def group_and_handles(outer: Communicator, path: Path, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """The default process group, and the handles of all its ranks."""
    if process_group.AVAILABLE:
        options["enable_reconfigure"] = True
    with default_group(outer, path, timeout=timedelta(seconds=30), **options):
        group: Any = dist.group.WORLD
        yield group, outer.all_gather_object(group.get_reconfigure_handle())
        if outer.over is None:
            outer.barrier()


three = shared_groups(3, "shm", "gloo", "ucx", *second_tier("mpi"))


@on_ranks_of("three")
def test_reconfigure_to_the_same_members_then_fewer_then_all_in_another_order(
    outer: Communicator, tmp_path: Path
) -> None:
    with group_and_handles(outer, tmp_path) as (group, handles):
        assert group.supports_reconfigure and handles[outer.rank] == group.get_reconfigure_handle()
        options = SimpleNamespace(uuid=100, handles=handles, timeout=timedelta(seconds=30), hints=None)
        assert group.reconfigure(options).wait()
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (outer.rank, 3, 6)
        group.reconfigure(200 + outer.rank, [group.get_reconfigure_handle()])
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (0, 1, 1)
        group.reconfigure(300, list(reversed(handles)))
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (2 - outer.rank, 3, 6)
        right, left = (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
        got = torch.empty(2)
        for work in [dist.isend(torch.full((2,), float(dist.get_rank())), right), dist.irecv(got, left)]:
            work.wait()
        assert got.tolist() == [left, left]
        dist.barrier()
        group.reconfigure(SimpleNamespace(**{**vars(options), "uuid": 400, "handles": set(handles)}))
        assert (dist.get_rank(), sum_of_ranks()) == (sorted(handles).index(handles[outer.rank]), 6)


def doubled() -> list[float]:
    whole = distribute_tensor(torch.arange(3.0), dist.init_device_mesh("cpu", (2,)), [Replicate()])
    return (whole * 2).redistribute(placements=[Shard(0)]).full_tensor().tolist()  # type: ignore[no-any-return]


@on_ranks_of("pair")
def test_a_process_whose_rank_is_another_one_in_a_group_as_large_as_before_has_its_part(
    outer: Communicator, tmp_path: Path
) -> None:
    """torch takes a mesh of the same ranks for the former one, in which this process had another rank."""
    with group_and_handles(outer, tmp_path) as (group, handles):
        assert doubled() == [0, 2, 4]
        group.reconfigure(1, list(reversed(handles)))
        assert dist.get_rank() == 1 - outer.rank
        assert doubled() == [0, 2, 4]
    with default_group(outer, tmp_path, init_method=f"file://{tmp_path}/second"):
        assert doubled() == [0, 2, 4]


@on_ranks_of("three")
def test_reconfigure_works_after_an_abort_and_refuses_bad_arguments(outer: Communicator, tmp_path: Path) -> None:
    with group_and_handles(outer, tmp_path) as (group, handles):
        group.reconfigure(1, handles)
        outer.barrier()  # gloo does not detect within its timeout that a rank leaves while another connects
        group.abort()
        assert group.get_error().name == "SUCCESS"
        with pytest.raises(Revoked):
            sum_of_ranks()
        for wrong in ([handles[(outer.rank + 1) % 3]], handles + handles, ["{}"], ["x" * 10_000], []):
            with pytest.raises(ValueError, match=r"handle"):
                group.reconfigure(2, wrong)
        group.reconfigure(3, handles)
        with pytest.raises(RuntimeError, match="already used"):
            group.reconfigure(3, handles)
        assert sum_of_ranks() == 6


@pytest.mark.skipif(not HoldfastProcessGroup.supports_shrinking, reason="torch shrinks groups of others from 2.14 on")
@pytest.mark.parametrize("flags", [0, 1], ids=["at rest", "with an abort"])
@on_ranks_of("three")
def test_shrink_group_goes_on_without_the_excluded(outer: Communicator, tmp_path: Path, flags: int) -> None:
    """torch's own function: the new default group has the others, in their order; the excluded one is not asked."""
    with group_and_handles(outer, tmp_path):
        assert sum_of_ranks() == 6
        if outer.rank == 1:
            return
        pending = dist.all_reduce(torch.ones(2), async_op=True) if flags else None
        with pytest.raises(TypeError, match="pg_options"):
            dist.shrink_group([1], shrink_flags=flags, pg_options=SimpleNamespace())
        dist.shrink_group([1], shrink_flags=flags)
        if pending is not None:
            with pytest.raises((Revoked, PeerFailed)):
                pending.wait()
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (outer.rank // 2, 2, 3)


@on_ranks(3, "shm", "gloo", *second_tier("ucx", "mpi"), killed=(1,), environ=ENVIRON)
def test_a_kill_raises_in_the_others_even_inside_backward_and_they_reconfigure_and_continue(
    outer: Communicator, tmp_path: Path
) -> None:
    with group_and_handles(outer, tmp_path, pg_options=Options(outer.backend)) as (group, handles):
        model, other = DistributedDataParallel(torch_groups.tiny_model()), torch.ones(1)
        with pytest.raises(RuntimeError, match=r"rank 1|lost a connection"):
            for step in range(100):
                if outer.rank == 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.randn(4, 8)).sum().backward()
                dist.all_reduce(other)
        assert group.get_error().name == "COMM_ERROR"
        group.reconfigure(7, [handles[0], handles[2]])
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (outer.rank // 2, 2, 3)
        if outer.backend == "shm":
            model = DistributedDataParallel(nn.Linear(4, 1))
            model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
            weight = model.module.weight.grad
            assert weight is not None
            assert weight.view(-1).tolist() == [1.0] * 4  # the mean over two, not three
        outer.abort("its rank 1 is dead")
