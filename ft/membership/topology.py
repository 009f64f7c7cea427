"""Decides which members are connected, watch each other, and propose: pure functions of a view.

Up to `Shape.mesh` members each member knows all others. In larger jobs a member knows those on its own host and, on
other hosts, its neighbours on a few rings. Each ring has all hosts in an order of its own that looks random; two hosts
that follow each other on a ring connect their members in pairs, shifted by one from ring to ring. Such a graph is an
expander: a few connections per member, about log N steps between any two, and it stays connected when many members
fail. It changes only around members that join or leave. The neighbours of a member are also its observers, as in Rapid
(Suresh et al., "Stable and Consistent Membership at Scale with Rapid", ATC 2018).

The heads are the first few living members: evidence is reported to them, and they propose.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import islice

from holdfast.ft.membership.view import MESH, Member, View

_PRIME = (1 << 61) - 1
_FACTORS = (0x1D8E4E27C47D124F, 0x0EB44ACCAB455D16, 0x1B873593CC9E2D51)


@dataclass(frozen=True, slots=True)
class Shape:
    """`mesh`: the largest number of members at which each knows all others.

    `rings`: the rings, above that, on each of which a member has two neighbours. `heads`: the number of members that
    get evidence first.
    """

    mesh: int = MESH
    rings: int = 4
    heads: int = 3

    def __post_init__(self) -> None:
        if self.mesh < 1 or self.rings < 1 or self.heads < 1:
            raise ValueError(f"{self}: mesh, rings and heads must each be at least 1")

    def is_mesh(self, view: View) -> bool:
        return len(view.members) <= self.mesh


def host_mates(view: View, member: Member) -> tuple[Member, ...]:
    """The other members on the host of `member`, which need not be in the view."""
    ranks = view.hosts.get(member.peer.host, ())
    return tuple(view.members[rank] for rank in ranks if view.members[rank].id != member.id)


def observers(view: View, member: Member, shape: Shape) -> tuple[Member, ...]:
    """The members on other hosts that watch `member`, and that it watches in turn.

    For a process that is not in the view: the first members on other hosts.
    """
    if shape.is_mesh(view):
        return tuple(m for m in view.members if m.peer.host != member.peer.host)
    if view.rank_of(member.id) is None:
        return tuple(islice((m for m in view.members if m.peer.host != member.peer.host), shape.heads))
    return _neighbours(view, member, shape.rings)


def can_fail_by_suspicion(view: View, member: Member) -> bool:
    """Whether the observers of `member` may find that it failed.

    With two hosts, all observers of one are on the other. So only the host with most of the members may find that of
    the other or, of two halves, the one with the first member: the other may be the smaller side of a partition.
    """
    if len(view.hosts) != 2:
        return True
    there = len(view.hosts[member.peer.host])
    if 2 * there != len(view.members):
        return 2 * there < len(view.members)
    return view.members[0].peer.host != member.peer.host


def heads(view: View, lost: Container[str], shape: Shape, turn: int = 0) -> tuple[Member, ...]:
    """The members that get evidence: the first living ones; in the next `turn` those after them, cyclically."""
    first = turn * shape.heads
    alive = list(islice((m for m in view.members if m.id not in lost), first + shape.heads))
    if len(alive) < first + shape.heads:
        first %= max(1, len(alive))
    return tuple((alive[first:] + alive[:first])[: shape.heads])


def _neighbours(view: View, member: Member, rings: int) -> tuple[Member, ...]:
    """The neighbours of `member` on other hosts, each once; computed for all members of its host at a time."""
    host = member.peer.host
    found = view.remember(f"{rings} rings around {host}", view.members, lambda: _around(view, host, rings))
    return found[member.id]


def _around(view: View, host: str, rings: int) -> dict[str, tuple[Member, ...]]:
    """The neighbours of every member of a host.

    On each ring a host has one host after it and one before it. Pair i of two hosts is member i of one and member i +
    ring of the other, each modulo its number of members, for as many pairs as the larger host has members.
    """
    members, here = view.members, view.hosts[host]
    met: list[dict[int, None]] = [{} for _ in here]
    for ring, (order, places) in enumerate(_rings(view, rings)):
        place = places[host]
        after, before = order[(place + 1) % len(order)], order[place - 1]
        if after != host:
            there = view.hosts[after]
            for pair in range(max(len(here), len(there))):
                met[pair % len(here)][there[(pair + ring) % len(there)]] = None
        if before != host:
            there = view.hosts[before]
            for pair in range(max(len(here), len(there))):
                met[(pair + ring) % len(here)][there[pair % len(there)]] = None
    return {members[rank].id: tuple(members[other] for other in met[slot]) for slot, rank in enumerate(here)}


def _rings(view: View, rings: int) -> tuple[tuple[list[str], dict[str, int]], ...]:
    """For each ring, its hosts in order, and the position of each."""

    def work_out() -> tuple[tuple[list[str], dict[str, int]], ...]:
        hosts = [(int.from_bytes(host.encode(), "big"), host) for host in view.hosts]
        made = []
        for ring in range(rings):
            order = [host for _, host in sorted((_mix(number, ring), host) for number, host in hosts)]
            made.append((order, {host: place for place, host in enumerate(order)}))
        return tuple(made)

    return view.remember(f"{rings} rings", view.members, work_out)


def _mix(number: int, ring: int) -> int:
    """A number that looks random, the same in every process (unlike `hash`)."""
    mixed = (number % _PRIME + ring + 1) * _FACTORS[0] % _PRIME
    mixed ^= mixed >> 31
    mixed = mixed * (_FACTORS[1] + 2 * ring) % _PRIME
    mixed ^= mixed >> 29
    return mixed * _FACTORS[2] % _PRIME
