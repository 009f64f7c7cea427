"""The catalogue as bytes: what no release can have written is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import fleet, transitions
from holdfast.store.catalog.fan_out import request_copy
from holdfast.store.catalog.records import Catalog, Holder, Reader, Replica, Shard
from support.mutations import mutated

HOLDERS = [Holder(f"holder{number}", Peer("north", 100 + number, 7)) for number in range(3)]


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x93\x01\xa1x\x03", Catalog(layout=3).encode()])
def test_a_malformed_catalogue_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptData):
        Catalog.decode(data)


@given(
    where=st.integers(0, 10_000), what=st.integers(0, 255), kind=st.sampled_from(["flip", "cut", "remove", "insert"])
)
def test_a_damaged_catalogue_is_read_as_a_catalogue_or_refused(where: int, what: int, kind: str) -> None:
    catalog = transitions.join(transitions.join(Catalog(), HOLDERS[0]), HOLDERS[1])
    replica = Replica(HOLDERS[0].id, Handle("shm", b"region", 100))
    first = Shard(0, b"x" * 16, 50, HOLDERS[0].id, (replica,))
    catalog = transitions.announce(catalog, 1, first, parts=1, replicas=1, keep=2, fence=None)
    catalog = transitions.pin(request_copy(catalog, 1, 0, b"x" * 16, HOLDERS[2]), 1, "lease", HOLDERS[1])
    catalog = fleet.register(catalog, Reader("g0", "token", "store", HOLDERS[2].peer, switched=True))
    catalog = fleet.propose(catalog, "undecided", 1, ["g0", "g1"], 2, 5.0, HOLDERS[0].peer)
    catalog = fleet.refuse(catalog, "g0", "token", 1, "it does not fit")
    (damaged,) = mutated([catalog.encode()], kind, where, what)
    try:
        assert isinstance(Catalog.decode(damaged), Catalog)
    except CorruptData:
        assert damaged != catalog.encode()


def test_a_catalogue_of_another_release_is_refused() -> None:
    with pytest.raises(CorruptData, match=r"layout 1, this release knows layout 2.*run one release in all processes"):
        Catalog.decode(Catalog(layout=1).encode())
