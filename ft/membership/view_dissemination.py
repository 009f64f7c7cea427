"""Who tells whom of a new view: pure functions.

In a small job whoever has brought it about tells everybody. In a large one it tells those around it, and everybody who
learns of it those around itself, once: the news reaches all in about log N steps, whoever has died on the way.
"""

from __future__ import annotations

from holdfast.ft.membership.effects import Announce, Effect, ReadRegister
from holdfast.ft.membership.topology import Shape, host_mates, observers
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import ViewDelta, between, latest


def proclaimed(view: View, me: Member, spares: tuple[Member, ...], shape: Shape) -> tuple[Effect, ...]:
    """What `me` says, having brought `view` about: in a large job to those on its host, beside what it passes on."""
    mesh = shape.is_mesh(view)
    others = (*view.members, *spares) if mesh else host_mates(view, me)
    to = tuple(m for m in others if m.id != me.id)
    return (Announce(view, to, None if mesh else latest(view)),) if to else ()


def passed_on(
    view: View, old: View | None, teller: str, me: Member, spares: tuple[Member, ...], shape: Shape
) -> tuple[Effect, ...]:
    """What `me` says to its neighbours in a large job, having learnt from `teller` that `view` follows on `old`."""
    if shape.is_mesh(view):
        return ()
    around = observers(view, me, shape) if view.rank_of(me.id) is not None else ()
    to = tuple(m for m in (*around, *spares) if m.id != teller)
    change = between(old, view) if old is not None else None
    return (Announce(view, to, change),) if to else ()


def answered(view: View | None, member: Member, epoch: int, shape: Shape) -> tuple[Effect, ...]:
    """What follows when `member` shows that it is in `epoch`: tell it of the newest view, or ask for that."""
    if view is None or epoch > view.epoch:
        return (ReadRegister(epoch),)
    if epoch == view.epoch:
        return ()
    change: ViewDelta | None = None
    if epoch == view.epoch - 1 and not shape.is_mesh(view):
        change = latest(view)
    return (Announce(view, (member,), change),)
