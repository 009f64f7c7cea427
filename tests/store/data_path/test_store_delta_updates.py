"""Updates by delta: only what changed is read where reads are slow, and what cannot be trusted is read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from msgspec.structs import replace

from holdfast.backends.inproc.transport import InprocPlane
from holdfast.comms.errors import RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.comms.work import Work
from holdfast.store import WeightStore
from holdfast.store.catalog.records import Catalog, DeltaOffer, Holder, Shard, Version
from holdfast.store.catalog.transitions import COUNTS_FOR, RENEWED_AFTER, has_far_readers, note_far_read
from support.children import Child
from support.samples.store_processes import count_reads, move_to_host


def at(catalog: Catalog, number: int) -> Catalog:
    """The catalogue when `number` is the newest version."""
    version = Version(number, 1, 1, None, True, ())
    return Catalog.decode(replace(catalog, versions=(version,)).encode())


def test_a_process_that_reads_every_version_counts_and_changes_the_catalogue_now_and_then() -> None:
    catalog, changes = Catalog(), 0
    for number in range(1, 10 * RENEWED_AFTER + 1):
        before = at(catalog, number)
        catalog = note_far_read(before, number)
        changes += catalog != before
        assert has_far_readers(catalog, "north")
        assert note_far_read(catalog, max(1, number - 5)) is catalog, "one that is late"
    assert changes == 10
    assert not has_far_readers(at(catalog, number + COUNTS_FOR), "north")
    anew = note_far_read(at(catalog, 3), 3)
    assert anew.far_read == 3 and has_far_readers(anew, "north"), "numbers began anew"


def test_holders_of_other_hosts_count_without_a_note() -> None:
    catalog = Catalog(holders=(Holder("a", Peer("north", 1, 1)),))
    assert has_far_readers(catalog, "south") and not has_far_readers(catalog, "north")


ELEMENTS = 4 << 20


class Wire:
    """The reads of a plane that maps nothing, as between hosts.

    `damage` gets what a read of one of `deltas` brings.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.deltas: list[Handle] = []
        self.damage = lambda data: None

    def take(self) -> int:
        """Bytes read since the last call."""
        found, self.bytes = self.bytes, 0
        return found


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    read = InprocPlane.read

    def refuse(plane: InprocPlane, handle: Handle, *, lasting: bool) -> torch.Tensor:
        raise Unsupported("mapping", "read it")

    def counted(
        plane: InprocPlane, handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30.0
    ) -> Work:
        wire.bytes += into.nbytes
        work = read(plane, handle, into, offset, timeout=timeout)
        if handle in wire.deltas:
            wire.damage(into)
        return work

    monkeypatch.setattr(InprocPlane, "can_map", False)
    monkeypatch.setattr(InprocPlane, "map", refuse)
    monkeypatch.setattr(InprocPlane, "read", counted)
    return wire


@pytest.fixture
def store(wire: Wire, request: pytest.FixtureRequest) -> Iterator[WeightStore]:
    with WeightStore(f"memory://{request.node.name}") as opened:
        yield opened


def weights() -> dict[str, torch.Tensor]:
    return {
        "large": torch.randn(ELEMENTS, dtype=torch.bfloat16),
        "embedding": torch.randn(1 << 20),
        "small": torch.ones(17, dtype=torch.float64),
    }


def step(state: dict[str, torch.Tensor], share: float = 0.01) -> None:
    """Change a share of the elements of the large tensor, and the small one."""
    where = torch.randint(0, ELEMENTS, (int(ELEMENTS * share),))
    state["large"][where] = torch.randn(len(where), dtype=torch.bfloat16)
    state["small"] += 1


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


def offered(store: WeightStore, version: int) -> DeltaOffer | None:
    shard = store._catalog_client.read()[1].shard(version, 0)
    assert isinstance(shard, Shard)
    return shard.delta


def nbytes(state: dict[str, torch.Tensor]) -> int:
    return sum(each.nbytes for each in state.values())


def read_first(store: WeightStore) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Version 1, and the tensors of a reader that has got it."""
    state, into = weights(), weights()
    store.publish(1, state)
    store.get(1, into)
    return state, into


def test_a_reader_of_the_version_before_reads_only_what_changed(store: WeightStore, wire: Wire) -> None:
    state, into = read_first(store)
    assert wire.take() > nbytes(state)
    for version in (2, 3):
        step(state)
        store.publish(version, state)
        store.get("latest", into)
        assert alike(state, into)
        assert wire.take() < nbytes(state) / 20


@pytest.mark.parametrize("had", [False, True], ids=["never had it", "has freed it"])
def test_a_reader_without_the_base_gets_the_whole(store: WeightStore, wire: Wire, had: bool) -> None:
    state, into = weights(), weights()
    store.publish(1, state)
    if had:
        store.get(1, into)
        into = weights()
    step(state)
    store.publish(2, state)
    assert offered(store, 2) is not None
    wire.take()
    store.get(2, into)
    assert alike(state, into)
    assert wire.take() > nbytes(state)


def test_a_reader_may_change_its_tensors_between_two_versions(store: WeightStore, wire: Wire) -> None:
    state, into = read_first(store)
    into["large"][5] = 100.0
    step(state)
    store.publish(2, state)
    wire.take()
    store.get(2, into)
    assert alike(state, into)
    assert wire.take() < nbytes(state) / 2, "the piece that was changed is read whole"


def test_a_prefetching_reader_makes_the_next_version_beside_the_one_it_serves(store: WeightStore, wire: Wire) -> None:
    state, first = read_first(store)
    buffers = [first, weights()]
    for version in (2, 3, 4):
        served = {name: each.clone() for name, each in buffers[version % 2].items()}
        step(state)
        store.publish(version, state)
        wire.take()
        store.get(version, buffers[1 - version % 2])
        assert alike(buffers[1 - version % 2], state)
        assert alike(buffers[version % 2], served), "the served weights have changed"
        assert wire.take() < nbytes(state) / 20


@pytest.mark.parametrize("where", [0, 60, -3, None], ids=["header", "sizes", "records", "gone"])
def test_a_damaged_delta_is_never_taken_for_the_new_version(store: WeightStore, wire: Wire, where: int | None) -> None:
    state, into = read_first(store)
    step(state)
    store.publish(2, state)
    delta = offered(store, 2)
    assert delta is not None

    def damage(data: torch.Tensor) -> None:
        if where is None:
            raise RegionGone("the holder has closed it")
        data[where] ^= 1

    wire.deltas.append(delta.handle)
    wire.damage = damage
    store.get(2, into)
    assert alike(state, into)


def test_a_delta_is_offered_only_where_it_pays(store: WeightStore) -> None:
    state = weights()
    store.publish(1, state)
    assert offered(store, 1) is None, "there is no version before"
    step(state, share=1.0)
    state["embedding"] += 1
    store.publish(2, state)
    assert offered(store, 2) is None, "all has changed"
    state["more"] = torch.ones(1000)
    store.publish(3, state)
    assert offered(store, 3) is None, "the layout is another one"
    step(state)
    store.publish(4, state)
    assert offered(store, 4) is not None
    store.publish(5, state)
    assert offered(store, 5) is None, "nothing has changed"


def test_no_delta_is_made_where_parts_are_mapped() -> None:
    with WeightStore("memory://mapped-parts") as store:
        state, into = read_first(store)
        step(state)
        store.publish(2, state)
        assert offered(store, 2) is None
        store.get(2, into)
        assert alike(state, into)


def a_far_holder(pipe: Connection, url: str) -> None:
    """Keep replicas on another host; send how many bytes have been read so far after each one."""

    def tell(kind: str, fields: dict[str, object]) -> None:
        if kind == "replica_made":
            pipe.send(sum(sizes))

    move_to_host("south")
    pipe.recv()
    with WeightStore(url, plane="ucx", observe=tell) as store:
        sizes = count_reads(store._plane)
        pipe.send("open")
        pipe.recv()


def test_a_holder_on_another_host_makes_its_replica_from_the_one_before(
    start: Callable[..., Child], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    far = start(a_far_holder, url)
    with WeightStore(url, plane="ucx") as store:
        far.tell("open")
        assert far.hear() == "open"
        state = weights()
        store.publish(1, state)
        first = far.hear()
        assert first > nbytes(state)
        step(state)
        store.publish(2, state)
        assert far.hear() - first < nbytes(state) / 10
        far.tell("end")
        far.end()


def a_far_reader(pipe: Connection, url: str) -> None:
    """Get the versions that `pipe` names; send how many bytes each took."""
    move_to_host("south")
    with WeightStore(url, plane="ucx", hold=False) as store:
        into, sizes = weights(), count_reads(store._plane)
        while (version := pipe.recv()) != "end":
            sizes.clear()
            store.get(version, into)
            pipe.send((sum(sizes), into["large"].float().sum().item()))


def test_a_process_on_another_host_that_only_reads_gets_deltas_too(
    start: Callable[..., Child], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first get notes the host in the catalogue, so the next version has a delta for it."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    far = start(a_far_reader, url)
    with WeightStore(url, plane="ucx", replicas=1) as store:
        state = weights()
        for version in (1, 2, 3):
            step(state)
            store.publish(version, state)
            assert (offered(store, version) is None) == (version == 1)
            far.tell(version)
            read, total = far.hear()
            assert total == state["large"].float().sum().item()
            assert read > nbytes(state) if version == 1 else read < nbytes(state) / 10
        far.tell("end")
        far.end()


# -- memory


def test_deltas_count_towards_the_limit_and_go_with_their_version(wire: Wire, request: pytest.FixtureRequest) -> None:
    with WeightStore(f"memory://{request.node.name}", limit=1 << 30) as store:
        state = weights()
        store.publish(1, state)
        before = store._replica_holder.pool.used
        step(state)
        store.publish(2, state)
        offer = offered(store, 2)
        assert offer is not None
        (shown,) = store.inspect().report().holders
        parts = sum(store.inspect().report().versions[number].nbytes for number in (0, 1))
        assert shown.nbytes == parts + offer.handle.nbytes
        assert store._replica_holder.pool.used >= 2 * before + offer.handle.nbytes
        store.delete(2)
        store.publish(3, weights())  # nothing of it is as it was
        assert offered(store, 3) is None
        assert store._replica_holder.pool.used == 2 * before


def test_a_part_takes_the_room_of_deltas(wire: Wire, request: pytest.FixtureRequest) -> None:
    """The limit has room for the parts alone: each publish goes well, and readers read what has no delta whole."""
    state, into = weights(), weights()
    room = 3 * (nbytes(state) + (1 << 20))
    with WeightStore(f"memory://{request.node.name}", limit=room) as store:
        for version in range(1, 7):
            step(state)
            store.publish(version, state, timeout=5.0)
            assert store._replica_holder.pool.used <= room
            store.get(version, into)
            assert alike(state, into)
