"""Sharded state while ranks die: copies on neighbours, parts restored on other ranks and meshes, checkpoints."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast import comms
from holdfast.comms import Communicator, CorruptData, HoldfastError, Mismatch, PeerFailed, Revoked
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.ft import Session, Timeouts, faultpoints
from holdfast.ft.processes.zygote_client import zygote
from holdfast.ft.state.boxes import shape_of
from holdfast.ft.state.checkpoints import Checkpoints
from holdfast.ft.state.fetching import BLOCK, Block, Fetcher, Source, blocks_of, digest
from holdfast.ft.state.gradients import ShardSums
from holdfast.ft.state.leaves import Leaf, PartLayout, RankMesh, _cuts, _placements, all_ranks, box_of
from holdfast.ft.state.restoring import PartStore, assemble, choose, complete_size, needed, shifts
from holdfast.harness import LocalCluster
from support.comms.torch_groups import sharded_model
from support.samples import tally
from support.samples.tally import Tally, assert_invariants, start_with_spares
from support.source_tree import ROOT
from support.waiting import PROGRAM_SECONDS, eventually

QUICK = Timeouts(heartbeat=0.2, suspect=2.0, operation=40.0, rebuild=20.0, join=20.0)
SHARDS = 6
STEPS = 8


# -- which rank keeps copies of which


@given(hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=12), copies=st.integers(0, 4))
def test_every_rank_keeps_as_many_copies_as_it_has(hosts: list[str], copies: int) -> None:
    found = shifts(hosts, copies)
    assert len(found) == len(set(found)) == min(copies, len(hosts) - 1)
    assert all(0 < shift < len(hosts) for shift in found)


def test_copies_go_to_another_host_if_they_can() -> None:
    assert shifts(["a", "a", "b", "b"], 1) == [2]
    assert shifts(["a", "b", "a", "b"], 2) == [1, 3]
    assert shifts(["a", "a", "a"], 1) == [1], "on one host to the next rank"


def test_a_version_is_kept_until_the_next_is_committed() -> None:
    part_store = PartStore(torch.device("cpu"))
    layout = PartLayout((Leaf("w", "float32", (3,)),), all_ranks(1), 0)
    for version in (4, 5):
        part = part_store.new(version, layout, b"")
        layout.view(part.buffer, 0).fill_(version)
        part_store.put([part])
    assert [layout.view(kept.buffer, 0)[0].item() for v in (4, 5) for kept in part_store.of(v)] == [4, 5]
    part_store.keep_only(5)
    assert (len(part_store.of(4)), len(part_store.of(5))) == (0, 1)
    held = part_store.nbytes
    part_store.put([part_store.new(6, layout, b"")])
    assert part_store.nbytes == held, "the memory of version 4 is used again"


# -- parts restored on other ranks

NAMES = ("data", "tensor", "pipe")
meshes = st.lists(st.integers(1, 3), min_size=3, max_size=3).map(lambda sizes: RankMesh(NAMES, tuple(sizes)))


@st.composite
def leaf(draw: st.DrawFn) -> Leaf:
    """A tensor, cut by any of the mesh's dimensions in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    by = draw(st.lists(st.sampled_from(NAMES), unique=True)) if shape else []
    cuts = tuple((draw(st.integers(0, len(shape) - 1)), name) for name in by)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
    return Leaf(f"t{draw(st.integers())}", dtype, shape, NAMES, cuts)


def cut(leaf: Leaf, tensor: torch.Tensor, mesh: RankMesh, part: int) -> torch.Tensor:
    """A rank's part of a tensor, by torch's chunks."""
    place = mesh.place_of(part)
    for dim, name in leaf.cuts:
        chunks = [*tensor.chunk(mesh.size_of(name), dim)] if tensor.shape[dim] else []
        tensor = chunks[place[name]] if place[name] < len(chunks) else tensor.narrow(dim, 0, 0)
    return tensor


@given(st.lists(leaf(), min_size=1, max_size=4), meshes, meshes, st.data())
def test_a_state_is_redistributed_from_the_needed_bytes_only(
    made: list[Leaf], before: RankMesh, after: RankMesh, data: st.DataObject
) -> None:
    """One of the parts that are alike is available.

    Bytes that a new part does not need are poisoned, and must not appear.
    """
    whole = [
        torch.arange(math.prod(leaf.shape)).view(leaf.shape).to(leaf.torch_dtype) + 1 * (leaf.dtype != "bool")
        for leaf in made
    ]
    layouts = [PartLayout(tuple(made), before, part) for part in range(before.size)]
    alike: dict[tuple[int, int], list[int]] = {}
    for part, layout in enumerate(layouts):
        alike.setdefault(layout.share, []).append(part)
    there = {data.draw(st.sampled_from(parts)) for parts in alike.values()}
    assert {count for _, count in alike} == {len(alike)}
    buffers = {part: torch.full((layouts[part].nbytes,), 0xAA, dtype=torch.uint8) for part in there}
    for part, buffer in buffers.items():
        for index, each in enumerate(made):
            layouts[part].view(buffer, index).copy_(cut(each, whole[index], before, part))
    for part in range(after.size):
        new = PartLayout(tuple(made), after, part)
        pieces = choose(new, before, sorted(there)[:1], there)
        given_bytes = {}
        for old, ranges in needed(new, before, pieces).items():
            given_bytes[old] = torch.full_like(buffers[old], 0x55)
            for begin, end in ranges:
                given_bytes[old][begin:end] = buffers[old][begin:end]
        for index, tensor in enumerate(assemble(new, before, pieces, given_bytes)):
            assert torch.equal(tensor, cut(made[index], whole[index], after, part))


def test_an_error_names_a_piece_that_no_rank_has() -> None:
    new = PartLayout((Leaf("model.w", "float32", (4, 2), ("ranks",), ((0, "ranks"),)),), all_ranks(1), 0)
    with pytest.raises(CorruptData, match=r"nobody has \[\(2, 4\), \(0, 2\)\] of model.w"):
        choose(new, all_ranks(2), [], [0])


@pytest.mark.parametrize(
    ("placements", "cuts"),
    [
        ([Shard(0), Shard(0)], ((0, "data"), (0, "tensor"))),
        ([_StridedShard(0, split_factor=2), Shard(0)], ((0, "tensor"), (0, "data"))),
        ([_StridedShard(1, split_factor=2), Shard(1)], ((1, "tensor"), (1, "data"))),
        ([Shard(0), Shard(1)], ((0, "data"), (1, "tensor"))),
        ([Replicate(), Shard(1)], ((1, "tensor"),)),
        ([Replicate(), Replicate()], ()),
    ],
)
def test_parts_of_tensors_match_the_placements_of_torch(placements: list[Any], cuts: Any) -> None:
    """Each rank of a mesh of 3 x 2 has the part and the placements of DTensor."""
    mesh, shape = RankMesh(("data", "tensor"), (3, 2)), (12, 6)
    assert sorted(_cuts("w", placements, mesh.names, mesh, 2)) == sorted(cuts)
    assert _placements(mesh.names, _cuts("w", placements, mesh.names, mesh, 2), mesh) == tuple(placements)
    for rank in range(mesh.size):
        there, first = _compute_local_shape_and_global_offset(shape, mesh.sizes, [*divmod(rank, 2)], placements)
        box = box_of(shape, cuts, mesh, rank)
        assert (shape_of(box), tuple(low for low, _ in box)) == (there, first)


def test_a_state_is_whole_if_some_rank_has_each_part() -> None:
    assert complete_size([[(3, 0, 3), (3, 2, 3)], [], [(3, 1, 3)]], 2) == 3
    assert complete_size([[(3, 0, 3)], [(3, 1, 3)]], 3) is None
    assert complete_size([], 3) is None
    assert complete_size([[(3, 0, 3), (2, 0, 2)], [(3, 1, 3), (2, 1, 2)], [(3, 2, 3)]], 2) == 2, "as many as ranks"
    assert complete_size([[(4, 0, 2)], [(4, 1, 2)]], 2) == 4, "a replica is as good"


# -- bytes from several sources


@pytest.fixture
def plane() -> Iterator[MemoryPlane]:
    with comms.memory("inproc") as opened:
        yield opened


def some_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 255, (count,), dtype=torch.uint8)


def wanted(content: torch.Tensor, planes: list[Any]) -> tuple[list[Block], torch.Tensor]:
    into = torch.zeros_like(content)
    pairs = zip(blocks_of(content), blocks_of(into), strict=True)
    blocks = [
        Block(digest(right), room, tuple(Source(rank, region.handle, n * BLOCK) for rank, region in enumerate(planes)))
        for n, (right, room) in enumerate(pairs)
    ]
    return blocks, into


def test_blocks_come_from_all_ranks_that_have_them(plane: MemoryPlane) -> None:
    content = some_bytes(5 * BLOCK + 17)
    regions = [plane.expose(content.clone()) for _ in range(3)]
    blocks, into = wanted(content, regions)
    done = Fetcher().fetch(plane, blocks, timeout=10.0)
    assert torch.equal(into, content)
    assert set(done.moved) == {0, 1, 2} and done.nbytes == content.numel()


def test_a_source_that_is_lost_or_damaged_is_replaced_by_another(plane: MemoryPlane) -> None:
    content = some_bytes(4 * BLOCK)
    gone, damaged, right = (plane.expose(content.clone()) for _ in range(3))
    blocks, into = wanted(content, [gone, plane.expose(content ^ 1), right])
    gone.close()
    done = Fetcher().fetch(plane, blocks, timeout=10.0)
    assert torch.equal(into, content)
    assert done.moved == {2: content.numel()}
    assert "another checksum" in done.lost[1] and set(done.lost) == {0, 1}
    damaged.close()


def test_blocks_that_have_arrived_are_not_moved_again(plane: MemoryPlane) -> None:
    """The epoch ends after three of six blocks; the next epoch moves the other three."""
    content = some_bytes(6 * BLOCK)
    region, fetcher, asked = plane.expose(content.clone()), Fetcher(), [0]

    def over() -> HoldfastError | None:
        asked[0] += 1
        return Revoked(3, "somebody died") if asked[0] > 3 else None

    with pytest.raises(Revoked):
        fetcher.fetch(plane, wanted(content, [region])[0], timeout=10.0, over=over)
    blocks, into = wanted(content, [region])
    done = fetcher.fetch(plane, blocks, timeout=10.0)
    assert torch.equal(into, content)
    assert (done.kept, done.nbytes) == (3 * BLOCK, 3 * BLOCK)


def test_an_error_says_that_no_rank_has_a_block(plane: MemoryPlane) -> None:
    content = torch.ones(10, dtype=torch.uint8)
    region = plane.expose(content)
    region.close()
    with pytest.raises(PeerFailed, match="nobody is left who has a part of the state"):
        Fetcher().fetch(plane, wanted(content, [region])[0], timeout=10.0)


# -- training with fully_shard while ranks are killed


def replicas(size: int) -> dict[str, int]:
    """Two replicas of shards if the size allows that, else one."""
    return {"replicate": 2, "shard": size // 2} if size % 2 == 0 else {"replicate": 1, "shard": size}


def pairs(size: int) -> dict[str, int]:
    """Pairs of ranks that share each layer, if the size allows that."""
    return {"data": size // 2, "tensor": 2} if size % 2 == 0 else {"data": size, "tensor": 1}


def tensor_parallel(mesh: Any) -> dict[str, Any]:
    """Linear layers cut by columns and rows over "tensor"; these and the rest over "data"."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 12), nn.LayerNorm(12))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)}


BUILDS: dict[str, tuple[Any, Any, int]] = {
    "ranks": (sharded_model, None, 7),
    "replicate": (sharded_model, replicas, 7),
    "data": (tensor_parallel, pairs, 8),
}
"""By the mesh's first dimension: what builds the model, the mesh of a number of ranks, and the width of the input."""


def train(
    session: Session,
    kind: str = "ranks",
    kills: Mapping[int, tuple[int, ...]] = {},
    copies: int = 1,
    saved: str = "",
    gate: str = "",
    steps: int = STEPS,
) -> dict[str, Any]:
    """Losses and final weights; `kills[step]` are the ranks of the first epoch that end in that step, all at once."""
    build, mesh, width = BUILDS[kind]
    things = session.attach_sharded(build, copies=copies, mesh=mesh)
    if saved:
        session.checkpoints(saved, every=2)
    first, losses, final = 0, {}, []
    for attempt in session.steps(steps):
        first = first or (attempt.epoch if attempt.step == 0 else -1)
        with attempt:
            while attempt.step == 1 and gate and not Path(gate).exists():
                time.sleep(0.01)
            model, optimizer = things["model"], things["optimizer"]
            sums = ShardSums(attempt, next(model.parameters()).device_mesh["data"] if kind == "data" else None)
            sums.fully_sharded(model)
            optimizer.zero_grad()
            if attempt.step in kills and attempt.epoch == first:
                attempt.comm.barrier()
                time.sleep(0.1)
                if attempt.rank in kills[attempt.step]:
                    os.kill(os.getpid(), signal.SIGKILL)
            total = torch.zeros(1, dtype=torch.float64)
            for turn in sums.turns():
                generator = torch.Generator().manual_seed(100 * attempt.step + turn.shard)
                loss = model(torch.randn(8, width, generator=generator)).square().mean() / SHARDS
                loss.backward()
                if turn.counts:
                    total += loss.detach().double()
            optimizer.step()
            attempt.comm.all_reduce(total)
            final = [parameter.full_tensor().tolist() for parameter in model.parameters()]
        if attempt.committed:
            losses[attempt.step] = round(total.item(), 12)
    return {"losses": losses, "weights": final}


cluster = partial(tally.cluster, timeouts=QUICK, shards=SHARDS)


def run(
    size: int, spares: int = 0, fault: str = "", **train_args: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Start the job, and let it continue past step 1 once all spares are there; its results and its events."""
    with cluster(size, spares=spares, fault=fault) as ranks:
        job = start_with_spares(ranks, train, **train_args)
        results, events = job.results(), job.events()
    assert_invariants(events)
    return results, events


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The result of one rank without failures, which any number of ranks must reach in spite of deaths."""
    return run(1)[0][0]


@pytest.fixture(scope="module")
def pair() -> Any:
    """The weights of two ranks that share each layer; the number of such pairs must not matter."""
    return run(2, kind="data")[0][0]["weights"]


def assert_same(results: list[dict[str, Any]], undisturbed: dict[str, Any]) -> None:
    for result in results:
        assert result["weights"] == undisturbed["weights"], "bit by bit"
        assert result["losses"].items() <= undisturbed["losses"].items()
    assert results[0]["losses"].keys() == undisturbed["losses"].keys()


def sources(events: list[dict[str, Any]]) -> list[str]:
    """Where the ranks of the last epoch in which parts were restored have theirs from."""
    restored = [event for event in events if event["kind"] == "restored"]
    last = max(event["epoch"] for event in restored)
    return sorted(event["source"] for event in restored if event["epoch"] == last)


@pytest.mark.parametrize(
    ("size", "spares", "how", "left", "expected"),
    [
        (3, 1, {"kills": {4: (1,)}}, 3, ["neighbour", "own", "own"]),
        (3, 0, {"kills": {4: (0,)}}, 2, ["neighbour"] * 2),
        (4, 0, {"kind": "replicate", "copies": 0, "kills": {3: (3,)}}, 3, ["neighbour", "neighbour", "own"]),
        (4, 0, {"kind": "replicate", "kills": {3: (1, 3)}}, 2, None),
        (4, 1, {"kind": "data", "kills": {3: (2,)}}, 4, ["neighbour", "own", "own", "own"]),
        (4, 0, {"kind": "data", "kills": {3: (0, 2)}}, 2, None),
    ],
)
def test_parts_of_killed_ranks_are_restored_and_the_weights_are_the_same(
    size: int, spares: int, how: Any, left: int, expected: Any, undisturbed: Any, pair: Any
) -> None:
    """Sources: a copy on a neighbour, or a replica of HSDP. With tensor parallel layers a pair shares each.

    A spare gets the shards of a dead rank. Of two pairs that lose a rank each, one pair is left.
    """
    results, events = run(size, spares, **how)
    weights = pair if how.get("kind") == "data" else undisturbed["weights"]
    assert [result["weights"] for result in results] == [weights] * left, "bit by bit"
    assert sources(events) == expected if expected else "checkpoint" not in sources(events)
    if "kind" not in how:
        assert_same(sorted(results, key=lambda result: -len(result["losses"])), undisturbed)
    if expected == ["neighbour", "own", "own"]:
        assert [e["sources"].keys() for e in events if e["kind"] == "restored" and e["sources"]] == [{"2"}]


def test_a_process_whose_rank_is_another_one_in_a_job_as_large_as_before_has_its_part(undisturbed: Any) -> None:
    """torch takes a mesh of the same ranks for the former one, in which this process had another rank."""
    with cluster(3) as ranks:
        gate = ranks.logs / "gate"
        job = ranks.start(train, gate=str(gate))
        job.wait_for("committed", step=0)
        epoch = job.view().epoch
        job.kill(0)
        job.wait_for("installed", epoch=epoch + 1)  # of two
        job.add()
        job.wait_for("installed", epoch=epoch + 2)  # of three again
        gate.touch()
        results = job.results()
    assert len(results) == 3
    assert_same(results, undisturbed)


@pytest.mark.parametrize(
    ("size", "how", "step"),
    [(3, {"kills": {5: (1, 2)}}, 4), (4, {"kind": "replicate", "copies": 0, "kills": {3: (1, 2, 3)}}, 2)],
)
def test_the_checkpoint_replaces_a_part_that_is_lost_with_its_copies_or_replicas(
    size: int, how: Any, step: int, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """The ranks with a part and its copies die at once. The last checkpoint is after `step` steps."""
    results, events = run(size, **how, saved=str(tmp_path / "saved"))
    assert [result["weights"] for result in results] == [undisturbed["weights"]]
    assert sources(events) == ["checkpoint"]
    assert [e["step"] for e in events if e["kind"] == "restored" and e["source"] == "checkpoint"] == [step - 1]
    committed = [e["step"] for e in events if e["kind"] == "committed"]
    assert committed.count(step) > 1, "it was done again"


def test_without_a_checkpoint_the_loss_of_all_copies_ends_the_job_and_is_explained() -> None:
    with cluster(3) as ranks:
        job = ranks.start(train, kills={3: (1, 2)})
        with pytest.raises(HoldfastError, match="no rank has kept part 1 of 3, and there is no checkpoint"):
            job.results()


def test_a_new_job_continues_from_the_newest_checkpoint(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    saved = str(tmp_path / "saved")
    run(2, saved=saved, steps=5)
    results, events = run(3, saved=saved)
    assert list(results[0]["losses"]) == [4, 5, 6, 7]
    assert results[0]["weights"] == undisturbed["weights"]
    assert sources(events) == ["checkpoint"] * 3


# -- checkpoints


def note_steps(session: Session, total: int, saved: str, sharded: bool, gate: str = "") -> list[int]:
    """The steps that are done in the end.

    With a `gate`: rank 1 ends when it has loaded a checkpoint and rank 0 already continues from it, while rank 2 is
    still inside of an op.
    """

    def kill_or_wait(point: str, step: int, rank: int, epoch: int) -> None:
        if gate and epoch == 3 and (point, rank) == ("step.begin", 0):
            Path(gate).touch()
        if gate and epoch == 3 and point == "restore.after_load" and rank > 0:
            eventually(Path(gate).exists)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            eventually(lambda: session._epoch_guard.is_over(epoch))
            raise Revoked(epoch, "rank 1 died")

    faultpoints.arm(kill_or_wait)
    steps = Tally()
    session.attach("steps", steps)
    session.checkpoints(saved, every=2)
    if sharded:
        session.attach_sharded(sharded_model)
    for attempt in session.steps(total):
        with attempt:
            attempt.comm.barrier()
        if attempt.committed:
            steps.steps.append(attempt.step)
    return steps.steps


@pytest.mark.parametrize("sharded", [False, True])
def test_a_death_during_a_return_to_a_checkpoint_leaves_all_ranks_at_the_same_step(
    tmp_path: Path, sharded: bool
) -> None:
    saved, gate = str(tmp_path / "saved"), str(tmp_path / "gate")
    with cluster(2) as ranks:
        assert ranks.start(note_steps, 5, saved, sharded).results() == [list(range(5))] * 2
    with cluster(3) as ranks:
        job = ranks.start(note_steps, 6, saved, sharded, gate)
        assert job.results() == [list(range(6))] * 2
        events = job.events()
    assert [event["step"] for event in events if event["kind"] == "synced" and event["epoch"] == 4] == [3]
    assert_invariants(events)


@pytest.mark.parametrize("held", [((), ()), ((2, 4), ()), ((), (2,)), ((2,), (2,)), ((2, 4), (2,))])
def test_ranks_that_do_not_share_the_folder_of_checkpoints_are_told_before_the_first_step(
    tmp_path: Path, held: tuple[tuple[int, ...], ...]
) -> None:
    """Whatever is there: the error names each host, path and what it holds; nothing is written or removed."""
    for rank, steps in enumerate(held):
        for step in steps:
            complete_checkpoint(tmp_path / f"disk{rank}", step)

    def find(comm: Communicator) -> str:
        checkpoints = Checkpoints(tmp_path / f"disk{comm.rank}", 2)
        with pytest.raises(Mismatch) as refused:
            checkpoints.agree(comm, 0)
        return str(refused.value)

    with LocalCluster(2, "inproc") as ranks:
        first, second = ranks.run(find)
    assert first == second
    for rank, steps in enumerate(held):
        holds = f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        assert f"rank {rank} ({socket.gethostname()}:{tmp_path}/disk{rank}: {holds})" in first
        assert sorted(path.name for path in (tmp_path / f"disk{rank}").iterdir()) == [f"step-{s:09d}" for s in steps]


def test_a_single_newcomer_without_the_folder_leaves_alone(tmp_path: Path) -> None:
    def find(comm: Communicator) -> str:
        checkpoints = Checkpoints(tmp_path / ("away" if comm.rank == 2 else "shared"), 2)
        try:
            checkpoints.agree(comm, 7)
        except Mismatch:
            return "left"
        return "went on"

    with LocalCluster(3, "inproc") as ranks:
        assert ranks.run(find) == ["went on", "went on", "left"]


def test_whether_to_save_is_agreed_and_not_looked_up(tmp_path: Path) -> None:
    """One rank sees a checkpoint that is complete only later; all enter the same saves all the same."""

    def look(comm: Communicator) -> list[bool]:
        checkpoints = Checkpoints(tmp_path, 2)
        checkpoints.agree(comm, 1)
        comm.barrier()
        if comm.rank == 0:
            complete_checkpoint(tmp_path, 4)
        comm.barrier()
        return [checkpoints.due(done) for done in range(7)]

    complete_checkpoint(tmp_path, 2)
    with LocalCluster(2, "inproc") as ranks:
        first, second = ranks.run(look)
    assert first == second == [done in (4, 6) for done in range(7)]


def test_a_newer_checkpoint_is_never_pruned_by_one_of_fewer_steps(tmp_path: Path) -> None:
    for step in (2, 4, 100, 102, 104):
        complete_checkpoint(tmp_path, step)

    def save(comm: Communicator) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        Checkpoints(tmp_path, 2).save(6, b"", [], [])
        dist.destroy_process_group()

    with LocalCluster(1, "gloo") as ranks:
        ranks.run(save)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{s:09d}" for s in (4, 6, 100, 102, 104)]


def complete_checkpoint(folder: Path, step: int) -> None:
    """What a look at the folder takes for a complete checkpoint."""
    path = folder / f"step-{step:09d}"
    path.mkdir(parents=True)
    (path / ".metadata").touch()


@pytest.mark.parametrize(
    "fault",
    [
        "commit.after_barrier:4:1:3",
        "copies.before_copy:0:0:3",
        "copies.after_copy:4:1:3;restore.before_chunk:-1:1:4",
        "copies.after_copy:4:1:3;restore.before_copies:-1:0:4",
    ],
)
def test_the_job_survives_a_kill_at_each_point_of_copying_and_restoring(
    fault: str, undisturbed: dict[str, Any]
) -> None:
    results, events = run(3, 1, fault=fault, copies=2)
    assert len(results) == 3 - fault.count(";")
    assert sum(event["kind"] == "detected" for event in events) > 0, "somebody was killed"
    newest = max(results, key=lambda result: len(result["losses"]))
    assert_same([newest, *results], undisturbed)


# -- bad input


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with Session(**tally.contract_in(tmp_path, size=1)) as session:
        attach = partial(session.attach_sharded, sharded_model)
        cases: list[tuple[Any, type[Exception], str]] = [
            (lambda: session.attach_sharded(3), TypeError, "build must be a function"),  # type: ignore[arg-type]
            (lambda: attach(copies=-1), ValueError, "copies=-1 is out of range"),
            (lambda: attach(copies="1"), TypeError, "copies must be a whole number"),  # type: ignore[arg-type]
            (lambda: attach(copies=2), ValueError, "copies=2: in a job of 1 ranks each has 0 neighbours"),
            (lambda: attach(mesh=3), TypeError, "mesh must be a function of the number of ranks, not int"),  # type: ignore[arg-type]
            (lambda: attach(mesh=lambda n: [n]), TypeError, r"mesh\(1\) must give a dict of sizes by name"),
            (lambda: attach(mesh=lambda n: {"a": n, "b": 2}), ValueError, ".* which is a mesh of 2 ranks"),
            (lambda: attach(mesh=lambda n: {"a": n, "b": 0}), ValueError, ".* each size must be a whole number"),
            (lambda: session.checkpoints(str(tmp_path), every=0), ValueError, "every=0"),
            (lambda: (attach(copies=0), attach()), HoldfastError, "something sharded is attached already"),
            (lambda: session.steps(1), ValueError, r"copies=0 and no checkpoints\(\)"),
        ]
        for use, error, words in cases:
            with pytest.raises(error, match=f"^{words}") as caught:
                use()
            assert type(caught.value) is error


def test_a_change_outside_of_an_attempt_is_refused() -> None:
    def careless(session: Session) -> None:
        things = session.attach_sharded(sharded_model)
        for attempt in session.steps(3):
            with attempt:
                pass
            with torch.no_grad():
                for parameter in things["model"].parameters():
                    parameter.to_local().add_(1)

    with cluster(1) as ranks, pytest.raises(HoldfastError, match=r"call optimizer\.step\(\) inside"):
        ranks.start(careless).results()


def on_own_mesh(mesh: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    return sharded_model(init_device_mesh("cpu", (2, 1), mesh_dim_names=("mine", "too")))


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (sharded_model, {"copies": 0, "mesh": lambda n: {"a": 1, "b": n}}, "copies=0, .* no two ranks have the same"),
        (on_own_mesh, {}, r"lies on a mesh of \(2, 1\)"),
    ],
)
def test_state_that_cannot_be_kept_on_its_mesh_is_refused_when_it_is_built(
    build: Any, settings: Any, words: str
) -> None:
    def careless(session: Session) -> None:
        session.attach_sharded(build, **settings)
        for attempt in session.steps(1):
            with attempt:
                pass

    with cluster(2, min_size=2) as ranks, pytest.raises((HoldfastError, ValueError), match=words):
        ranks.start(careless).results()


# -- the examples that train a small Llama


def run_example(example: str, size: int, **asked: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The fingerprint of the weights on each rank, and the events of a job that runs the example's `train`."""
    pytest.importorskip("transformers", reason="the examples need transformers: pip install 'holdfast[rl]'")
    zygote().preload("transformers.models.llama.modeling_llama")
    path = ROOT / "examples" / f"{example}.py"

    def train(session: Any) -> str:
        sys.path.insert(0, str(path.parent))  # as a script has its folder
        spec = importlib.util.spec_from_file_location(example, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        fingerprint: str = module.train(session, 5, **asked)
        return fingerprint

    with cluster(size) as ranks:
        job = ranks.start(train)
        return job.results(PROGRAM_SECONDS), job.events()


@pytest.mark.thorough
@pytest.mark.parametrize("example", ["train_ddp", "train_fsdp2"])
def test_a_kill_does_not_change_the_weights(example: str) -> None:
    """Two ranks without failures, and three ranks, one of them killed in step 2, agree in every bit."""
    undisturbed, _ = run_example(example, 2)
    survivors, events = run_example(example, 3, kill_rank=1, kill_step=2)
    assert len(set(undisturbed)) == 1 and undisturbed[0]
    assert survivors == undisturbed
    restored = [event["source"] for event in events if event["kind"] == "restored" and event["epoch"] == 4]
    assert restored == (["neighbour"] * 2 if example == "train_fsdp2" else [])
    copied = sorted(event["seconds"] for event in events if event["kind"] == "copied")
    if copied:
        print(f"\n{example}: keeping a copy took {copied[len(copied) // 2] * 1e3:.1f} ms a step (median)")
