"""torchstore's interface in one process: what is put comes back, whole, in slices, in place and over another mesh."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast.store.torchstore as ts
from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, Unsupported
from holdfast.store.errors import NoSuchKey, NoSuchSlice, NotInitialized, ObjectRefused
from holdfast.store.torchstore.transport import Request
from support.waiting import eventually
from support.weights.layouts import Shape, Sizes, as_rank, coordinates, meshes, placements, shapes, torchs_local
from support.weights.state_dicts import of_many_dtypes, same

run = asyncio.run


def put(key: str, value: Any) -> None:
    run(ts.put(key, value))


def get(key: str, *args: Any, **kwargs: Any) -> Any:
    return run(ts.get(key, *args, **kwargs))


def a_slice(offsets: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> ts.TensorSlice:
    return ts.TensorSlice(offsets=offsets, coordinates=(), global_shape=whole, local_shape=shape, mesh_shape=())


pytestmark = pytest.mark.usefixtures("torchstore")


def test_a_tensor_comes_back_as_it_was_put() -> None:
    for key, tensor in of_many_dtypes().items():
        put(key, tensor)
        assert same(get(key), tensor), key


def test_a_put_overwrites_what_was_there_and_strides_conjugation_and_gradients_do_not_matter() -> None:
    for tensor in (
        torch.arange(4000.0).view(40, 100).t(),
        torch.arange(4000.0).view(40, 100)[:, 3:50],
        torch.randn(900, dtype=torch.complex64).conj(),
        torch.ones(1).expand(1000),
        nn.Parameter(torch.randn(2000)),
    ):
        put("k", tensor)
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor[0].zero_()
        found = get("k")
        assert torch.equal(found, before) and not found.requires_grad and found.is_contiguous()


def test_a_target_is_filled_and_returned() -> None:
    tensor = torch.randn(60, 50)
    put("k", tensor)
    plain, columns, other = torch.zeros(60, 50), torch.zeros(50, 60).t(), torch.zeros(60, 50, dtype=torch.float64)
    for target in (plain, columns, other, nn.Parameter(torch.zeros(60, 50))):
        assert get("k", target) is target
        assert torch.equal(target.float(), tensor)


def test_a_slice_of_a_tensor_or_of_shards_comes_alone_and_in_place() -> None:
    tensor = torch.arange(100 * 200.0).view(100, 200)
    put("whole", tensor)
    put_by_all("shards", tensor, (Shard(0), Shard(1)), (2, 3))
    wanted = a_slice((10, 20), (60, 140), (100, 200))
    for key in ("whole", "shards"):
        assert torch.equal(get(key, tensor_slice_spec=wanted), tensor[10:70, 20:160])
        buffer = torch.empty(60, 140)
        assert get(key, inplace_tensor=buffer, tensor_slice_spec=wanted) is buffer
        assert torch.equal(buffer, tensor[10:70, 20:160])
        for refused, error in (
            (a_slice((90, 0), (20, 1), (100, 200)), Mismatch),
            (a_slice((0,), (1,), (100, 200)), Mismatch),
            (a_slice((0, 0), (1, 1), (100, 201)), NoSuchSlice),
            (a_slice((0,), (1,), (100,)), NoSuchSlice),
        ):
            with pytest.raises(error):
                get(key, tensor_slice_spec=refused)
        with pytest.raises(ValueError, match="does not fit"):
            get(key, torch.zeros(3), a_slice((0, 0), (2, 1), (100, 200)))


def test_an_object_comes_back_equal_unless_it_would_have_to_be_pickled() -> None:
    nested = {"a": [1, 2.5, None, True, "text", b"bytes"], 3: {"nested": (1, (2,))}}
    for value in (nested, (1, 2), {1, 2, 3}, None, "", 1 << 70, "long " * 10_000):
        put("k", value)
        found = get("k")
        assert found == value and type(found) is type(value)
    put("k", {"small": torch.ones(3), "large": torch.arange(5000), "n": 1})
    found = get("k")
    assert found["small"].tolist() == [1, 1, 1] and found["large"].sum() == 4999 * 2500 and found["n"] == 1
    with pytest.raises(Mismatch, match="holds an object"):
        get("k", torch.zeros(1))

    class Own:
        pass

    for value in (Own(), {"deep": [Own()]}, print):
        with pytest.raises(ObjectRefused, match="never pickled"):
            put("own", value)
    assert not run(ts.exists("own"))


def test_a_batch_is_put_and_got_whole_and_one_with_faults_names_them_all_and_does_nothing() -> None:
    batch = {f"t{i}": torch.randn(100 * i) for i in range(30)} | {"object": {"rank": 0}}
    run(ts.put_batch(batch))
    found = run(ts.get_batch(list(batch)))
    assert list(found) == list(batch) and found["object"] == {"rank": 0}
    assert all(torch.equal(found[f"t{i}"], batch[f"t{i}"]) for i in range(30))
    target = torch.zeros(100)
    filled = run(ts.get_batch({"t1": target, "t2": None}))
    assert filled["t1"] is target and torch.equal(target, batch["t1"]) and torch.equal(filled["t2"], batch["t2"])
    with pytest.raises(Mismatch, match=r"2 keys are wrong.*'meta'.*'code'"):
        run(ts.put_batch({"fine": torch.ones(1), "meta": torch.ones(1, device="meta"), "code": print}))
    assert not run(ts.exists("fine"))
    run(ts.put_batch({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}))
    targets = [torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    with pytest.raises(Mismatch, match=r"2 keys are wrong.*'b'.*'c'"):
        run(ts.get_batch(dict(zip("abc", targets, strict=True))))
    assert all(not target.any() for target in targets)
    with pytest.raises(NoSuchKey, match=r"'x'.*'y'"):
        run(ts.get_batch(["a", "x", "y"]))


def test_arguments_of_another_kind_are_refused() -> None:
    put("k", torch.zeros(1))
    calls: list[tuple[Any, type[Exception]]] = [
        (lambda: ts.put_batch({}), ValueError),
        (lambda: ts.get_batch([]), ValueError),
        (lambda: ts.get_batch(["a", "a"]), ValueError),
        (lambda: ts.get_batch("ab"), TypeError),
        (lambda: ts.delete_batch("ab"), TypeError),
        (lambda: ts.get("k", "no tensor"), TypeError),
        (lambda: ts.initialize(2, strategy="LocalRankStrategy", store_name="other"), TypeError),  # type: ignore[arg-type]
    ]
    for call, error in calls:
        with pytest.raises(error):
            run(call())
    with pytest.raises(RuntimeError, match="strategy"):
        run(ts.initialize(2, store_name="other"))
    with pytest.raises(RuntimeError, match="already initialized"):
        run(ts.initialize())


def test_keys_exists_and_delete() -> None:
    run(ts.put_batch({key: torch.zeros(1) for key in ("v0.x", "v0.x.z", "v0.y", "v1.x")}))
    assert sorted(run(ts.keys())) == ["v0.x", "v0.x.z", "v0.y", "v1.x"]
    assert sorted(run(ts.keys("v0.x"))) == ["v0.x", "v0.x.z"]
    run(ts.delete("v0.x"))
    assert not run(ts.exists("v0.x")) and run(ts.exists("v0.y"))
    with pytest.raises(KeyError, match=r"v0\.x"):
        get("v0.x")
    with pytest.raises(KeyError):
        run(ts.delete("v0.x"))
    run(ts.delete_batch(["v0.y", "v0.y", "missing"]))
    run(ts.delete_batch([]))
    assert sorted(run(ts.keys())) == ["v0.x.z", "v1.x"]


def test_a_cancelled_get_has_stopped_writing_when_it_returns() -> None:
    target = torch.zeros(4 << 20)
    put("k", torch.ones(4 << 20))

    async def cancelled() -> None:
        task = asyncio.ensure_future(ts.get("k", target))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = target.clone()
        await asyncio.sleep(0.05)
        assert torch.equal(before, target)

    run(cancelled())
    assert get("k").sum() == 4 << 20


# -- state dicts


def test_a_state_dict_comes_back_with_its_structure_and_in_place() -> None:
    model, other = (nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 30)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    run(ts.put_state_dict(state, "v0"))
    found = run(ts.get_state_dict("v0"))
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert found["optimizer"]["state"].keys() == {"0", "1", "2", "3"}, "text, as torch's flatten_state_dict makes it"
    assert torch.equal(found["model"]["2.weight"], state["model"]["2.weight"])
    assert torch.equal(get("v0/model.2.weight"), state["model"]["2.weight"]), "under torchstore's names"
    mine = {"model": other.state_dict(), "optimizer": state["optimizer"]}
    found = run(ts.get_state_dict("v0", mine))
    assert found["model"]["0.weight"] is mine["model"]["0.weight"]
    assert torch.equal(other[0].weight, state["model"]["0.weight"])


def test_strict_refuses_other_names_before_anything_is_read() -> None:
    run(ts.put_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, "v0"))
    mine = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(Mismatch, match="it lacks c; it adds b"):
        run(ts.get_state_dict("v0", mine))
    assert not mine["a"].any()
    found = run(ts.get_state_dict("v0", mine, strict=False))
    assert found["a"] is mine["a"] and mine["a"].all() and found.keys() == {"a", "b"}
    with pytest.raises(RuntimeError, match="no state dict was put under 'v9'"):
        run(ts.get_state_dict("v9"))


def test_state_dicts_travel_in_another_dtype_and_directly_with_the_values_of_the_last_put() -> None:
    run(ts.put_state_dict({"w": torch.randn(2000), "n": torch.tensor(3)}, "v1", transfer_dtype=torch.bfloat16))
    found = run(ts.get_state_dict("v1"))
    assert found["w"].dtype == torch.bfloat16 and found["n"].dtype == torch.int64
    weights, mine = torch.ones(2000), {"w": torch.zeros(2000)}
    with pytest.raises(HoldfastError, match="the first call needs one"):
        run(ts.put_state_dict(None, "v0", direct_rdma=True))
    run(ts.put_state_dict({"w": weights}, "v0", direct_rdma=True))
    weights.fill_(2.0)
    run(ts.put_state_dict(None, "v0", direct_rdma=True))
    assert run(ts.get_state_dict("v0", mine, direct_rdma=True)) == mine
    assert mine["w"].sum() == 4000
    for value in (3.0, 4.0):
        run(ts.put_state_dict({"w": torch.full((2000,), value)}, "v0", direct_rdma=True))
        run(ts.get_state_dict("v0", mine, direct_rdma=True))
        assert mine["w"].sum() == 2000 * value


# -- the life of a store


def test_stores_of_other_names_are_apart() -> None:
    run(ts.initialize(store_name="other"))
    try:
        run(ts.put("k", torch.ones(1), store_name="other"))
        assert run(ts.exists("k", store_name="other")) and not run(ts.exists("k"))
    finally:
        run(ts.shutdown("other"))
    with pytest.raises(NotInitialized, match="'other'"):
        run(ts.keys(store_name="other"))


def test_many_small_values_share_pieces_of_memory_and_concurrent_puts_leave_one_claim_on_it() -> None:
    async def many() -> None:
        for number in range(150):
            await ts.put(f"k{number}", torch.full((1024,), float(number)))

    run(many())
    slabs = run(ts.client())._record.cell.read()[1].slabs
    assert len(slabs) <= 4 and sum(each.count for each in slabs) >= 150
    assert all(get(f"k{number}")[-1] == number for number in (0, 70, 149))

    async def puts() -> None:
        await asyncio.gather(*(ts.put(f"k{number}", torch.full((2000,), float(number))) for number in range(8)))

    run(puts())
    client = run(ts.client())
    assert len(client._record.cell.read()[1].claims) == 1
    assert [get(f"k{number}")[0] for number in range(8)] == list(range(8))
    ts.reset_client()
    assert run(ts.client())._record.cell.read()[1].claims == ()


def test_a_put_is_one_change_of_the_register_into_memory_that_was_touched_before() -> None:
    """The first put waits for memory; each later one claims the memory of the next."""
    client = run(ts.client())
    put("k", torch.zeros(100_000))
    for number in range(1, 4):
        eventually(lambda: all(claim.grants for claim in client._record.cell.read()[1].claims))
        before, now = client._record.cell.read()
        put("k", torch.full((100_000,), float(number)))
        after, then = client._record.cell.read()
        assert after == before + 1 and then.slabs == now.slabs
        assert get("k")[-1] == number


def test_no_memory_is_touched_ahead_if_the_machine_has_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.torchstore.home.available_memory", lambda: 1 << 20)
    client = run(ts.client())
    put("k", torch.zeros(1 << 20))
    eventually(lambda: all(claim.grants for claim in client._record.cell.read()[1].claims))
    assert len(client._record.cell.read()[1].slabs) == 1
    put("k", torch.ones(1 << 20))
    assert get("k").sum() == 1 << 20


def test_a_put_that_there_is_no_memory_for_fails_and_the_store_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.backends.common.host_plane.HostPlane.empty", Mock(side_effect=MemoryError))
        with pytest.raises(HoldfastError, match="no memory for"):
            put("k", torch.ones(5000))
    assert not run(ts.exists("k"))
    put("k", torch.ones(5000))
    assert get("k").sum() == 5000


# -- the bytes


def test_bytes_that_are_damaged_in_the_store_are_not_taken_for_those_that_were_put() -> None:
    put("large", torch.zeros(3000, 1000))
    client = run(ts.client())
    (part,) = client._record.read(lambda now: now.find(["large"]))["large"]
    client._map(part.grant)[4 * (2600 * 1000 + 910)] ^= 1
    for wanted in (None, a_slice((2500, 900), (400, 50), (3000, 1000))):
        with pytest.raises(CorruptData, match="damaged"):
            get("large", tensor_slice_spec=wanted)
    elsewhere = a_slice((0, 0), (2, 2), (3000, 1000))
    assert get("large", tensor_slice_spec=elsewhere).shape == (2, 2)


def sharded(tensor: torch.Tensor, placed: tuple[Any, ...], sizes: Sizes, rank: int) -> DTensor:
    """The DTensor that a rank has of `tensor`, with its own shard in memory of its own."""
    local = torchs_local(tensor, placed, sizes, coordinates(sizes)[rank]).clone()
    mesh = init_device_mesh("cpu", sizes)
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=tensor.shape, stride=tensor.stride())


def put_by_all(key: str, tensor: torch.Tensor, placed: tuple[Any, ...], sizes: Sizes) -> None:
    size = math.prod(sizes)
    for rank in range(size):
        with as_rank(rank, size):
            put(key, sharded(tensor, placed, sizes, rank))


@given(meshes, meshes, shapes, st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mesh_reads_what_any_mesh_put(there: Sizes, here: Sizes, shape: Shape, data: st.DataObject) -> None:
    """Strided placements of uneven shapes, which say several things, are refused."""
    put_as, get_as = (data.draw(placements(sizes, len(shape))) for sizes in (there, here))
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    run(ts.delete_batch(["k"]))
    try:
        put_by_all("k", tensor, put_as, there)
        for rank, place in enumerate(coordinates(here)):
            with as_rank(rank, math.prod(here)):
                target = sharded(torch.full_like(tensor, -1), get_as, here, rank)
                assert get("k", target) is target
                assert torch.equal(target.to_local(), torchs_local(tensor, get_as, here, place))
    except Unsupported:
        assume(False)
    assert torch.equal(get("k"), tensor)


def test_a_key_is_there_once_all_ranks_have_put_their_shard() -> None:
    tensor = torch.arange(32.0).view(8, 4)
    for rank in range(4):
        assert not run(ts.exists("k"))
        if rank:
            with pytest.raises(NoSuchKey, match="partially committed"):
                get("k")
            with pytest.raises(KeyError, match="partially committed"):
                run(ts.delete("k"))
        with as_rank(rank, 4):
            put("k", sharded(tensor, (Shard(0),), (4,), rank))
    assert run(ts.exists("k"))
    run(ts.delete("k"))
    with as_rank(0, 4):
        put("k", sharded(tensor, (Shard(0),), (4,), 0))
    assert run(ts.keys()) == ["k"]
    run(ts.delete_batch(["k"]))
    assert run(ts.keys()) == [], "a batch takes incomplete keys too"


def test_shards_can_be_put_anew_and_a_tensor_that_every_rank_has_by_one() -> None:
    put_by_all("k", torch.zeros(4), (Shard(0),), (2,))
    with as_rank(1, 2):
        put("k", sharded(torch.ones(4), (Shard(0),), (2,), 1))
        put("whole", sharded(torch.arange(6.0), (Replicate(),), (2,), 1))
    assert get("k").tolist() == [0, 0, 1, 1], "readers get what is newest of each"
    assert get("whole").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_request_names_the_slice_of_a_dtensor_unless_it_is_strided_or_a_sum_that_is_not_reduced() -> None:
    with as_rank(2, 4):
        mine = sharded(torch.zeros(8, 6), (Shard(1), Shard(0)), (2, 2), 2)
        found = Request.from_any("k", mine).tensor_slice
        assert found == ts.TensorSlice((0, 3), (1, 0), (8, 6), (4, 3), (2, 2))
        with pytest.raises(ValueError, match="DTensor says itself"):
            get("k", mine, found)
        strided = sharded(torch.zeros(8), (_StridedShard(0, split_factor=2), Replicate()), (2, 2), 2)
        with pytest.raises(Unsupported, match="no single slice"):
            _ = Request.from_any("k", strided).tensor_slice
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(4), mesh, (Partial(),), run_check=False)
        with pytest.raises(Unsupported, match="summands"):
            put("k", partial)


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
