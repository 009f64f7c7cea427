"""Members and views for tests, and the context of a detector without a runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.comms.transport.base import Peer
from holdfast.ft.detectors.detector import DetectorContext
from holdfast.ft.detectors.process_watch import HostProcesses
from holdfast.ft.membership.view import Job, Member, Phase, Timeouts, View
from holdfast.ft.ports import OpPosition

TIMES = Timeouts(heartbeat=0.1, suspect=0.5, operation=5.0, rebuild=5.0, join=5.0)


def member(index: int, host: str = "h") -> Member:
    return Member(f"p{index}", f"{host}:{1000 + index}", Peer(host, 100 + index, index))


def view_of(hosts: Sequence[str], epoch: int = 3, phase: Phase = "running", size: int | None = None) -> View:
    """A view with a member p0, p1, ... on each of these hosts, of a job over gloo of that size unless given."""
    job = Job("job", size or len(hosts), 1, len(hosts), ("gloo",), "gloo")
    return View(epoch, phase, tuple(member(rank, host) for rank, host in enumerate(hosts)), job, "test")


def detector_context(me: Member, loop: Any, **fields: Any) -> DetectorContext:
    """A context of which the callbacks do nothing, but for those that are given."""

    def ignore(*_: object) -> None: ...

    callbacks = dict.fromkeys(("tell", "stop", "resign", "note"), ignore)
    usual: dict[str, Any] = {
        "me": me,
        "timeouts": TIMES,
        "loop": loop,
        "processes": HostProcesses(),
        "lost": lambda member: False,
        "place": lambda: OpPosition(3, 0, False),
        **callbacks,
    }
    return DetectorContext(**{**usual, **fields})
