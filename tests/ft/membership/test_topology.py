"""Large jobs: the neighbours of each member, how evidence accumulates, views as deltas, and the tree of the relay."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport.base import Peer
from holdfast.ft.membership.dissemination import Findings, announce_as_proposer, new_findings, reply_to_epoch, reports
from holdfast.ft.membership.events import (
    Announce,
    Cleared,
    Death,
    Event,
    ProvenDeaths,
    ReadRegister,
    Report,
    Suspicion,
    Unreachable,
)
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.state_machine import next_size, successors
from holdfast.ft.membership.topology import Shape, heads, host_mates, observers
from holdfast.ft.membership.view import Member, StepError, View, ViewDelta, apply_delta, delta_between
from holdfast.ft.node import messages, table_sharing
from holdfast.ft.node.rendezvous import encode
from holdfast.ft.ports import MemberLinks
from support import views
from support.event_loop import until

SPARSE = Shape(mesh=1)


def view_on(hosts: list[int], size: int | None = None) -> View:
    """A view with `hosts[i]` members on host i."""
    return views.view_of([f"h{host}" for host, count in enumerate(hosts) for _ in range(count)], 1, size=size)


def distances(view: View, neighbours: Callable[[Member], Iterable[Member]]) -> dict[str, int]:
    """The members that the first one reaches by way of neighbours, each with the number of steps to it."""
    found, todo = {"p0": 0}, deque([view.members[0]])
    while todo:
        here = todo.popleft()
        for other in neighbours(here):
            if other.id not in found:
                found[other.id] = found[here.id] + 1
                todo.append(other)
    return found


@given(st.lists(st.integers(1, 6), min_size=2, max_size=60))
def test_neighbours_are_on_other_hosts_and_know_each_other_and_any_members_announcement_reaches_all(
    hosts: list[int],
) -> None:
    view = view_on(hosts)
    for member in view.members:
        around = observers(view, member, SPARSE)
        assert around
        assert all(other.peer.host != member.peer.host for other in around)
        assert all(member in observers(view, other, SPARSE) for other in around)
    reached = distances(view, lambda member: (*observers(view, member, SPARSE), *host_mates(view, member)))
    assert len(reached) == len(view.members)


def test_each_member_of_a_small_job_observes_all_others_and_in_a_larger_one_all_agree_who_observes_whom() -> None:
    """Each process computes it on its own."""
    small = view_on([2, 2, 1])
    assert [m.id for m in observers(small, small.members[0], Shape())] == ["p2", "p3", "p4"]
    assert [m.id for m in host_mates(small, small.members[0])] == ["p1"]
    view = view_on([1] * 12)
    assert Shape(mesh=12).is_mesh(view) and not Shape(mesh=11).is_mesh(view)
    sparse = Shape(mesh=11, rings=2)
    found = {each.id: [other.id for other in observers(view, each, sparse)] for each in view.members}
    assert observers(view, views.member(12, "h0"), sparse) == view.members[1:4], "a spare is observed by the first ones"
    assert (found["p0"], found["p1"]) == (["p11", "p1", "p2"], ["p0", "p9", "p7"])


@pytest.mark.parametrize("large", [True, False])
def test_only_in_a_large_job_views_travel_as_differences(large: bool) -> None:
    shape = SPARSE if large else Shape()
    old = view_on([2, 2])
    view = structs.replace(old, epoch=old.epoch + 1, members=old.members[:3])
    change = delta_between(old, view)
    assert change is not None
    expected = change if large else None
    (announced,) = announce_as_proposer(view, view.members[0], (), shape)
    assert announced == Announce(view, view.members[1:2] if large else view.members[1:], expected)
    assert reply_to_epoch(view, old.members[1], old.epoch, shape) == (Announce(view, (old.members[1],), expected),)


def test_a_member_in_another_epoch_gets_the_newest_view_or_makes_the_register_be_read() -> None:
    view = structs.replace(view_on([2]), epoch=5)
    other = view.members[1]
    assert reply_to_epoch(view, other, 6, SPARSE) == (ReadRegister(6),)
    assert reply_to_epoch(None, other, 1, SPARSE) == (ReadRegister(1),)
    assert reply_to_epoch(view, other, 5, SPARSE) == ()
    assert reply_to_epoch(view, other, 3, SPARSE) == (Announce(view, (other,), None),)


def test_what_is_derived_from_a_view_is_computed_once_for_each_argument() -> None:
    view, computed = view_on([2]), list[int]()

    def result() -> int:
        computed.append(len(computed))
        return computed[-1]

    assert [view.remember("anything", of, result) for of in ("a", "a", "b")] == [0, 0, 1]


def test_the_number_of_neighbours_is_constant_and_paths_grow_slowly() -> None:
    steps = {}
    for hosts in (50, 800):
        view = view_on([8] * hosts)
        assert max(len(observers(view, m, Shape())) for m in view.members) <= 8
        distance = distances(view, lambda member, view=view: observers(view, member, Shape()))
        assert len(distance) == len(view.members)
        steps[hosts] = max(distance.values())
    assert steps[800] <= steps[50] + 5


@given(members=st.integers(1, 12), lost=st.sets(st.integers(0, 11)), turn=st.integers(0, 9))
def test_turns_cycle_through_all_living_members(members: int, lost: set[int], turn: int) -> None:
    view = view_on([1] * members)
    alive = [f"p{number}" for number in range(members) if number not in lost]
    first = turn * SPARSE.heads % max(1, len(alive))
    told = [m.id for m in heads(view, {f"p{number}" for number in lost}, SPARSE, turn)]
    assert told == (alive * 2)[first : first + min(len(alive), SPARSE.heads)]


@given(
    hosts=st.lists(st.integers(1, 4), min_size=2, max_size=6),
    dead=st.sets(st.integers(0, 23), max_size=6),
    spares=st.integers(0, 4),
    more=st.integers(0, 3),
)
def test_a_view_can_be_sent_as_a_delta(hosts: list[int], dead: set[int], spares: int, more: int) -> None:
    old = view_on(hosts, size=sum(hosts) + more)
    gone = {f"p{n}": "gone" for n in dead if n < len(old.members)}
    waiting = [Member(f"s{n}", f"h0:{900 + n}", Peer("h0", 900 + n, 1)) for n in range(spares)]
    next_up = successors(old, gone, waiting)
    assert len(next_up.members) == next_size(old, len(gone), spares)
    error = StepError(1, 0, "ValueError", "no", "x.py:1 in f") if spares else None
    new = View(2, "running", next_up.members, old.job, next_up.reason, stopped=bool(more), error=error)
    change = delta_between(old, new)
    assert change is not None
    assert ViewDelta.decode(change.encode()) == change
    again = apply_delta(structs.replace(old), change)
    assert again == new


def test_a_delta_of_another_view_is_refused() -> None:
    old = view_on([2, 2])
    with pytest.raises(CorruptData, match="does not follow"):
        apply_delta(old, ViewDelta(4, "running", (0,), (), (), "why"))
    for rank in (-1, 4):
        with pytest.raises(CorruptData, match="makes no view"):
            apply_delta(old, ViewDelta(2, "running", (rank,), (), (), "why"))
    swapped = structs.replace(old, epoch=2, members=old.members[::-1])
    assert delta_between(old, swapped) is None


def after(events: Iterable[Event], evidence: Evidence, shape: Shape, view: View) -> Evidence:
    """Apply events as the membership state machine does."""
    for event in events:
        match event:
            case Suspicion():
                evidence = evidence.with_suspicion(event, view, shape)
            case Cleared():
                evidence = evidence.with_clearance(event, view, shape)
            case ProvenDeaths(deaths):
                evidence = evidence.with_deaths(deaths, view, shape)
    return evidence


@pytest.mark.parametrize("shape", [Shape(), Shape(mesh=1, rings=1)], ids=["mesh", "ring"])
@given(data=st.data())
def test_evidence_gives_the_same_losses_in_any_order(shape: Shape, data: st.DataObject) -> None:
    view = view_on([2, 2, 2, 1])
    ids = [m.id for m in view.members]
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), max_size=20, unique=True))
    dead = data.draw(st.lists(st.sampled_from(ids), max_size=2, unique=True))
    words: list[Event] = [Suspicion(m, o, "silent", 1) for m, o in pairs if m != o]
    words += [ProvenDeaths((Death(who, "ended"),)) for who in dead]

    lost = after(words, Evidence(), shape, view).lost.keys()
    assert after(data.draw(st.permutations(words)), Evidence(), shape, view).lost.keys() == lost


def test_those_that_suspect_a_member_may_be_most_once_another_observer_is_lost() -> None:
    view, shape = view_on([1] * 7), Shape(mesh=1, rings=1)
    member = view.members[3]
    lost, other = observers(view, member, shape)
    evidence = after([Suspicion(member.id, other.id, "silent", 1)], Evidence(), shape, view)
    assert not evidence.lost, "one of two"
    said = [Suspicion(lost.id, each.id, "silent", 1) for each in observers(view, lost, shape)]
    assert after(said, evidence, shape, view).lost.keys() == {lost.id, member.id}


def test_a_member_that_the_job_goes_on_without_is_lost_and_its_death_not_proven_until_it_is() -> None:
    view, concluded = view_on([1, 1, 1]), Unreachable("p1", "most suspect it")
    evidence = Evidence().with_unreachable(concluded, view, Shape())
    assert evidence.lost == {"p1": "most suspect it"} and not evidence.proves(view)
    proven = evidence.with_deaths([Death("p1", "it has ended")], view, Shape())
    assert proven.lost == {"p1": "it has ended"} and proven.proves(view)
    for each in (evidence, proven):
        assert each.with_unreachable(concluded, view, Shape()) is each


def test_a_member_that_left_died_of_what_is_known_of_it_or_of_what_the_view_says() -> None:
    view = view_on([1, 1, 1])
    nothing, evidence = Evidence(), Evidence().with_deaths([Death("p1", "it was killed")], view, Shape())
    told = [nothing.deaths_of(view.members[1:], view), evidence.deaths_of(view.members[1:], view)]
    assert told == [
        (Death("p1", view.reason), Death("p2", view.reason)),
        (Death("p1", "it was killed"), Death("p2", view.reason)),
    ]


def test_a_late_report_does_not_count_in_the_next_view_either() -> None:
    view = view_on([1, 1, 1, 1])
    evidence = after([Suspicion("p0", each, "silent", 1) for each in ("p1", "p2")], Evidence(), Shape(), view)
    assert evidence.lost.keys() == {"p0"}
    evidence = evidence.with_clearance(Cleared("p0", "p2", 2), view, Shape())
    assert not evidence.lost
    later = structs.replace(view, epoch=2, members=view.members[:3])
    for known, now in ((evidence, view), (evidence.for_view(later, view.members[3:], Shape()), later)):
        for late in (1, 2):
            assert known.with_suspicion(Suspicion("p0", "p2", "silent", late), now, Shape()) is known


def test_one_suspicion_is_enough_against_a_spare() -> None:
    said = Suspicion("spare", "p1", "silent", 1)
    assert Evidence().with_suspicion(said, view_on([1, 1, 1]), Shape()).lost == {"spare": "silent"}


def test_a_suspicion_outlives_the_view_if_its_observer_stays() -> None:
    view, pairs = view_on([1, 1, 1, 1]), (("p0", "p1"), ("p0", "p3"), ("p1", "p3"))
    evidence = after([Suspicion(*pair, "silent", 1) for pair in pairs], Evidence(), Shape(), view)
    later = structs.replace(view, epoch=2, members=view.members[:3])
    assert evidence.for_view(later, view.members[3:], Shape()).suspected == {"p0": {"p1": "silent"}}


def test_an_impossible_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Shape(rings=0)


# -- what a member reports


HOSTS_OF_TWO = view_on([2, 2, 2])
MEMBERS = HOSTS_OF_TWO.members
ME = MEMBERS[1]
MESH, SPARSE = Shape(), Shape(mesh=1, rings=1)

someone = st.sampled_from([m.id for m in MEMBERS if m.id != ME.id] + ["spare"])
observer = st.sampled_from([ME.id, "p2", "p4"])
word = st.integers(0, 3)
reported = st.one_of(
    st.builds(Suspicion, someone, observer, st.just("silent"), word),
    st.builds(Cleared, someone, observer, word),
    st.builds(lambda ids: ProvenDeaths(tuple(Death(who, "ended") for who in ids)), st.lists(someone, max_size=3)),
)


@given(st.lists(reported, max_size=12), st.sampled_from([MESH, SPARSE]))
def test_a_member_reports_its_own_evidence_and_nothing_else(happened: list[Event], shape: Shape) -> None:
    evidence = Evidence()
    for event in happened:
        before, evidence = evidence, after([event], evidence, shape, HOSTS_OF_TWO)
        words = new_findings(event, ME, HOSTS_OF_TWO, evidence, before)

        here = {m.id for m in MEMBERS if m.peer.host == ME.peer.host}
        assert {death.id for death in words.deaths} == (evidence.dead.keys() - before.dead.keys()) & here

        mine = {who for who, against in evidence.suspected.items() if ME.id in against and who in HOSTS_OF_TWO.ranks}
        was_mine = {who for who, against in before.suspected.items() if ME.id in against and who in HOSTS_OF_TWO.ranks}
        doubted = {word.member for word in words.seen if isinstance(word, Suspicion)}
        cleared = {word.member for word in words.seen if isinstance(word, Cleared)}
        assert doubted == mine - was_mine
        assert cleared == {who for who in was_mine - mine if who not in evidence.dead}
        assert all(word.observer == ME.id and word.number > 0 for word in words.seen)


def test_in_a_large_job_the_first_members_that_nobody_doubts_get_a_report() -> None:
    said = Suspicion("p2", ME.id, "silent", 1)
    evidence = Evidence().with_deaths([Death("p0", "ended")], HOSTS_OF_TWO, SPARSE)
    found = reports(Findings((), (said,)), ME, HOSTS_OF_TWO, (), evidence, SPARSE, 0)
    assert found == (Report(said, (MEMBERS[3], MEMBERS[4])),)


def depths(view: View) -> list[int]:
    """The distance of each rank from rank 0 along the tree."""
    found = distances(
        view, lambda member: [view.members[n] for n in table_sharing.neighbour_ranks(view, view.ranks[member.id])]
    )
    return [found[member.id] for member in view.members]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_all_members_are_in_one_tree_and_the_first_neighbour_leads_to_rank_0(hosts: list[int]) -> None:
    view = view_on(hosts)
    size, depth = len(view.members), depths(view)
    edges = [(rank, other) for rank in range(size) for other in table_sharing.neighbour_ranks(view, rank)]
    assert set(edges) == {(other, rank) for rank, other in edges}, "neighbours know each other"
    assert len(edges) == 2 * (size - 1)
    for rank in range(1, size):
        assert depth[table_sharing.neighbour_ranks(view, rank)[0]] == depth[rank] - 1


def test_no_member_has_many_neighbours_and_none_is_far_and_a_small_job_on_one_host_meets_at_its_first() -> None:
    small = view_on([9])
    assert table_sharing.neighbour_ranks(small, 0) == tuple(range(1, 9))
    assert all(table_sharing.neighbour_ranks(small, rank) == (0,) for rank in range(1, 9))
    view = view_on([8] * 1000)
    assert max(len(table_sharing.neighbour_ranks(view, rank)) for rank in range(8000)) <= 2 * table_sharing.ARITY + 1
    assert max(depths(view)) <= 5


@given(st.lists(st.tuples(st.floats(0.0, 0.01), st.sampled_from([None, "a", "b"])), max_size=200))
def test_a_relay_passes_each_batch_once_to_each_other_neighbour_in_few_messages(
    given_batches: list[tuple[float, str | None]],
) -> None:
    relay: table_sharing.TreeRelay[int] = table_sharing.TreeRelay(["a", "b"], pauses=True)
    got: dict[str, list[int]] = {"a": [], "b": []}
    sent = {"a": 0, "b": 0}
    now = 1.0

    def send(until: float) -> None:
        nonlocal now
        while (at := relay.wake_at(now)) is not None and at <= until:
            now = at
            for neighbour, batches in relay.take(now):
                got[neighbour] += batches
                sent[neighbour] += 1
        now = max(now, until)

    for number, (gap, source) in enumerate(given_batches):
        send(now + gap)
        relay.add(number, source)
    lasted = now - 1.0
    send(now + 1.0)
    for neighbour in got:
        assert got[neighbour] == [n for n, (_, source) in enumerate(given_batches) if source != neighbour]
        assert sent[neighbour] <= 9 + lasted / table_sharing.LONGEST_PAUSE


def test_large_tables_travel_in_several_messages() -> None:
    items = {f"key {number}": bytes(1000) for number in range(2000)}
    parts = list(table_sharing.chunks(items))
    assert {key: value for part in parts for key, value in part.items()} == items
    assert len(parts) > 1
    assert all(sum(len(key) + len(value) for key, value in part.items()) <= table_sharing.CHUNK_BYTES for part in parts)
    assert list(table_sharing.chunks({"large": bytes(2 * table_sharing.CHUNK_BYTES)})) == [
        {"large": bytes(2 * table_sharing.CHUNK_BYTES)}
    ]


class FakeLinks(MemberLinks):
    """The members of a test, and the connections between them, some of which are broken for a time."""

    def __init__(self, me: str, members: dict[str, FakeLinks]) -> None:
        self.me, self._members = me, members
        self.sharing = table_sharing.TableSharing(me, asyncio.get_running_loop(), self)
        self._calls = self.sharing.handlers(self.call, 5.0)
        self.broken: set[str] = set()

    def notify(self, member_id: str, method: str, body: bytes) -> bool:
        if member_id in self.broken:
            return False
        share = messages.decode(method, body)
        assert isinstance(share, messages.Share)
        receive = self._members[member_id].sharing.received
        asyncio.get_running_loop().call_soon(receive, self.me, share.epoch, share.items)
        return True

    async def call(self, member: Member, method: str, body: bytes, timeout: float) -> bytes:
        await asyncio.sleep(0)  # after the notices before it
        return await self._members[member.id]._calls[method](self.me, body)


def members_of(view: View) -> dict[str, FakeLinks]:
    members: dict[str, FakeLinks] = {}
    for member in view.members:
        members[member.id] = FakeLinks(member.id, members)
    return members


@given(hosts=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 1000))
async def test_every_copy_gets_every_key_also_over_connections_that_break(hosts: list[int], seed: int) -> None:
    """Members install the view at different times; a connection that comes back brings what was lost."""
    dice = random.Random(seed)
    view = view_on(hosts)
    links = members_of(view)
    sharings = {name: each.sharing for name, each in links.items()}
    edges = [
        (view.members[rank].id, view.members[other].id)
        for rank in range(len(view.members))
        for other in table_sharing.neighbour_ranks(view, rank)
        if rank < other
    ]
    for one, other in dice.sample(edges, len(edges) // 3):
        links[one].broken.add(other)
        links[other].broken.add(one)
    order = [*view.members]
    dice.shuffle(order)
    for member in order:
        sharings[member.id].table.put(1, {f"of {member.id}": member.id.encode()})
        if dice.random() < 0.5:
            await asyncio.sleep(0)
        sharings[member.id].begin(view)
    await asyncio.sleep(0.01)
    for one, other in edges:
        if other in links[one].broken:
            links[one].broken.discard(other)
            links[other].broken.discard(one)
            sharings[one].linked(other)
            sharings[other].linked(one)
    expected = {f"of {member.id}": member.id.encode() for member in view.members}
    await until(lambda: all(sharing.table.items(1) == expected for sharing in sharings.values()))


@given(hosts=st.lists(st.integers(1, 12), min_size=1, max_size=6))
async def test_what_several_members_change_goes_up_to_the_first_copy_and_down_to_all(hosts: list[int]) -> None:
    view = view_on(hosts)
    async with asyncio.timeout(20.0):
        members = members_of(view)
        calls = [each._calls["kv.add"](each.me, encode((1, "key", 1))) for each in members.values()]
        counting = asyncio.gather(*calls)
        await asyncio.sleep(0)  # they come before the view
        for each in members.values():
            each.sharing.begin(view)
        assert sorted(map(msgspec.msgpack.decode, await counting)) == list(range(1, len(members) + 1))
        total = {"key": str(len(members)).encode()}
        await until(lambda: all(each.sharing.table.items(1) == total for each in members.values()))
