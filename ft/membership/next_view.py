"""Chooses the members of the next view from members, deaths and spares: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.ft.membership.view import Job, Member, View

MAX_NAMED_CHANGES = 8
"""The number of changes that a reason names one by one."""


@dataclass(frozen=True, slots=True)
class NextMembers:
    """The members of a next view in rank order, and the reason for them."""

    members: tuple[Member, ...]
    reason: str


def successors(view: View, gone: Mapping[str, str], spares: Sequence[Member]) -> NextMembers:
    """The members after those in `gone` (id -> evidence) are replaced.

    Survivors keep their order, a spare takes the rank of a dead member, ranks without a spare close up, and further
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
    if len(words) > MAX_NAMED_CHANGES:
        words[MAX_NAMED_CHANGES:] = [f"and {len(words) - MAX_NAMED_CHANGES} more changes"]
    return NextMembers(tuple(members), "; ".join(words))


def next_size(view: View, lost: int, waiting: int) -> int:
    """The number of members that `successors` returns for `lost` members and `waiting` spares."""
    alive, replaced = len(view.members) - lost, min(lost, waiting)
    return max(alive + replaced, min(view.job.size, alive + waiting))


def runnable_backends(
    backends: Sequence[str], usable: Sequence[str], one_host: frozenset[str], members: Sequence[Member]
) -> tuple[str, ...]:
    """Those of `backends`, in their order, that are usable here and work across the hosts of `members`."""
    spread = len({member.peer.host for member in members}) > 1
    return tuple(name for name in backends if name in usable and not (spread and name in one_host))


def with_chosen_backend(job: Job) -> Job:
    """The job with its backend chosen: the first one that every member can run."""
    return msgspec.structs.replace(job, backend=job.backends[0])
