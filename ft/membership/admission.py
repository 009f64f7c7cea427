"""Whether a process can be in a job that is there: pure functions of what it brings and of the newest view."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.ft.membership.next_view import runnable
from holdfast.ft.membership.view import Job, Member, View


def refusal(me: Member, mine: Job, one_host: frozenset[str], view: View | None) -> str | None:
    """Why the process `me`, which would found the job as `mine`, can never be in it; None if it can, or is in `view`.

    `one_host` are those of its backends that need all members on one host.
    """
    if view is None:
        return None if mine.backends else "this process can run no backend"
    if view.rank_of(me.id) is not None:
        return None
    conflict = mine.conflict(view.job)
    if conflict is not None:
        return conflict
    own, theirs = ", ".join(mine.backends) or "none", ", ".join(view.job.backends)
    if view.phase == "forming" and not runnable(view.job.backends, mine.backends, one_host, (*view.members, me)):
        return f"no backend suits all: the members so far can run {theirs}, this process {own}"
    if view.job.backend and view.job.backend not in mine.backends:
        return f"the job runs on {view.job.backend}, which this process cannot run; it can run {own}"
    return too_far(me.peer.host, one_host, view)


def too_far(host: str, one_host: Collection[str], view: View) -> str | None:
    """Why nobody on `host` can come into the running `view`, if its backend is one of those that need all members on
    one host; None if somebody can.
    """
    if view.phase != "running" or view.job.backend not in one_host or host in view.hosts:
        return None
    return (
        f"the job runs on {view.job.backend}, which needs all members on one host: "
        f"they are on {', '.join(view.hosts)}, this process is on {host}"
    )
