"""Which hosts read over a network: each is noted now and then, and forgotten once it no longer reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.transport.base import Peer
from holdfast.store.catalog.records import Catalog, Holder, Version
from holdfast.store.read.delta import COUNTS_FOR, MOST_HOSTS, RENEWED_AFTER, noted, reading_hosts


def at(catalog: Catalog, number: int) -> Catalog:
    """The catalogue when `number` is the newest version."""
    version = Version(number, 1, 1, None, True, ())
    return Catalog.decode(Catalog(holders=catalog.holders, versions=(version,), far_reads=catalog.far_reads).encode())


@given(st.lists(st.tuples(st.sampled_from(["north", "south", "west"]), st.integers(0, 5)), max_size=60))
def test_a_host_counts_from_its_first_read_for_the_next_versions(reads: list[tuple[str, int]]) -> None:
    catalog, number, last = Catalog(), 1, dict[str, int]()
    for host, later in reads:
        number += later
        catalog = noted(at(catalog, number), host, number)
        last[host] = number
        found = reading_hosts(catalog)
        assert found >= {each for each, when in last.items() if number - when < COUNTS_FOR - RENEWED_AFTER}
        assert not found & {each for each, when in last.items() if number - when >= COUNTS_FOR}


def test_a_host_that_reads_every_version_changes_the_catalogue_now_and_then() -> None:
    catalog, changes = Catalog(), 0
    for number in range(1, 10 * RENEWED_AFTER + 1):
        before = at(catalog, number)
        catalog = noted(before, "south", number)
        changes += catalog != before
    assert changes == 10


def test_a_thousand_hosts_cost_no_more_than_a_few() -> None:
    catalog = at(Catalog(), 7)
    for host in range(1000):
        catalog = noted(catalog, f"host {host}", 7)
    assert len(catalog.far_reads) == MOST_HOSTS
    later = noted(at(catalog, 7 + COUNTS_FOR), "another", 7 + COUNTS_FOR)
    assert reading_hosts(later) == {"another"}


def test_holders_count_without_a_note() -> None:
    assert reading_hosts(Catalog(holders=(Holder("a", Peer("north", 1, 1)),))) == {"north"}
