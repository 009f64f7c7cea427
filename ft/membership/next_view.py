"""Chooses the members of the next view, and decides whether a process can join a job: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


def refusal_reason(me: Member, mine: Job, one_host: frozenset[str], view: View | None) -> str | None:
    """Why the process `me` can never join the job; None if it can, or is in `view`.

    It would found the job as `mine`. `one_host` are those of its backends that need all members on one host.
    """
    if view is None:
        return None if mine.backends else "this process can run no backend"
    if view.rank_of(me.id) is not None:
        return None
    conflict = mine.conflict(view.job)
    if conflict is not None:
        return conflict
    loopback = loopback_refusal_reason(me, view)
    if loopback is not None:
        return loopback
    own, theirs = ", ".join(mine.backends) or "none", ", ".join(view.job.backends)
    if view.phase == "forming" and not runnable_backends(
        view.job.backends, mine.backends, one_host, (*view.members, me)
    ):
        return f"no backend suits all: the members so far can run {theirs}, this process {own}"
    if view.job.backend and view.job.backend not in mine.backends:
        return f"the job runs on {view.job.backend}, which this process cannot run; it can run {own}"
    return host_refusal_reason(me.peer.host, one_host, view)


def host_refusal_reason(host: str, one_host: Collection[str], view: View) -> str | None:
    """Why processes on `host` cannot join the running `view`; None if they can.

    They cannot if its backend is one of `one_host`, which need all members on one host, and its members are elsewhere.
    """
    if view.phase != "running" or view.job.backend not in one_host or host in view.hosts:
        return None
    return (
        f"the job runs on {view.job.backend}, which needs all members on one host: "
        f"they are on {', '.join(view.hosts)}, this process is on {host}"
    )


def loopback_refusal_reason(me: Member, view: View) -> str | None:
    """Why `me` and the members of `view` cannot reach each other: one listens on loopback, on another machine.

    None if they can. A host that is simulated on this machine (the third part of its name) is reached by loopback.
    """
    machine = _machine(me.peer.host)
    strangers = [view.members[ranks[0]] for host, ranks in view.hosts.items() if _machine(host) != machine]
    if strangers and _on_loopback(me):
        return (
            f"this process listens on {me.address}, and the job has members on another host, which cannot reach it: "
            "choose an address by HOLDFAST_INTERFACE or interface="
        )
    hidden = next((member for member in strangers if _on_loopback(member)), None)
    if hidden is None:
        return None
    return (
        f"member {hidden.id} on another host listens on {hidden.address}, where this process cannot reach it: choose "
        "an address on that host by HOLDFAST_INTERFACE or interface="
    )


def _machine(host: str) -> list[str]:
    return host.split("/")[:2]


def _on_loopback(member: Member) -> bool:
    return member.address.startswith(("127.", "[::1]"))
