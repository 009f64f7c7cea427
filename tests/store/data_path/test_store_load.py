"""`WeightStore.load`: new tensors, slices, and tensors that lie in the holders' memory."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.store import NoSuchVersion, Slice, StoreFull, WeightStore
from support.children import Child


def weights(value: float, size: int = 300_000) -> dict[str, torch.Tensor]:
    return {
        "layers.0.weight": torch.full((size,), value),
        "layers.1.weight": torch.full((4, 6), value),
        "head": torch.arange(24.0).view(4, 6) + value,
    }


def test_only_the_tensors_asked_for_are_loaded(store: WeightStore) -> None:
    store.publish(3, weights(2.0))
    assert list(store.load(3, ["head"])) == ["head"]
    assert sorted(store.load("latest", "layers.")) == ["layers.0.weight", "layers.1.weight"]


def test_a_slice_is_asked_for_by_offsets_and_shape(store: WeightStore) -> None:
    store.publish(3, weights(2.0))
    loaded = store.load(3, {"head": Slice((1, 2), (2, 3)), "layers.0.weight": Slice((299_999,), (1,))})
    assert torch.equal(loaded["head"], weights(2.0)["head"][1:3, 2:5])
    assert loaded["layers.0.weight"].tolist() == [2.0]


def test_all_that_is_not_there_is_listed_in_one_error(store: WeightStore) -> None:
    store.publish(3, weights(2.0))
    wanted = {"head": Slice((0, 4), (4, 3)), "layers.1.weight": Slice((0,), (2,)), "x": Slice((0,), (1,))}
    with pytest.raises(Mismatch, match=r"no 'x'.*outside of head.*layers\.1\.weight.* has 2 dimensions"):
        store.load(3, wanted)
    with pytest.raises(Mismatch, match="begins with 'nothing'"):
        store.load(3, "nothing")
    with pytest.raises(NoSuchVersion):
        store.load(4)


@pytest.mark.parametrize("chosen", [None, {"head": Slice((1, 2), (2, 3))}])
def test_mapped_tensors_have_the_bytes_of_the_version(store: WeightStore, chosen: dict[str, Slice] | None) -> None:
    store.publish(3, weights(2.0))
    mapped, copied = store.load(3, chosen, map=True), store.load(3, chosen)
    assert all(torch.equal(tensor, copied[name]) for name, tensor in mapped.items())


def test_what_is_written_into_a_mapped_tensor_stays_in_this_process(store: WeightStore) -> None:
    store.publish(3, weights(2.0))
    store.load(3, map=True)["head"].zero_()
    assert torch.equal(store.load(3)["head"], weights(2.0)["head"])


def test_memory_that_is_mapped_is_not_reused_before_it_is_let_go(tmp_path: Path) -> None:
    state = weights(0.0)
    with WeightStore(f"memory://{tmp_path}", keep=1, limit=4_000_000) as store:
        store.publish(1, weights(1.0))
        mapped = store.load(1, map=True)
        for version in (2, 3):
            store.publish(version, weights(float(version)))
            store.get(version, state)
        assert set(mapped["layers.0.weight"].tolist()) == {1.0}
        assert store.versions() == [3]
        also = store.load(3, map=True)
        store.publish(4, weights(4.0))
        with pytest.raises(StoreFull, match="let pins and mapped tensors go"):
            store.publish(5, weights(5.0), timeout=0.2)
        assert store.versions() == [4] and set(also["layers.0.weight"].tolist()) == {3.0}
        del mapped
        store.publish(5, weights(5.0))


def a_holder(pipe: Connection, url: str, plane: str = "auto") -> None:
    with WeightStore(url, plane=plane, replicas=1) as store:
        store.publish(1, weights(2.0))
        pipe.send("published")
        pipe.recv()


def test_mapped_tensors_outlive_their_holder(url: str, start: Callable[..., Child]) -> None:
    holder = start(a_holder, url)
    holder.hear()
    with WeightStore(url, hold=False) as reader:
        mapped = reader.load(1, map=True)
        holder.kill()
        with pytest.raises(NoSuchVersion, match="holders are gone"):
            reader.load(1)
        assert set(mapped["layers.0.weight"].tolist()) == {2.0}


def test_a_part_larger_than_the_limit_is_refused_at_once(tmp_path: Path) -> None:
    with WeightStore(f"memory://{tmp_path}", limit=1_000_000) as store:
        with pytest.raises(StoreFull) as refused:
            store.publish(1, weights(1.0), timeout=60)
        assert refused.value.waited < 1 and refused.value.limit == 1_000_000
        assert store.versions() == []


def test_a_plane_that_cannot_map_says_so(tmp_path: Path) -> None:
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, weights(1.0))
        store._plane.map = lambda *_, **__: (_ for _ in ()).throw(Unsupported("mapping", "read it"))  # type: ignore[assignment]
        with pytest.raises(Unsupported):
            store.load(1, map=True)
        assert torch.equal(store.load(1)["head"], weights(1.0)["head"]), "without a mapping, bytes are read"


# -- over planes that cross hosts


@pytest.mark.parametrize(("plane", "tls"), [("ucx", "tcp,self"), ("nixl", "posix,cma,self")])
def test_readers_of_the_host_map_what_another_plane_moves(
    url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, plane: str, tls: str
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    holder = start(a_holder, url, plane)
    assert holder.hear(60.0) == "published"
    with WeightStore(url, plane=plane, hold=False) as store:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("it is read, though it can be mapped")

        monkeypatch.setattr(type(store._plane), "read", refuse)
        into = weights(0.0)
        store.get(1, into)
        mapped = store.load(1, map=True)
        assert all(torch.equal(into[name], each) for name, each in weights(2.0).items())
        assert all(torch.equal(mapped[name], each) for name, each in weights(2.0).items())
    monkeypatch.undo()
    holder.tell("close")
    holder.end()
