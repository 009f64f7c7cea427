"""Tensors that several parts of a version have: equal ones are replicas, others are refused with their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.comms.errors import Mismatch
from holdfast.store import WeightStore
from holdfast.store.data.manifest import LARGE_BYTES
from holdfast.store.publication import PartComparison
from support.weights.layouts import as_rank

SMALL, LARGE = 3, LARGE_BYTES // 4 + 7
DISAGREE = r"'shared' has other bytes in part 1 than in part 0; publish equal bytes, or each tensor in one part"


def stage(number: int, shared: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of one stage of a pipeline: a layer of its own, and a tensor that all stages have."""
    return {f"layer{number}": torch.full((4,), float(number)), "shared": shared}


@contextmanager
def publishers_that_do_not_compare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Publishers that cannot read the parts of others in time."""
    with monkeypatch.context() as patched:
        patched.setattr(PartComparison, "left", lambda *_: ())
        yield


@pytest.mark.parametrize("size", [0, SMALL, LARGE])
def test_stages_that_publish_equal_bytes_of_a_tensor_share_it(store: WeightStore, size: int) -> None:
    for number in range(3):
        store.publish(1, stage(number, torch.arange(float(size))), part=number, parts=3)
    into = {f"layer{number}": torch.zeros(4) for number in range(3)} | {"shared": torch.zeros(size)}
    assert store.get(1, into) == 1
    assert into["shared"].tolist() == list(map(float, range(size)))
    assert [into[f"layer{number}"].unique().item() for number in range(3)] == [0.0, 1.0, 2.0]
    assert store.load(1)["shared"].equal(into["shared"])
    assert store.load(1, ["shared"], map=True)["shared"].equal(into["shared"])


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_later_publisher_of_other_bytes_is_refused(store: WeightStore, size: int) -> None:
    shared = torch.arange(float(size))
    store.publish(1, stage(0, shared), part=0, parts=2)
    other = shared.clone()
    other[-1] += 1
    with pytest.raises(Mismatch, match=DISAGREE):
        store.publish(1, stage(1, other), part=1, parts=2)
    assert store.versions() == []
    store.publish(1, stage(1, shared), part=1, parts=2)
    assert store.versions() == [1]


def test_a_publisher_of_another_dtype_or_shape_is_refused(store: WeightStore) -> None:
    store.publish(1, stage(0, torch.zeros(4)), part=0, parts=2)
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(Mismatch, match=r"a part of the version has shared .*, another shared float32\[4\]"):
            store.publish(1, stage(1, other), part=1, parts=2)


def test_of_publishers_that_begin_together_one_is_refused(store: WeightStore) -> None:
    """The catalogue orders them: the later one finds the earlier one listed."""
    together, refused = Barrier(2), []

    def publish(number: int) -> None:
        together.wait(20.0)
        try:
            store.publish(1, stage(number, torch.full((LARGE,), float(number))), part=number, parts=2)
        except Mismatch as error:
            refused.append(str(error))

    threads = [Thread(target=publish, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(refused) == 1 and "'shared' has other bytes in part" in refused[0]
    assert store.versions() == []


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_reader_refuses_parts_that_publishers_could_not_compare(
    store: WeightStore, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publishers_that_do_not_compare(monkeypatch):
        for number in range(2):
            store.publish(1, stage(number, torch.full((size,), float(number))), part=number, parts=2)
    into = {"shared": torch.full((size,), 7.0)}
    for _ in range(2):
        with pytest.raises(Mismatch, match=DISAGREE):
            store.get(1, into, strict=False)
    assert into["shared"].unique().tolist() == [7.0]
    with pytest.raises(Mismatch, match=DISAGREE):
        store.load(1, ["layer0"])


def test_replicas_of_a_tensor_parallel_model_publish_the_same_boxes_and_buffers(store: WeightStore) -> None:
    """DDP over a mesh, with DTensors on the tensor-parallel dimension only: both replicas give all they have."""
    weight, buffer = torch.arange(12.0).view(4, 3), torch.arange(5.0)

    def publish(version: int, rank: int, added: float = 0.0) -> None:
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "tp"))
            local = distribute_tensor(weight + added, mesh["tp"], [Shard(0)], src_data_rank=None)
            store.publish(version, {"weight": local, "buffer": buffer})

    for rank in range(4):
        publish(1, rank)
    found = store.load(1)
    assert found["weight"].equal(weight) and found["buffer"].equal(buffer)
    for rank in range(2):
        publish(2, rank)
    with pytest.raises(Mismatch, match="'weight' has other bytes in part 2 than in part 0"):
        publish(2, 2, added=1.0)


def test_parts_of_an_epoch_that_is_over_are_not_compared(store: WeightStore) -> None:
    store.publish(1, stage(0, torch.zeros(SMALL)), part=0, parts=2, fence=1)
    for number in (1, 0):
        store.publish(1, stage(number, torch.ones(SMALL)), part=number, parts=2, fence=2)
    assert store.load(1)["shared"].tolist() == [1.0] * SMALL


@given(st.lists(st.sampled_from([0, 1, 60, 61, LARGE_BYTES // 4, LARGE]), min_size=1, max_size=6), st.data())
def test_only_tensors_with_other_bytes_are_named(sizes: list[int], data: st.DataObject) -> None:
    """Small tensors share a piece with neighbours that differ; those are not named for it."""
    state = {f"t{number}": torch.arange(float(size)) for number, size in enumerate(sizes)}
    full = [name for name, tensor in state.items() if len(tensor)]
    changed = data.draw(st.sets(st.sampled_from(full))) if full else set()
    other = {name: tensor + (name in changed) for name, tensor in state.items()}
    with WeightStore("memory://shared") as store:
        store.publish(1, state | {"own": torch.zeros(3)}, part=0, parts=2)
        if changed:
            with pytest.raises(Mismatch) as refused:
                store.publish(1, other, part=1, parts=2)
            assert {name for name in state if f"'{name}' has other" in str(refused.value)} == changed
        else:
            store.publish(1, other, part=1, parts=2)
            assert store.versions() == [1]
