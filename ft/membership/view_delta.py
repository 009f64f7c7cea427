"""The difference between a view and the next: the only part that members of a large job send each other.

A view of N members has O(N) bytes; the loss of a host changes a few ranks.
"""

from __future__ import annotations

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.view import Job, Member, Phase, StepError, View


class ViewDelta(msgspec.Struct, frozen=True):
    """The step from the view of epoch `epoch` - 1 to that of `epoch`.

    `gone` are ranks of the old view that are not filled again, `placed` the ranks that newcomers take over, and
    `joined` the newcomers that come last. `job` is None if it stays as it is. `stopped`, `error` and
    `degraded_from` are those of the new view.
    """

    epoch: int
    phase: Phase
    gone: tuple[int, ...]
    placed: tuple[tuple[int, Member], ...]
    joined: tuple[Member, ...]
    reason: str
    job: Job | None = None
    stopped: bool = False
    error: StepError | None = None
    degraded_from: int = 0

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> ViewDelta:
        """Raises `CorruptData` for anything that is not an encoded delta."""
        try:
            return _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"not a change of a view: {error}") from error


_CHANGE = "change"
"""The name under which a view keeps the delta that led to it."""

_decoder = msgspec.msgpack.Decoder(ViewDelta)


def last_delta(view: View) -> ViewDelta | None:
    """The delta that led to this view, if it is known here."""
    change = view.recall(_CHANGE)
    return change if isinstance(change, ViewDelta) else None


def delta_between(old: View, new: View) -> ViewDelta | None:
    """The delta from `old` to `new`.

    None if `new` is not the next view, or survivors have not kept their order.
    """
    if new.epoch != old.epoch + 1:
        return None
    return new.remember(_CHANGE, old.epoch, lambda: _work_out(old, new))


def _work_out(old: View, new: View) -> ViewDelta | None:
    gone: list[int] = []
    placed: list[tuple[int, Member]] = []
    at = 0
    for rank, member in enumerate(old.members):
        there = new.members[at] if at < len(new.members) else None
        if there is not None and there.id == member.id:
            at += 1
        elif member.id in new.ranks:
            return None
        elif there is not None and there.id not in old.ranks:
            placed.append((rank, there))
            at += 1
        else:
            gone.append(rank)
    joined = new.members[at:]
    job = None if new.job == old.job else new.job
    return ViewDelta(
        new.epoch,
        new.phase,
        tuple(gone),
        tuple(placed),
        joined,
        new.reason,
        job,
        new.stopped,
        new.error,
        new.degraded_from,
    )


def apply_delta(old: View, change: ViewDelta) -> View:
    """The view that `change` makes of `old`. Raises `CorruptData` if they do not belong together."""
    if change.epoch != old.epoch + 1:
        raise CorruptData(f"a change to epoch {change.epoch} does not follow epoch {old.epoch}")
    return old.remember("applied", change, lambda: _make(old, change))


def _make(old: View, change: ViewDelta) -> View:
    members: list[Member | None] = list(old.members)
    try:
        if any(rank < 0 for rank in (*change.gone, *(rank for rank, _ in change.placed))):
            raise ValueError("a rank is negative")
        for rank, member in change.placed:
            members[rank] = member
        for rank in change.gone:
            members[rank] = None
        kept = tuple(member for member in members if member is not None)
        job = old.job if change.job is None else change.job
        members_now = (*kept, *change.joined)
        new = View(
            change.epoch,
            change.phase,
            members_now,
            job,
            change.reason,
            change.stopped,
            change.error,
            change.degraded_from,
        )
    except (IndexError, ValueError) as error:
        raise CorruptData(f"a change to epoch {change.epoch} makes no view: {error}") from error
    new.remember(_CHANGE, old.epoch, lambda: change)
    return new
