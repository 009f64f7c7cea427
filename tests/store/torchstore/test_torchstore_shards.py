"""Shards of DTensors that several ranks put under one key, and their readers: whole, sliced, over another mesh."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast.store.torchstore as ts
from holdfast.comms.errors import Unsupported
from holdfast.store.errors import NoSuchKey, NoSuchSlice
from holdfast.store.torchstore.transport import Request
from support.weights.layouts import Shape, Sizes, as_rank, coordinates, meshes, placements, shapes, torchs_local

run = asyncio.run
pytestmark = pytest.mark.usefixtures("store")


def sharded(tensor: torch.Tensor, placed: tuple[Any, ...], sizes: Sizes, rank: int) -> DTensor:
    """The DTensor that a rank has of `tensor`, with its own shard in memory of its own."""
    local = torchs_local(tensor, placed, sizes, coordinates(sizes)[rank]).clone()
    mesh = init_device_mesh("cpu", sizes)
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=tensor.shape, stride=tensor.stride())


def put_by_all(key: str, tensor: torch.Tensor, placed: tuple[Any, ...], sizes: Sizes) -> None:
    size = math.prod(sizes)
    for rank in range(size):
        with as_rank(rank, size):
            run(ts.put(key, sharded(tensor, placed, sizes, rank)))


def got_by_all(key: str, like: torch.Tensor, placed: tuple[Any, ...], sizes: Sizes) -> list[torch.Tensor]:
    """The local tensors of a mesh's ranks, after each has got its shard in place."""
    found, size = [], math.prod(sizes)
    for rank in range(size):
        with as_rank(rank, size):
            target = sharded(torch.full_like(like, -1), placed, sizes, rank)
            assert run(ts.get(key, target)) is target
            found.append(target.to_local())
    return found


def even(sizes: Sizes) -> st.SearchStrategy[Shape]:
    """Shapes that a mesh divides evenly, so that strided placements say one thing only."""
    most = math.prod(sizes)
    return st.lists(st.sampled_from([most, 2 * most]), min_size=1, max_size=2).map(tuple)


@given(meshes, meshes, shapes, st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mesh_reads_what_any_mesh_put(there: Sizes, here: Sizes, shape: Shape, data: st.DataObject) -> None:
    plain = [Replicate(), *map(Shard, range(len(shape)))]
    put_as = tuple(data.draw(st.sampled_from(plain)) for _ in there)
    get_as = tuple(data.draw(st.sampled_from(plain)) for _ in here)
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    run(ts.delete_batch(["k"]))
    put_by_all("k", tensor, put_as, there)
    assert torch.equal(run(ts.get("k")), tensor)
    for found, place in zip(got_by_all("k", tensor, get_as, here), coordinates(here), strict=True):
        assert torch.equal(found, torchs_local(tensor, get_as, here, place))


@given(meshes, st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_strided_shards_are_put_and_read(sizes: Sizes, data: st.DataObject) -> None:
    shape = data.draw(even(sizes))
    placed = data.draw(placements(sizes, len(shape)))
    tensor = torch.arange(math.prod(shape), dtype=torch.int64).view(shape)
    run(ts.delete_batch(["k"]))
    try:
        put_by_all("k", tensor, placed, sizes)
    except Unsupported:
        return
    assert torch.equal(run(ts.get("k")), tensor)
    for found, place in zip(got_by_all("k", tensor, placed, sizes), coordinates(sizes), strict=True):
        assert torch.equal(found, torchs_local(tensor, placed, sizes, place))


def test_a_key_is_there_once_all_ranks_have_put_their_shard() -> None:
    tensor = torch.arange(32.0).view(8, 4)
    for rank in range(4):
        assert not run(ts.exists("k"))
        if rank:
            with pytest.raises(NoSuchKey, match="partially committed"):
                run(ts.get("k"))
            with pytest.raises(KeyError, match="partially committed"):
                run(ts.delete("k"))
        with as_rank(rank, 4):
            run(ts.put("k", sharded(tensor, (Shard(0),), (4,), rank)))
    assert run(ts.exists("k"))
    run(ts.delete("k"))


def test_a_batch_delete_takes_incomplete_keys_too() -> None:
    with as_rank(0, 2):
        run(ts.put("k", sharded(torch.ones(4), (Shard(0),), (2,), 0)))
    assert run(ts.keys()) == ["k"]
    run(ts.delete_batch(["k"]))
    assert run(ts.keys()) == []


def test_a_slice_is_collected_from_the_shards_that_have_it() -> None:
    tensor = torch.arange(48.0).view(8, 6)
    put_by_all("k", tensor, (Shard(0), Shard(1)), (2, 3))
    wanted = ts.TensorSlice(offsets=(2, 1), coordinates=(), global_shape=(8, 6), local_shape=(4, 4), mesh_shape=())
    assert torch.equal(run(ts.get("k", tensor_slice_spec=wanted)), tensor[2:6, 1:5])
    other = ts.TensorSlice(offsets=(0, 0), coordinates=(), global_shape=(8, 7), local_shape=(1, 1), mesh_shape=())
    with pytest.raises(NoSuchSlice):
        run(ts.get("k", tensor_slice_spec=other))


def test_a_tensor_that_every_rank_has_whole_is_put_as_a_plain_one() -> None:
    tensor = torch.arange(6.0)
    with as_rank(1, 4):
        run(ts.put("k", sharded(tensor, (Replicate(),), (4,), 1)))
    assert torch.equal(run(ts.get("k")), tensor)


def test_shards_can_be_put_anew_and_readers_get_what_is_newest_of_each() -> None:
    put_by_all("k", torch.zeros(4), (Shard(0),), (2,))
    with as_rank(1, 2):
        run(ts.put("k", sharded(torch.ones(4), (Shard(0),), (2,), 1)))
    assert run(ts.get("k")).tolist() == [0, 0, 1, 1]


def test_a_sum_that_is_not_reduced_yet_is_refused() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(4), mesh, (Partial(),), run_check=False)
        with pytest.raises(Unsupported, match="summands"):
            run(ts.put("k", partial))


def test_a_request_names_the_slice_of_a_dtensor() -> None:
    with as_rank(2, 4):
        mine = sharded(torch.zeros(8, 6), (Shard(1), Shard(0)), (2, 2), 2)
        found = Request.from_any("k", mine).tensor_slice
        assert found == ts.TensorSlice((0, 3), (1, 0), (8, 6), (4, 3), (2, 2))
        with pytest.raises(ValueError, match="DTensor says itself"):
            run(ts.get("k", mine, found))


def test_a_strided_shard_is_no_single_slice() -> None:
    with as_rank(0, 4):
        placed = (_StridedShard(0, split_factor=2), Replicate())
        request = Request.from_any("k", sharded(torch.zeros(8), placed, (2, 2), 0))
        assert request.placed is not None and len(request.placed.blocks) == 2
        with pytest.raises(Unsupported, match="no single slice"):
            _ = request.tensor_slice


def test_a_state_dict_of_shards_is_read_whole_and_by_another_mesh() -> None:
    weight, bias = torch.randn(12, 5), torch.randn(12)
    for rank in range(3):
        with as_rank(rank, 3):
            state = {name: sharded(tensor, (Shard(0),), (3,), rank) for name, tensor in (("w", weight), ("b", bias))}
            run(ts.put_state_dict({"model": state, "step": 7}, "v0"))
    found = run(ts.get_state_dict("v0"))
    assert torch.equal(found["model"]["w"], weight) and found["step"] == 7
    with as_rank(1, 2):
        mine = {"model": {"w": sharded(torch.zeros(12, 5), (Shard(1),), (2,), 1), "b": torch.zeros(12)}, "step": 0}
        run(ts.get_state_dict("v0", mine))
        assert torch.equal(mine["model"]["w"].to_local(), weight[:, 3:])
        assert torch.equal(mine["model"]["b"], bias)
