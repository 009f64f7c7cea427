"""The interface of failure detectors: what a detector receives, and what it may report.

A detector reports evidence as events of `holdfast.ft.membership.events`: `ProvenDeaths` for processes that have
certainly ended, `Stalled` for a process of this host that has to be killed, `Suspicion` and `Cleared` for members that
are only silent. It does not decide which members the next epoch has. All methods run in the event loop of the runtime
and must not block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.comms.errors import HoldfastError
from holdfast.ft.detectors.stragglers import OpPosition
from holdfast.ft.membership.events import Event
from holdfast.ft.membership.view import Member, View
from holdfast.ft.timeouts import Timeouts


class Note(Protocol):
    """Writes an event to this process's log."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


def _nobody(*words: object) -> None:
    """Nobody is there to hear it."""


@dataclass(frozen=True, slots=True)
class DetectorContext:
    """What a detector has to work with.

    `tell` gives evidence to the membership of this process; `stop` ends the epoch here at once, without agreement;
    `resign` ends this process's part in the job. `send(member_id, body)` reaches the detector of the same name in
    another process, if there is a connection to it; `send_all` all of them. `accuse(member_id, evidence)` tells the
    detectors of all processes that this one cannot work with a member any more. `vouch(member_id)` and
    `placed(member_id, place)` tell the detectors of this process that another lives, and how far it is. `place()` is
    how far this process is in its ops. `lost(member_id)`: the membership takes the member for gone already.
    """

    me: Member
    timeouts: Timeouts
    loop: asyncio.AbstractEventLoop
    tell: Callable[[Event], None]
    stop: Callable[[str], None]
    resign: Callable[[str], None]
    note: Note
    place: Callable[[], OpPosition]
    lost: Callable[[str], bool]
    send: Callable[[str, bytes], None] = _nobody
    send_all: Callable[[bytes], None] = _nobody
    accuse: Callable[[str, str], None] = _nobody
    vouch: Callable[[str], None] = _nobody
    placed: Callable[[str, OpPosition], None] = _nobody


class Detector:
    """One way to find out that others have failed. Every part has a default; override what is needed.

    `doubtful`: `look` is wanted a few times a heartbeat, not once."""

    doubtful: bool = False

    def __init__(self, surroundings: DetectorContext) -> None:
        self.surroundings = surroundings

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        """It is about these from now on: the newest view, and the processes in it or outside that matter here."""

    def beat(self, now: float) -> None:
        """Once a heartbeat: say that this process lives."""

    def look(self, now: float) -> None:
        """Once a heartbeat, and more often while anything is doubtful: judge."""

    def linked(self, member_id: str) -> None:
        """A connection to another process has come to stand."""

    def refused(self, member_id: str, now: float) -> None:
        """The host of another process says that nobody listens at its address any more."""

    def heard(self, member_id: str, now: float) -> None:
        """Another process has said that it lives, over the control channel."""

    def received(self, member_id: str, body: bytes, now: float) -> None:
        """The detector of the same name in another process says something. May raise `msgspec.DecodeError`
        or UnicodeDecodeError, having changed nothing.
        """

    def testified(self, observer: str, member: str, evidence: str | None, now: float) -> None:
        """Another process suspects a member, or (None) does so no more."""

    def accused(self, observer: str, member: str, evidence: str, now: float) -> None:
        """A process, perhaps this one, cannot work with a member any more."""

    def placed(self, member_id: str, place: OpPosition) -> None:
        """Another process is so far in its ops."""

    def failed(self, view: View, failure: HoldfastError, now: float) -> None:
        """An op of this process's communicator, that of `view`, has failed."""

    @property
    def missed(self) -> int:
        """How many heartbeats of others did not come, so far."""
        return 0

    def silent_for(self, member_id: str, now: float) -> float | None:
        """For how many seconds there was no sign of life of a process; None if this detector does not listen to it."""
        return None

    def fence(self, member: Member) -> bool:
        """End a process of this host by SIGKILL; False if this detector cannot."""
        return False

    def close(self) -> None:
        """Let go of everything. Nothing is heard from here on."""
