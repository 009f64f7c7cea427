"""Members pass on what each says to all along a tree; the relay does it in few messages."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.transport.base import Peer
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.node import messages
from holdfast.ft.node.rendezvous import encode
from holdfast.ft.node.table_sharing import (
    ARITY,
    CHUNK_BYTES,
    LONGEST_PAUSE,
    TableCalls,
    TableSharing,
    TreeRelay,
    chunks,
    neighbour_ranks,
)
from holdfast.ft.ports import MemberLinks

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def view_of(hosts: list[int], epoch: int = 1) -> View:
    """A view with `hosts[i]` members on host i."""
    names = [f"h{host}" for host, count in enumerate(hosts) for _ in range(count)]
    members = tuple(Member(f"p{rank}", f"{host}:{rank}", Peer(host, rank, 1)) for rank, host in enumerate(names))
    return View(epoch, "running", members, Job("job", len(members), 1, len(members), ("gloo",), "gloo"), "test")


def depths(view: View) -> dict[int, int]:
    """The ranks that rank 0 reaches along the tree, with their distances."""
    found, todo = {0: 0}, deque([0])
    while todo:
        rank = todo.popleft()
        for other in neighbour_ranks(view, rank):
            if other not in found:
                found[other] = found[rank] + 1
                todo.append(other)
    return found


@given(SIZES)
def test_all_members_are_in_one_tree(hosts: list[int]) -> None:
    view = view_of(hosts)
    size = len(view.members)
    edges = [(rank, other) for rank in range(size) for other in neighbour_ranks(view, rank)]
    assert set(edges) == {(other, rank) for rank, other in edges}, "neighbours know each other"
    assert len(edges) == 2 * (size - 1)
    assert depths(view).keys() == set(range(size))


@given(SIZES)
def test_the_first_neighbour_leads_to_rank_0(hosts: list[int]) -> None:
    view = view_of(hosts)
    depth = depths(view)
    for rank in range(1, len(view.members)):
        assert depth[neighbour_ranks(view, rank)[0]] == depth[rank] - 1


def test_no_member_has_many_neighbours_and_none_is_far() -> None:
    view = view_of([8] * 1000)
    assert max(len(neighbour_ranks(view, rank)) for rank in range(8000)) <= 2 * ARITY + 1
    assert max(depths(view).values()) <= 5


def test_a_small_job_on_one_host_meets_at_its_first_member() -> None:
    view = view_of([9])
    assert neighbour_ranks(view, 0) == tuple(range(1, 9))
    assert all(neighbour_ranks(view, rank) == (0,) for rank in range(1, 9))


@given(st.lists(st.tuples(st.floats(0.0, 0.01), st.sampled_from([None, "a", "b"])), max_size=200))
def test_a_relay_passes_each_batch_once_to_each_other_neighbour_in_few_messages(
    given_batches: list[tuple[float, str | None]],
) -> None:
    relay: TreeRelay[int] = TreeRelay(["a", "b"], pauses=True)
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
        assert sent[neighbour] <= 9 + lasted / LONGEST_PAUSE


def test_large_tables_travel_in_several_messages() -> None:
    items = {f"key {number}": bytes(1000) for number in range(2000)}
    parts = list(chunks(items))
    assert {key: value for part in parts for key, value in part.items()} == items
    assert len(parts) > 1
    assert all(sum(len(key) + len(value) for key, value in part.items()) <= CHUNK_BYTES for part in parts)
    assert list(chunks({"large": bytes(2 * CHUNK_BYTES)})) == [{"large": bytes(2 * CHUNK_BYTES)}]


class FakeLinks(MemberLinks):
    """The members of a test, and the connections between them, some of which are broken for a time."""

    def __init__(self, me: str, members: dict[str, FakeLinks]) -> None:
        self.me, self._members = me, members
        self.sharing = TableSharing(me, asyncio.get_running_loop(), self)
        calls = TableCalls(self.sharing, self.call, 5.0)
        self._calls = calls.handlers()
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
def test_every_copy_gets_every_key_also_over_connections_that_break(hosts: list[int], seed: int) -> None:
    """Members install the view at different times; a connection that comes back brings what was lost."""
    dice = random.Random(seed)
    view = view_of(hosts)

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        links = members_of(view)
        sharings = {name: each.sharing for name, each in links.items()}
        edges = [
            (view.members[rank].id, view.members[other].id)
            for rank in range(len(view.members))
            for other in neighbour_ranks(view, rank)
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
        deadline = loop.time() + 20.0
        expected = {f"of {member.id}": member.id.encode() for member in view.members}
        while any(sharing.table.items(1) != expected for sharing in sharings.values()):
            assert loop.time() < deadline, "a copy lacks keys"
            await asyncio.sleep(0.005)

    asyncio.run(whole())


@given(hosts=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_deleted_key_is_in_no_copy_and_what_is_set_after_it_stays(hosts: list[int], seed: int) -> None:
    """Each step is done by any member; the key is deleted while its value may still be on the way to some copies."""
    dice = random.Random(seed)
    view = view_of(hosts)

    async def whole() -> None:
        members = members_of(view)
        for each in members.values():
            each.sharing.begin(view)

        async def present_in(each: FakeLinks) -> None:
            while not each.sharing.table.check(1, ["key"]):
                await asyncio.sleep(0)

        for value in (b"v1", b"v2", b"v3"):
            setter, deleter = dice.choices([*members.values()], k=2)
            setter.sharing.table.put(1, {"key": value})
            await asyncio.sleep(0)  # as another thread's call would, the deletion comes to the loop after the change
            await present_in(deleter)
            request = encode((1, "key"))
            assert encode(True) == await deleter._calls["kv.delete"](deleter.me, request)
            assert not any(each.sharing.table.check(1, ["key"]) for each in members.values())
        last = dice.choice([*members.values()])
        last.sharing.table.put(1, {"key": b"last"})
        for each in members.values():
            await present_in(each)
            assert each.sharing.table.items(1) == {"key": b"last"}

    asyncio.run(whole())
