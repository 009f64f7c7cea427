"""The catalogue's transitions in every order of events that hypothesis generates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.comms.errors import CorruptData, HoldfastError, StaleEpoch
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store import transitions
from holdfast.store.catalog import KEPT, Catalog, Holder, Pin, Replica, Shard, Version
from holdfast.store.errors import NoSuchVersion

PEERS = [Peer("host", 100 + number, 7) for number in range(4)]
HOLDERS = [Holder(f"holder{number}", PEERS[number % 4]) for number in range(5)]
"""The last one is a second store in the process of the first."""

holders = st.sampled_from(HOLDERS)
numbers = st.integers(0, 5)
parts = st.integers(0, 1)
digests = st.sampled_from([b"x" * 16, b"y" * 16])


def replica(holder: Holder, number: int, part: int, digest: bytes) -> Replica:
    return Replica(holder.id, Handle("shm", f"{holder.id} {number} {part} {digest!r}".encode(), 100))


def shard(holder: Holder, number: int, part: int, digest: bytes) -> Shard:
    return Shard(part, digest, 50, holder.id, (replica(holder, number, part, digest),))


class Catalogue(RuleBasedStateMachine):
    """Applies transitions in any order, as processes would, and checks the result."""

    catalog = Catalog()
    seen: dict[int, tuple[bytes, ...]]

    @initialize()
    def begin(self) -> None:
        self.catalog, self.seen = Catalog(), {}
        self.all_join()

    def apply(self, transition: Callable[[Catalog], Catalog], deadly: bool = False) -> bool:
        """Apply a transition; returns whether it was allowed.

        A refused one changes nothing. Pinned versions stay, unless the transition is deadly.
        """
        before, encoded = self.catalog, self.catalog.encode()
        try:
            after = transition(before)
        except HoldfastError:
            assert before.encode() == encoded
            return False
        self.became_visible(before, after)
        pinned = {pin.version for pin in after.pins}
        assert deadly or pinned & set(before.visible()) <= set(after.visible())
        self.catalog = after
        return True

    def became_visible(self, before: Catalog, after: Catalog) -> None:
        for version in after.versions:
            earlier = before.version(version.number)
            if version.visible and not (earlier is not None and earlier.visible):
                assert len(version.shards) == version.parts
                for each in version.shards:
                    assert len(after.keeping(each)) >= version.replicas

    @rule()
    def all_join(self) -> None:
        for holder in HOLDERS:
            self.apply(lambda now, holder=holder: transitions.join(now, holder))

    @rule(holder=holders, number=numbers, digest=digests)
    def publish_all_parts(self, holder: Holder, number: int, digest: bytes) -> None:
        for part in range(1 + number % 2):
            self.announce(holder, number, part, digest, None)

    @rule()
    def replicate_all_that_is_missing(self) -> None:
        for holder in self.catalog.holders:
            for version, lacking, _ in list(transitions.missing(self.catalog, holder.id)):
                self.replicate_something_else(holder, version.number, lacking.part, lacking.digest)

    @rule(holder=holders)
    def join(self, holder: Holder) -> None:
        self.apply(lambda now: transitions.join(now, holder))

    @rule(holder=holders, number=numbers, part=parts, digest=digests, fence=st.none() | st.integers(0, 3))
    def announce_a_part(self, holder: Holder, number: int, part: int, digest: bytes, fence: int | None) -> None:
        self.announce(holder, number, part, digest, fence)

    def announce(self, holder: Holder, number: int, part: int, digest: bytes, fence: int | None) -> None:
        if self.catalog.holder(holder.id) is None:
            return
        old = self.catalog.fence

        def transition(now: Catalog) -> Catalog:
            new = shard(holder, number, part, digest)
            return transitions.announce(now, number, new, parts=1 + number % 2, replicas=2, keep=2, fence=fence)

        if part > number % 2:
            return
        known = self.catalog.shard(number, part)
        allowed = self.apply(transition)
        if known is not None and known.digest != digest:
            assert not allowed or self.catalog.fence != old, "unless a later epoch swept it away"
        if fence is not None and old is not None and fence < old:
            assert not allowed
        if allowed:
            assert transition(self.catalog) == self.catalog or self.catalog.shard(number, part) is None

    @rule(data=st.data(), holder=holders)
    def replicate_what_is_missing(self, data: st.DataObject, holder: Holder) -> None:
        todo = list(transitions.missing(self.catalog, holder.id))
        if not todo:
            return
        version, lacking, _ = data.draw(st.sampled_from(todo))
        made = replica(holder, version.number, lacking.part, lacking.digest)

        def transition(now: Catalog) -> Catalog:
            return transitions.replicated(now, version.number, lacking.part, lacking.digest, made)

        self.apply(transition)
        assert transition(self.catalog) == self.catalog

    @rule(holder=holders, number=numbers, part=parts, digest=digests)
    def replicate_something_else(self, holder: Holder, number: int, part: int, digest: bytes) -> None:
        made = replica(holder, number, part, digest)
        self.apply(lambda now: transitions.replicated(now, number, part, digest, made))

    @rule(holder=holders, number=numbers, part=parts)
    def withdraw(self, holder: Holder, number: int, part: int) -> None:
        visible, accepted = self.catalog.visible(), self.accepted()
        self.apply(lambda now: transitions.withdraw(now, number, part, holder.id))
        assert self.catalog.visible() == visible and self.accepted() == accepted

    @rule(peer=st.sampled_from(PEERS))
    def bury(self, peer: Peer) -> None:
        self.apply(lambda now: transitions.bury(now, {peer}), deadly=True)
        assert peer not in self.catalog.peers()
        assert transitions.bury(self.catalog, {peer}) == self.catalog
        self.forget_lost()

    @rule(holder=holders)
    def leave_and_depart(self, holder: Holder) -> None:
        self.leave(holder)
        kept = self.accepted(without=holder.id)
        safe, visible = transitions.may_depart(self.catalog, holder.id), self.catalog.visible()
        others = [each for each in self.catalog.holders if each.id != holder.id and not each.leaving]
        self.apply(lambda now: transitions.depart(now, holder.id), deadly=True)
        if safe and others:
            assert self.catalog.visible() == visible
        assert kept <= self.accepted(), "what is published outlives its closed publisher"
        self.forget_lost()
        assert not any(holder.id in each.publishers for version in self.catalog.versions for each in version.shards)

    def accepted(self, without: str = "") -> set[tuple[int, int, bytes]]:
        """Published parts of versions, if another store has a replica of each of their parts."""
        return {
            (version.number, each.part, each.digest)
            for version in self.catalog.versions
            for each in version.shards
            if each.accepted
            and not version.visible
            and all(any(one.holder != without for one in other.replicas) for other in version.shards)
        }

    @rule(holder=holders)
    def close_and_die(self, holder: Holder) -> None:
        """A closed store hands over its published parts before its process dies."""
        self.leave(holder)
        closed = self.accepted(without=holder.id)
        closed = {each for each in closed if (known := self.catalog.shard(*each[:2])) and known.publisher == KEPT}
        before, gone = self.catalog, {each.id for each in self.catalog.holders if each.peer == holder.peer}
        self.apply(lambda now: transitions.bury(now, {holder.peer}), deadly=True)
        for number, part, digest in closed:
            version, known = before.version(number), self.catalog.shard(number, part)
            assert version is not None
            if all(any(one.holder not in gone for one in each.replicas) for each in version.shards):
                assert known is not None and known.digest == digest
        self.forget_lost()

    @rule(holder=holders)
    def leave(self, holder: Holder) -> None:
        accepted = self.accepted()
        self.apply(lambda now: transitions.leave(now, holder.id))
        assert accepted <= self.accepted(), "what is published stays when its store begins to close"

    @rule(holder=holders, number=numbers, part=parts)
    def drop_replica(self, holder: Holder, number: int, part: int) -> None:
        visible = self.catalog.visible()
        self.apply(lambda now: transitions.drop_replica(now, number, part, holder.id))
        assert self.catalog.visible() == visible

    @rule(holder=holders)
    def disown_all(self, holder: Holder) -> None:
        self.apply(lambda now: transitions.disown(now, holder.id, ()), deadly=True)
        assert transitions.disown(self.catalog, holder.id, ()) == self.catalog
        self.forget_lost()

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
        assert self.apply(lambda now: transitions.delete(now, number)) == (there and not pinned)
        if there and not pinned:
            self.seen.pop(number, None)

    def forget_lost(self) -> None:
        """A version without replicas may be published anew."""
        for number in self.catalog.lost:
            if self.catalog.version(number) is None:
                self.seen.pop(number, None)

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
    def a_visible_version_is_whole_and_can_be_read(self) -> None:
        for version in self.catalog.versions:
            if version.visible:
                assert len(version.shards) == version.parts
                assert all(each.replicas for each in version.shards)

    @invariant()
    def a_visible_version_never_changes(self) -> None:
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
        for version in self.catalog.versions:
            for each in version.shards:
                owners = [one.holder for one in each.replicas]
                assert set(owners) <= known and len(owners) == len(set(owners))

    @invariant()
    def every_lack_has_somebody_whose_turn_it_is(self) -> None:
        for version in self.catalog.versions:
            for each in version.shards:
                keeping = self.catalog.keeping(each)
                able = [one for one in self.catalog.holders if not one.leaving and one.peer not in keeping]
                if len(keeping) >= version.replicas or not able or not each.replicas:
                    continue
                turns = [
                    turn
                    for one in able
                    for lacking, part, turn in transitions.missing(self.catalog, one.id)
                    if (lacking.number, part.part) == (version.number, each.part)
                ]
                assert min(turns) == 0


TestCatalogue = Catalogue.TestCase
TestCatalogue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_fences_only_go_forward() -> None:
    catalog = transitions.join(Catalog(), HOLDERS[0])
    terms = {"parts": 1, "replicas": 1, "keep": 2}
    catalog = transitions.announce(catalog, 1, shard(HOLDERS[0], 1, 0, b"x" * 16), fence=3, **terms)
    with pytest.raises(StaleEpoch):
        transitions.announce(catalog, 2, shard(HOLDERS[0], 2, 0, b"x" * 16), fence=2, **terms)
    catalog = transitions.announce(catalog, 2, shard(HOLDERS[0], 2, 0, b"x" * 16), fence=None, **terms)
    assert catalog.fence == 3 and catalog.visible() == (1, 2)


def test_two_stores_of_one_process_are_one_process() -> None:
    catalog = Catalog()
    for holder in (HOLDERS[0], HOLDERS[4], HOLDERS[1]):
        catalog = transitions.join(catalog, holder)
    first = shard(HOLDERS[0], 1, 0, b"x" * 16)
    catalog = transitions.announce(catalog, 1, first, parts=1, replicas=2, keep=2, fence=None)
    assert not list(transitions.missing(catalog, HOLDERS[4].id))
    catalog = transitions.replicated(catalog, 1, 0, b"x" * 16, replica(HOLDERS[4], 1, 0, b"x" * 16))
    assert catalog.visible() == ()
    catalog = transitions.replicated(catalog, 1, 0, b"x" * 16, replica(HOLDERS[1], 1, 0, b"x" * 16))
    assert catalog.visible() == (1,)


def test_a_version_that_was_lost_and_published_anew_is_not_lost() -> None:
    catalog = transitions.join(Catalog(lost=(1, 2)), HOLDERS[0])
    first = shard(HOLDERS[0], 1, 0, b"x" * 16)
    catalog = transitions.announce(catalog, 1, first, parts=1, replicas=1, keep=2, fence=None)
    assert catalog.visible() == (1,) and catalog.lost == (2,)
    gone = transitions.bury(catalog, {HOLDERS[0].peer})
    assert list(transitions.ended(catalog, gone, HOLDERS[1].id)) == [("lost", 1)]


def test_a_version_that_is_not_there_says_why() -> None:
    pending = Version(5, 2, 2, None, False, ())
    catalog = Catalog(versions=(pending,), lost=(3,), pins=(Pin("p", 9, PEERS[0]),))
    for number, why in ((5, "0 of 2 parts"), (3, "all its holders are gone"), (4, "nobody published")):
        with pytest.raises(NoSuchVersion, match=why):
            catalog.need(number)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x93\x01\xa1x\x03", Catalog(layout=2).encode()])
def test_a_malformed_catalogue_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptData):
        Catalog.decode(data)
