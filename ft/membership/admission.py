"""Decides whether a process can join an existing job: pure functions of its job description and the newest view."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.ft.membership.next_view import runnable_backends
from holdfast.ft.membership.view import Job, Member, View


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
