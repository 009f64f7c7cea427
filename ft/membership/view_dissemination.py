"""Decides which members announce a new view to which: pure functions.

In a small job the proposer tells all members. In a large one it tells its neighbours, and each member that learns of
the view tells its own neighbours, once: the view reaches all members in about log N steps, although some may have died.
"""

from __future__ import annotations

from holdfast.ft.membership.effects import Announce, Effect, ReadRegister
from holdfast.ft.membership.topology import Shape, host_mates, observers
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import ViewDelta, delta_between, last_delta


def announce_as_proposer(view: View, me: Member, spares: tuple[Member, ...], shape: Shape) -> tuple[Effect, ...]:
    """The announcement of `view` by its proposer `me`: in a large job to its host, beside what it forwards."""
    mesh = shape.is_mesh(view)
    others = (*view.members, *spares) if mesh else host_mates(view, me)
    to = tuple(m for m in others if m.id != me.id)
    return (Announce(view, to, None if mesh else last_delta(view)),) if to else ()


def forward_view(
    view: View, old: View | None, teller: str, me: Member, spares: tuple[Member, ...], shape: Shape
) -> tuple[Effect, ...]:
    """In a large job, tell the neighbours of `me` about `view`, which `teller` announced and which follows `old`."""
    if shape.is_mesh(view):
        return ()
    around = observers(view, me, shape) if view.rank_of(me.id) is not None else ()
    to = tuple(m for m in (*around, *spares) if m.id != teller)
    change = delta_between(old, view) if old is not None else None
    return (Announce(view, to, change),) if to else ()


def reply_to_epoch(view: View | None, member: Member, epoch: int, shape: Shape) -> tuple[Effect, ...]:
    """The reply when `member` shows that it is in `epoch`: send it the newest view, or read the register."""
    if view is None or epoch > view.epoch:
        return (ReadRegister(epoch),)
    if epoch == view.epoch:
        return ()
    change: ViewDelta | None = None
    if epoch == view.epoch - 1 and not shape.is_mesh(view):
        change = last_delta(view)
    return (Announce(view, (member,), change),)
