"""The catalogue's transitions in every order of events that hypothesis generates, and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import fleet, transitions
from holdfast.store.catalog.failure_domains import candidates
from holdfast.store.catalog.part_casts import announce_cast, casts_of, request_cast, withdraw_cast
from holdfast.store.catalog.records import (
    KEPT,
    CastForm,
    Catalog,
    Holder,
    Pin,
    Reader,
    Replica,
    Retainer,
    Shard,
    Spread,
    SwitchRecord,
    Version,
)
from holdfast.store.errors import NoSuchVersion
from support.mutations import damages, mutated
from support.weights.catalogs import DIGEST, announced, copied, joined

PEERS = [Peer(host, 100 + number, 7) for number, host in enumerate(("north", "north", "south", "west"))]
HOLDERS = [Holder(f"holder{number}", PEERS[number % 4]) for number in range(5)]
"""The last one is a second store in the process of the first."""


@given(damages)
def test_a_damaged_catalogue_is_read_as_a_catalogue_or_refused(damage: tuple[str, int, int]) -> None:
    catalog = announced(joined(HOLDERS[0], HOLDERS[1]), HOLDERS[0].id)
    catalog = transitions.pin(catalog, 1, "lease", HOLDERS[1])
    catalog = fleet.register(catalog, Reader("g0", "token", "store", HOLDERS[2].peer, switched=True))
    catalog = fleet.propose(catalog, "undecided", 1, ["g0", "g1"], 2, 5.0, HOLDERS[0].peer)
    catalog = fleet.refuse(catalog, "g0", "token", 1, "it does not fit")
    (damaged,) = mutated([catalog.encode()], *damage)
    try:
        assert isinstance(Catalog.decode(damaged), Catalog)
    except CorruptData:
        assert damaged != catalog.encode()


def test_a_holder_takes_its_own_replicas_back_and_says_why_it_is_slow() -> None:
    catalog = copied(announced(joined(*HOLDERS[:3]), HOLDERS[0].id, replicas=2), HOLDERS[2].id)
    first, second = catalog.versions[0].shards[0].replicas
    assert transitions.retract(catalog, HOLDERS[0].id, [first.handle]) == catalog
    left = transitions.retract(catalog, HOLDERS[0].id, ())
    assert left.versions[0].shards[0].replicas == (second,)
    slow = transitions.note_slow(catalog, HOLDERS[2].id, "no huge pages")
    assert [each.slow for each in slow.holders] == ["", "", "no huge pages"]


def test_a_malformed_catalogue_and_one_of_another_release_are_refused() -> None:
    other_release = r"layout 1, this release knows layout 3.*run one release in all processes"
    malformed = [(data, None) for data in (b"", b"\xff", b"\x93\x01\xa1x\x03")]
    others = [(Catalog(layout=4).encode(), "layout 4"), (Catalog(layout=1).encode(), other_release)]
    for data, why in malformed + others:
        with pytest.raises(CorruptData, match=why):
            Catalog.decode(data)


SPREADS: tuple[Spread, ...] = ("auto", "hosts", "processes")
"""By the number of the version."""

holders = st.sampled_from(HOLDERS)
numbers = st.integers(0, 5)
parts = st.integers(0, 1)
hosts = st.sampled_from(["north", "south", "west"])
digests = st.sampled_from([b"x" * 16, b"x" * 16, b"x" * 16, b"y" * 16])
fences = st.none() | st.integers(0, 3)
drops = st.sampled_from([transitions.withdraw, transitions.drop_replica])

Part = tuple[int, int, bytes]
"""The number of a version, a part, its digest."""


def replica(holder: Holder, number: int, part: int, digest: bytes) -> Replica:
    return Replica(holder.id, Handle("shm", f"{holder.id} {number} {part} {digest!r}".encode(), 100))


def shard(holder: Holder, number: int, part: int, digest: bytes) -> Shard:
    return Shard(part, digest, 50, holder.id, (replica(holder, number, part, digest),))


def accepted(catalog: Catalog, without: Collection[str] = ()) -> set[Part]:
    """The accepted parts that have a replica in other stores than those in `without`."""
    return {
        (version.number, each.part, each.digest)
        for version in catalog.versions
        for each in version.shards
        if each.accepted and any(one.holder not in without for one in each.replicas)
    }


class Catalogue(RuleBasedStateMachine):
    """Applies transitions in any order, as processes would, and checks the result."""

    catalog = Catalog()
    seen: dict[int, tuple[bytes, ...]]

    @initialize()
    def begin(self) -> None:
        self.catalog, self.seen = Catalog(), {}
        self.all_join()

    def apply(
        self, transition: Callable[[Catalog], Catalog], *, without: Collection[str] = (), deleted: Collection[int] = ()
    ) -> bool:
        """Apply a transition; returns whether it was allowed. A refused one changes nothing.

        The replicas of the stores in `without` go; only the versions in `deleted` are deleted.
        """
        before, encoded = self.catalog, self.catalog.encode()
        try:
            after = transition(before)
        except HoldfastError:
            assert before.encode() == encoded
            return False
        self.check_fences(before, after)
        self.check_acceptance(before, after)
        self.check_loss(before, after, without, deleted)
        self.check_ended(before, after, deleted)
        self.catalog = after
        return True

    @property
    def all_parts(self) -> Iterator[tuple[Version, Shard]]:
        return ((version, each) for version in self.catalog.versions for each in version.shards)

    def check_fences(self, before: Catalog, after: Catalog) -> None:
        assert before.fence is None or (after.fence is not None and after.fence >= before.fence)

    def check_acceptance(self, before: Catalog, after: Catalog) -> None:
        """A part is accepted when it is safe; a version is visible when all its parts are accepted."""
        for version in after.versions:
            for each in version.shards:
                known = before.shard(version.number, each.part)
                if each.accepted and not (known and known.digest == each.digest and known.accepted):
                    assert after.safe(version, each)
            whole = [each.accepted for each in version.shards] == [True] * version.parts
            assert version.visible == whole

    def check_loss(self, before: Catalog, after: Catalog, without: Collection[str], deleted: Collection[int]) -> None:
        """What is published stays while it has replicas, unless it is deleted, superseded, or begun anew."""
        visible = after.visible()
        oldest = visible[-after.keep] if len(visible) >= after.keep else 0
        pinned = {pin.version for pin in after.pins}
        for number in set(before.visible()) - set(visible) - set(deleted):
            left = [any(one.holder not in without for one in each.replicas) for each in before.version(number).shards]
            assert not all(left) or (number < oldest and number not in pinned and number != after.latest)
        for number, part, digest in accepted(before, without) - accepted(after):
            if not before.version(number).visible:
                assert number < oldest or after.fence != before.fence, (number, part, digest)

    def check_ended(self, before: Catalog, after: Catalog, deleted: Collection[int]) -> None:
        """Each visible version that ends is told of once: as lost if its replicas are gone, else as retired."""
        told = list(transitions.ended(before, after, "a store that stays"))
        assert sorted(number for _, number in told) == sorted(set(before.visible()) - set(after.visible()))
        for kind, number in told:
            assert kind == "lost" or number in deleted or number < max(after.visible(), default=0)

    # -- stores come and go

    @rule()
    def all_join(self) -> None:
        for holder in HOLDERS:
            self.join(holder)

    @rule(holder=holders)
    def join(self, holder: Holder) -> None:
        self.apply(lambda now: transitions.join(now, holder))

    @rule(holder=holders)
    def leave(self, holder: Holder) -> None:
        self.apply(lambda now: transitions.leave(now, holder.id))

    @rule(holder=holders)
    def leave_and_depart(self, holder: Holder) -> None:
        self.leave(holder)
        before, may = self.catalog, transitions.may_depart(self.catalog, holder.id)
        self.apply(lambda now: transitions.depart(now, holder.id), without={holder.id})
        reachable = holder.peer.host not in before.away
        if may and reachable and any(not each.leaving for each in self.catalog.holders):
            assert self.catalog.visible() == before.visible(), "a store that may depart takes nothing along"
        assert not any(holder.id in each.publishers for version in self.catalog.versions for each in version.shards)
        assert not any(pin.holder == holder.id for pin in self.catalog.pins)

    @rule(peer=st.sampled_from(PEERS))
    def die(self, peer: Peer) -> None:
        gone = {each.id for each in self.catalog.holders if each.peer == peer}
        before = self.catalog
        self.apply(lambda now: transitions.remove_dead_holders(now, {peer}), without=gone)
        assert peer not in self.catalog.peers()
        assert transitions.remove_dead_holders(self.catalog, {peer}) == self.catalog
        for version in self.catalog.versions:
            for each in version.shards:
                known = before.shard(version.number, each.part)
                if not each.accepted:
                    assert known is not None and set(known.publishers) - gone, "it went with its last publisher"

    @rule(hosts=st.sets(hosts, max_size=2))
    def hosts_die(self, hosts: set[str]) -> None:
        for peer in PEERS:
            if peer.host in hosts:
                self.die(peer)

    @rule(hosts=st.sets(hosts, min_size=1))
    def hosts_fall_silent(self, hosts: set[str]) -> None:
        """Nothing that is published goes while one replica is left, wherever that is."""
        before = self.catalog
        assert self.apply(lambda now: transitions.hosts_away(now, hosts))
        assert self.catalog.hosts() == before.hosts() - hosts
        assert transitions.hosts_away(self.catalog, hosts) == self.catalog

    @rule(host=hosts)
    def host_is_back(self, host: str) -> None:
        assert self.apply(lambda now: transitions.host_back(now, host))
        assert host not in self.catalog.away

    @rule(holder=holders)
    def find_that_it_has_nothing(self, holder: Holder) -> None:
        self.apply(lambda now: transitions.retract(now, holder.id, ()), without={holder.id})
        assert transitions.retract(self.catalog, holder.id, ()) == self.catalog

    # -- parts are published and copied

    @rule(holder=holders, number=numbers, digest=digests)
    def publish_all_parts(self, holder: Holder, number: int, digest: bytes) -> None:
        for part in range(1 + number % 2):
            self.announce(holder, number, part, digest, None)

    @rule(holder=holders, number=numbers, part=parts, digest=digests, fence=fences)
    def announce(self, holder: Holder, number: int, part: int, digest: bytes, fence: int | None) -> None:
        if part > number % 2:
            return
        before = self.catalog
        transition = partial(
            transitions.announce,
            draft=Version(number, 1 + number % 2, 2, fence, False, (), SPREADS[number % 3]),
            shard=shard(holder, number, part, digest),
            keep=2,
        )
        allowed = self.apply(transition)
        known = before.shard(number, part)
        if before.holder(holder.id) is None or (
            fence is not None and before.fence is not None and fence < before.fence
        ):
            assert not allowed
        elif known is not None and known.digest != digest:
            begun_anew = self.catalog.fence != before.fence and number not in before.visible()
            assert allowed == begun_anew or not allowed
        if allowed:
            assert self.catalog == before or fence in (None, self.catalog.fence)
            assert transition(self.catalog) == self.catalog, "the same publication again changes nothing"

    @rule()
    def copy_all_that_is_missing(self) -> None:
        for holder in self.catalog.holders:
            for version, lacking, _ in list(transitions.missing(self.catalog, holder.id)):
                self.copy_something_else(holder, version.number, lacking.part, lacking.digest)

    @rule(data=st.data(), holder=holders)
    def copy_what_is_missing(self, data: st.DataObject, holder: Holder) -> None:
        todo = list(transitions.missing(self.catalog, holder.id))
        if not todo:
            return
        version, lacking, _ = data.draw(st.sampled_from(todo))
        made = replica(holder, version.number, lacking.part, lacking.digest)
        before = self.catalog.lacking(version, lacking)
        transition = partial(
            transitions.replicated, number=version.number, part=lacking.part, digest=lacking.digest, replica=made
        )
        self.apply(transition)
        assert transition(self.catalog) == self.catalog
        now, after = self.catalog.version(version.number), self.catalog.shard(version.number, lacking.part)
        assert now is None or after is None or sum(self.catalog.lacking(now, after)) < sum(before)

    @rule(holder=holders, number=numbers, part=parts, digest=digests)
    def copy_something_else(self, holder: Holder, number: int, part: int, digest: bytes) -> None:
        made = replica(holder, number, part, digest)
        self.apply(lambda now: transitions.replicated(now, number, part, digest, made))

    @rule(holder=holders, number=numbers, part=parts, drop=drops)
    def withdraw_or_drop(self, holder: Holder, number: int, part: int, drop: Callable[..., Catalog]) -> None:
        before = self.catalog
        self.apply(lambda now: drop(now, number, part, holder.id))
        assert self.catalog.visible() == before.visible() and accepted(self.catalog) == accepted(before)

    # -- versions are kept and let go

    @rule(number=numbers, holder=holders)
    def pin(self, number: int, holder: Holder) -> None:
        allowed = self.apply(lambda now: transitions.pin(now, number, f"pin{number}{holder.id}", holder))
        assert allowed == (number in self.catalog.visible())

    @rule(number=numbers, holder=holders)
    def unpin(self, number: int, holder: Holder) -> None:
        self.apply(lambda now: transitions.unpin(now, f"pin{number}{holder.id}"))

    @rule(number=numbers)
    def rollback(self, number: int) -> None:
        if self.apply(lambda now: transitions.rollback(now, number)):
            assert self.catalog.latest == number

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        pinned = any(pin.version == number for pin in self.catalog.pins)
        there = number in self.catalog.visible()
        assert self.apply(lambda now: transitions.delete(now, number), deleted={number}) == (there and not pinned)
        if there and not pinned:
            self.seen.pop(number, None)

    # -- what holds at all times

    @invariant()
    def it_survives_the_register(self) -> None:
        assert Catalog.decode(self.catalog.encode()) == self.catalog

    @invariant()
    def versions_are_in_order_and_parts_too(self) -> None:
        found = [version.number for version in self.catalog.versions]
        assert found == sorted(set(found))
        for version in self.catalog.versions:
            inside = [each.part for each in version.shards]
            assert inside == sorted(set(inside)) and all(part < version.parts for part in inside)

    @invariant()
    def every_part_can_be_read(self) -> None:
        for version in self.catalog.versions:
            assert version.shards and all(each.replicas for each in version.shards)

    @invariant()
    def a_visible_version_never_changes(self) -> None:
        for number in self.catalog.lost:
            if self.catalog.version(number) is None:
                self.seen.pop(number, None)  # it may be published anew
        for version in self.catalog.versions:
            if version.visible:
                found = tuple(each.digest for each in version.shards)
                assert self.seen.setdefault(version.number, found) == found

    @invariant()
    def the_latest_is_there(self) -> None:
        visible = self.catalog.visible()
        assert (self.catalog.latest in visible) if visible else (self.catalog.latest is None)

    @invariant()
    def only_what_is_to_be_kept_is_kept(self) -> None:
        free = set(self.catalog.visible()) - {pin.version for pin in self.catalog.pins} - {self.catalog.latest}
        assert len(free) <= self.catalog.keep

    @invariant()
    def replicas_have_holders(self) -> None:
        known = {holder.id for holder in self.catalog.holders}
        for _, each in self.all_parts:
            owners = [one.holder for one in each.replicas]
            assert set(owners) <= known and len(owners) == len(set(owners))

    @invariant()
    def publishers_are_open_stores(self) -> None:
        known = {holder.id for holder in self.catalog.holders}
        for _, each in self.all_parts:
            assert set(each.publishers) <= known or (each.accepted and each.publishers == (KEPT,))

    @invariant()
    def no_replica_is_superfluous(self) -> None:
        staying = {holder.id for holder in self.catalog.holders if self.catalog.stays(holder)}
        for version, each in self.all_parts:
            ours = [one for one in each.replicas if one.holder in staying]
            if len(ours) > version.replicas:
                hosts = {peer.host for peer in self.catalog.keeping(each)}
                assert len(hosts) < version.replicas and version.spread != "processes"

    @invariant()
    def stores_on_hosts_that_are_away_have_what_others_lack(self) -> None:
        """They stay in the catalogue only for parts that are not safe without them."""
        lacking = {
            one.holder
            for version, each in self.all_parts
            for one in each.replicas
            if not self.catalog.safe(version, each)
        }
        assert all(self.catalog.stays(each) or each.leaving or each.id in lacking for each in self.catalog.holders)
        assert set(self.catalog.away) <= {peer.host for peer in self.catalog.peers()}

    @invariant()
    def every_lack_is_a_holders_turn(self) -> None:
        for version, each in self.all_parts:
            found = candidates(self.catalog, version, each)
            keeping = self.catalog.keeping(each)
            hosts = {peer.host for peer in keeping}
            lacking, on_new_hosts = self.catalog.lacking(version, each)
            able = {
                one.id
                for one in self.catalog.holders
                if self.catalog.stays(one) and one.peer not in keeping and lacking
                if not all(self.catalog.is_away(replica.holder) for replica in each.replicas)
                if one.peer.host not in hosts or lacking > on_new_hosts
            }
            assert {holder.id for holder, _ in found} == able
            assert not able or min(turn for _, turn in found) == 0
            first_hosts = {holder.peer.host for holder, turn in found if turn == 0} - hosts
            assert len(first_hosts) >= min(lacking, len({holder.peer.host for holder, _ in found} - hosts))


TestCatalogue = Catalogue.TestCase
TestCatalogue.settings = settings(stateful_step_count=40)


def test_two_stores_of_one_process_are_one_process() -> None:
    catalog = announced(joined(HOLDERS[0], HOLDERS[4], HOLDERS[1]), HOLDERS[0].id, replicas=2)
    assert not list(transitions.missing(catalog, HOLDERS[4].id))
    catalog = copied(catalog, HOLDERS[4].id)
    assert catalog.visible() == ()
    assert copied(catalog, HOLDERS[1].id).visible() == (1,)


def test_a_version_that_is_not_there_says_why_and_one_that_is_published_anew_is_not_lost() -> None:
    pending = Version(5, 2, 2, None, False, (shard(HOLDERS[0], 5, 0, DIGEST),))
    catalog = Catalog(versions=(pending,), lost=(3,), pins=(Pin("p", 9, PEERS[0]),))
    begun = "0 of 2 parts are published, 1 more lack replicas"
    for number, why in ((5, begun), (3, "all its holders are gone"), (4, "nobody published")):
        with pytest.raises(NoSuchVersion, match=why):
            catalog.need(number)
    catalog = announced(transitions.join(Catalog(lost=(1, 2)), HOLDERS[0]), HOLDERS[0].id)
    assert catalog.visible() == (1,) and catalog.lost == (2,)
    gone = transitions.remove_dead_holders(catalog, {HOLDERS[0].peer})
    assert list(transitions.ended(catalog, gone, HOLDERS[1].id)) == [("lost", 1)]


def test_the_bytes_of_a_version_that_was_let_go_are_remembered_and_those_of_a_lost_one_forgotten() -> None:
    catalog = joined(*HOLDERS[:2])
    for number in (1, 2, 3):
        catalog = announced(catalog, HOLDERS[0].id, number)
    assert catalog.visible() == (2, 3)
    left = transitions.remove_dead_holders(catalog, {HOLDERS[0].peer})
    with pytest.raises(Mismatch, match="with other bytes and let go"):
        announced(left, HOLDERS[1].id, 1, digest=b"y" * 16)
    assert announced(left, HOLDERS[1].id, 2, digest=b"y" * 16).visible() == (2,)


def test_every_process_that_matters_is_watched() -> None:
    holder, pin, reader, retainer, proposer = (Peer("host", number, 7) for number in range(5))
    catalog = Catalog(
        holders=(Holder("h", holder),),
        pins=(Pin("p", 1, pin),),
        readers=(Reader("r", "", "", reader, switched=False),),
        retainers=(Retainer("d", retainer, 1),),
        switches=(SwitchRecord(1, "token", 1, (), None, 1.0, proposer),),
    )
    assert catalog.peers() == {holder, pin, reader, retainer, proposer}


def test_a_part_is_withdrawn_by_its_own_publisher_alone_and_stays_while_another_publishes_it() -> None:
    alone = announced(joined(*HOLDERS[:3]), HOLDERS[0].id, replicas=3)
    assert transitions.withdraw(alone, 2, 0, HOLDERS[0].id) == alone
    assert transitions.withdraw(alone, 1, 0, HOLDERS[1].id) == alone
    both = announced(alone, HOLDERS[1].id, replicas=3)
    left = transitions.withdraw(both, 1, 0, HOLDERS[0].id)
    assert left.versions[0].shards[0].publishers == (HOLDERS[1].id,)
    assert transitions.withdraw(left, 1, 0, HOLDERS[1].id).versions == ()
    with pytest.raises(Mismatch, match="was closed meanwhile"):
        announced(alone, HOLDERS[3].id, replicas=3)


def test_of_a_version_that_is_not_visible_the_parts_that_are_left_stay() -> None:
    catalog = joined(*HOLDERS[:3])
    for part in (0, 1):
        version = Version(1, 3, 2, None, False, ())
        catalog = transitions.announce(catalog, version, shard(HOLDERS[part], 1, part, DIGEST), 2)
    left = transitions.remove_dead_holders(catalog, {HOLDERS[0].peer})
    assert [each.part for each in left.versions[0].shards] == [1]
    assert list(transitions.ended(catalog, left, HOLDERS[2].id)) == []


# -- which holder packs which cast


KEEPERS = [Holder(name, Peer(f"host {name}", 100 + number, 1)) for number, name in enumerate("abc")]


def test_the_first_copies_of_many_parts_are_spread_over_the_holders_whatever_the_order_in_which_they_joined() -> None:
    def first_to_copy(holders: list[Holder], digest: bytes) -> str:
        catalog = announced(joined(*holders), "a", replicas=2, digest=digest)
        (version,) = catalog.versions
        return candidates(catalog, version, version.shards[0])[0][0].id

    digests = [bytes([number]) * 16 for number in range(16)]
    first = [first_to_copy(KEEPERS, each) for each in digests]
    assert {*first} == {"b", "c"} and first == [first_to_copy(KEEPERS[::-1], each) for each in digests]


@pytest.fixture
def catalog() -> Catalog:
    """Version 1, of which three holders have the only part."""
    found = copied(announced(joined(*KEEPERS), "a", replicas=3), "b", "c")
    assert found.latest == 1
    return found


def asked(catalog: Catalog, cast: str = "bf16") -> Catalog:
    return request_cast(catalog, 1, 0, DIGEST, cast)


def form(catalog: Catalog) -> CastForm:
    return catalog.shard(1, 0).cast("bf16")


def packed(maker: str) -> CastForm:
    return CastForm("bf16", maker, b"f" * 16, 400, Handle("shm", maker.encode(), 1000))


def test_one_holder_is_asked_once_and_only_for_what_is_there(catalog: Catalog) -> None:
    once = asked(catalog)
    assert form(once).maker in "abc" and form(once).handle is None
    assert asked(once) == once and form(asked(once, "fp8")) == form(once)
    (made,) = casts_of(once, form(once).maker, packed=False)
    assert made[2] == form(once)
    assert Catalog.decode(once.encode()) == once
    for number, part, digest in ((1, 0, b"other"), (2, 0, DIGEST), (1, 1, DIGEST)):
        assert request_cast(catalog, number, part, digest, "bf16") == catalog


def test_only_the_holder_that_was_asked_lists_a_form_until_it_is_withdrawn(catalog: Catalog) -> None:
    now = asked(catalog)
    maker = form(now).maker
    other = next(each for each in "abc" if each != maker)
    assert announce_cast(now, 1, 0, DIGEST, packed(other)) == now
    listed = announce_cast(now, 1, 0, DIGEST, packed(maker))
    assert form(listed) == packed(maker)
    assert [each[2] for each in casts_of(listed, maker, packed=True)] == [packed(maker)]
    assert announce_cast(listed, 1, 0, DIGEST, replace(packed(maker), digest=b"g")) == listed
    assert withdraw_cast(listed, 1, 0, form(now)) == listed
    assert withdraw_cast(now, 1, 0, form(now)) == withdraw_cast(listed, 1, 0, form(listed)) == catalog
    assert asked(withdraw_cast(listed, 1, 0, form(listed))) == now


def test_another_holder_packs_when_one_goes_and_a_form_goes_with_its_replica_and_version(catalog: Catalog) -> None:
    now = asked(catalog)
    maker = next(each for each in KEEPERS if each.id == form(now).maker)
    for left in (transitions.remove_dead_holders(now, {maker.peer}), transitions.leave(now, maker.id)):
        assert form(left).maker in {"a", "b", "c"} - {maker.id}
    listed = announce_cast(now, 1, 0, DIGEST, packed(maker.id))
    assert transitions.remove_dead_holders(listed, {maker.peer}).shard(1, 0).casts == ()
    assert form(transitions.leave(listed, maker.id)) == packed(maker.id)
    assert list(casts_of(transitions.delete(listed, 1), maker.id, packed=True)) == []
