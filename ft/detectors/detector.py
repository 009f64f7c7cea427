"""The interface of failure detectors: what a detector receives, and what it may report.

A detector reports evidence as events of `holdfast.ft.membership.events`: `ProvenDeaths` for processes that have
certainly ended, `Unreachable` for members that the job must go on without although they may live, `Stalled` for a
process of this host that has to be killed, `Suspicion` and `Cleared` for members that are only silent. It does not
decide which members the next epoch has. All methods run in the event loop of the node and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from holdfast.comms.errors import HoldfastError
from holdfast.ft import events
from holdfast.ft.membership.events import Event
from holdfast.ft.membership.view import Member, Timeouts, View
from holdfast.ft.ports import OpPosition, Processes, Time


def _no_receiver(*words: object) -> None:
    """The default of a callback without a receiver: does nothing."""


@dataclass(frozen=True, slots=True)
class DetectorContext:
    """What a detector has to work with: the time (`loop`), the `processes` of its host, and callbacks.

    `tell` passes evidence to the membership of this process; `stop` ends the epoch here at once, without agreement;
    `resign` ends this process's part in the job. `note` writes an event to its log. `send(member_id, body)` reaches the
    detector of the same name in another process, if there is a connection to it; `send_all` those of all connected
    processes. `suspect(member_id, evidence)` tells the detectors of all processes that this one cannot work with a
    member any more. `confirm(member_id)` and `placed(member_id, place)` tell the detectors of this process that another
    one lives, and its position in its ops. `place()` is the position of this process. `lost(member_id)`: whether the
    membership already counts the member as lost.
    """

    me: Member
    timeouts: Timeouts
    loop: Time
    tell: Callable[[Event], None]
    stop: Callable[[str], None]
    resign: Callable[[str], None]
    note: Callable[[events.Event], None]
    place: Callable[[], OpPosition]
    lost: Callable[[str], bool]
    processes: Processes
    send: Callable[[str, bytes], None] = _no_receiver
    send_all: Callable[[bytes], None] = _no_receiver
    suspect: Callable[[str, str], None] = _no_receiver
    confirm: Callable[[str], None] = _no_receiver
    placed: Callable[[str, OpPosition], None] = _no_receiver

    def mates(self, members: Iterable[Member]) -> dict[str, Member]:
        """By id, those of `members` that are other processes of this host."""
        me = self.me.peer
        return {each.id: each for each in members if each.peer.host == me.host and each.peer.pid != me.pid}


class Detector:
    """The base class of failure detectors. Every method has a default; override what is needed.

    `doubtful`: `look` should be called a few times a heartbeat, not once.
    """

    doubtful: bool = False

    def __init__(self, context: DetectorContext) -> None:
        self.context = context

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        """The newest view, and the processes in or outside of it that this process must watch from now on."""

    def beat(self, now: float) -> None:
        """Called once a heartbeat: show that this process lives."""

    def look(self, now: float) -> None:
        """Called once a heartbeat, and more often while any detector is `doubtful`: evaluate what is known."""

    def linked(self, member_id: str) -> None:
        """A connection to another process was made."""

    def refused(self, member_id: str, now: float) -> None:
        """The host of another process refuses connections to its address: no process listens there any more."""

    def heard(self, member_id: str, now: float) -> None:
        """Another process has shown over the control channel that it lives."""

    def received(self, member_id: str, body: bytes, now: float) -> None:
        """A message from the detector of the same name in another process.

        May raise what msgspec does for a body that it cannot decode (`errors.UNDECODABLE`), having changed nothing.
        """

    def reported(self, observer: str, member: str, evidence: str | None, now: float) -> None:
        """Another process suspects a member, or has cleared it (None)."""

    def suspected(self, observer: str, member: str, evidence: str, now: float) -> None:
        """A process, perhaps this one, cannot work with a member any more."""

    def placed(self, member_id: str, place: OpPosition) -> None:
        """The position of another process in its ops."""

    def failed(self, view: View, failure: HoldfastError, now: float) -> None:
        """An op of the communicator of `view` has failed in this process."""

    @property
    def missed(self) -> int:
        """The number of heartbeats of others that did not arrive, so far."""
        return 0

    @property
    def reads(self) -> Collection[str]:
        """The ids of the processes that show this one signs of life without messages."""
        return ()

    def silent_for(self, member_id: str, now: float) -> float | None:
        """Seconds since the last sign of life of a process; None if this detector does not watch it."""
        return None

    def close(self) -> None:
        """Release all resources. No method is called afterwards."""
