"""A tree over the members of a view, to pass on what each says to all. Pure functions.

Hosts form a tree by their first members, in the order of the view; the members of a host hang below its first one, in a
tree again. Each member has at most `2 * ARITY` below it, and the depth grows with the logarithm of the members.
"""

from __future__ import annotations

from bisect import bisect_left

from holdfast.ft.membership.view import View

ARITY = 8


def neighbours(view: View, rank: int) -> tuple[int, ...]:
    """The ranks next to `rank` in the tree. The one above it is first; rank 0 has none above."""
    hosts = view.remember("relay hosts", view.members, lambda: _Hosts(view))
    name = view.members[rank].peer.host
    here = view.hosts[name]
    place = bisect_left(here, rank)
    host = hosts.places[name]
    found: list[int] = []
    if place:
        found.append(here[(place - 1) // ARITY])
    elif host:
        found.append(hosts.first[(host - 1) // ARITY])
    found += here[place * ARITY + 1 : place * ARITY + 1 + ARITY]
    if not place:
        found += hosts.first[host * ARITY + 1 : host * ARITY + 1 + ARITY]
    return tuple(found)


class _Hosts:
    """`first`: the first rank of each host, in order; `places`: the position of each host in it."""

    def __init__(self, view: View) -> None:
        order = sorted(view.hosts, key=lambda name: view.hosts[name][0])
        self.first = [view.hosts[name][0] for name in order]
        self.places = {name: place for place, name in enumerate(order)}
