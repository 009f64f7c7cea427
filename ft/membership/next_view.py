"""Who is in the next view: pure functions from members, deaths and spares to members and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.ft.membership.view import Job, Member, View

SPELT_OUT = 8
"""How many changes a reason names one by one."""


@dataclass(frozen=True, slots=True)
class Composition:
    """The members of a next view in rank order, and why."""

    members: tuple[Member, ...]
    reason: str


def successors(view: View, gone: Mapping[str, str], spares: Sequence[Member]) -> Composition:
    """The members after those in `gone` (id -> evidence) are replaced.

    Survivors keep their order, a spare takes a dead rank's place, ranks without one close up, and further
    spares come last as long as the job wants more members.
    """
    waiting = [spare for spare in spares if spare.id not in gone]
    members: list[Member] = []
    words: list[str] = []
    for rank, member in enumerate(view.members):
        if member.id not in gone:
            members.append(member)
            continue
        lost = f"rank {rank} ({member.id}) is gone: {gone[member.id]}"
        if waiting:
            members.append(waiting.pop(0))
            words.append(f"{lost}; spare {members[-1].id} takes its place")
        else:
            words.append(f"{lost}; no spare")
    while waiting and len(members) < view.job.size:
        members.append(waiting.pop(0))
        words.append(f"{members[-1].id} joins as rank {len(members) - 1}")
    if len(words) > SPELT_OUT:
        words[SPELT_OUT:] = [f"and {len(words) - SPELT_OUT} more changes"]
    return Composition(tuple(members), "; ".join(words))


def next_size(view: View, lost: int, waiting: int) -> int:
    """How many members `successors` gives, of so many lost members and waiting spares."""
    alive, replaced = len(view.members) - lost, min(lost, waiting)
    return max(alive + replaced, min(view.job.size, alive + waiting))


def runnable(
    backends: Sequence[str], usable: Sequence[str], one_host: frozenset[str], members: Sequence[Member]
) -> tuple[str, ...]:
    """Those of `backends`, in their order, that are usable here and suit where the members are."""
    spread = len({member.peer.host for member in members}) > 1
    return tuple(name for name in backends if name in usable and not (spread and name in one_host))


def formed(job: Job) -> Job:
    """The job with its backend chosen: the first that every member can run."""
    return msgspec.structs.replace(job, backend=job.backends[0])
