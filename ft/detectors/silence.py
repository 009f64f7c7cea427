"""Evaluates silence: missing heartbeats, confirmed by a look at the process where that is possible.

Sans-I/O: the caller passes the time, signs of life and a function that looks. A process that holds its GIL for long, is
swapped out or starved of CPU is silent too; only one that is stopped at every look counts as stalled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.ft.membership.events import Cleared, Stalled, Suspicion
from holdfast.ft.membership.view import Member
from holdfast.ft.timeouts import Timeouts

MIN_LOOKS = 3

SilenceEvent = Stalled | Suspicion | Cleared


@dataclass(slots=True)
class _Contact:
    """The state of one process: its last sign of life, and how often it was stopped when looked at since."""

    member: Member
    at: float
    looks: int = 0
    first_look: float = 0.0
    suspected: bool = False
    missed: int = 0


class SilenceTracker:
    """Tracks how long other processes have been silent.

    `me` is this process; `is_stopped(pid)` looks at one of this host.

    `any_silent` is the result of the last `look`. `missed` counts all heartbeats that did not arrive, so far.
    """

    def __init__(self, me: Member, timeouts: Timeouts, is_stopped: Callable[[int], bool]) -> None:
        self._me, self._timeouts, self._is_stopped = me, timeouts, is_stopped
        self._heard: dict[str, _Contact] = {}
        self._looked: float | None = None
        self.any_silent = False
        self.missed = 0

    def follow(self, members: Iterable[Member], now: float) -> None:
        """Track exactly these processes from now on."""
        wanted = {m.id: m for m in members if m.peer.pid != self._me.peer.pid or m.peer.host != self._me.peer.host}
        for member_id in self._heard.keys() - wanted.keys():
            del self._heard[member_id]
        for member_id, member in wanted.items():
            if member_id not in self._heard:
                self._heard[member_id] = _Contact(member, now)

    def hear(self, member_id: str, now: float) -> tuple[SilenceEvent, ...]:
        """A sign of life at time `now`, which may be a while ago."""
        heard = self._heard.get(member_id)
        if heard is None or now <= heard.at:
            return ()
        heard.at, heard.looks, heard.missed = now, 0, 0
        if not heard.suspected:
            return ()
        heard.suspected = False
        return (Cleared(member_id, self._me.id),)

    def doubt(self, member_id: str, evidence: str) -> tuple[SilenceEvent, ...]:
        """Suspect a process of another host before it has been silent for long, because of `evidence`."""
        heard = self._heard.get(member_id)
        if heard is None or heard.suspected or heard.member.peer.host == self._me.peer.host:
            return ()
        heard.suspected = True
        return (Suspicion(member_id, self._me.id, evidence),)

    def look(self, now: float) -> tuple[SilenceEvent, ...]:
        """Evaluate the silence so far. Call it a few times a heartbeat while `any_silent`."""
        findings: list[SilenceEvent] = []
        self.any_silent = False
        self._allow_for_absence(now)
        for heard in self._heard.values():
            silent = now - heard.at
            if silent < 1.2 * self._timeouts.heartbeat:
                continue
            self.any_silent = True
            beats = int(silent / self._timeouts.heartbeat)
            self.missed += max(0, beats - heard.missed)
            heard.missed = max(beats, heard.missed)
            if heard.member.peer.host == self._me.peer.host:
                findings += self._look_at(heard, now, silent)
            elif silent >= self._timeouts.suspect and not heard.suspected:
                heard.suspected = True
                findings.append(Suspicion(heard.member.id, self._me.id, f"silent for {silent:.2f} s"))
        return tuple(findings)

    def _allow_for_absence(self, now: float) -> None:
        """Do not count the time in which this process itself did not run and could not receive heartbeats."""
        absent = now - self._looked - self._timeouts.heartbeat if self._looked is not None else 0.0
        self._looked = now
        if absent > self._timeouts.heartbeat:
            for heard in self._heard.values():
                heard.at = min(now, heard.at + absent)

    def silent_for(self, member_id: str, now: float) -> float | None:
        """Seconds since the last sign of life of a process; None for one that is not tracked."""
        heard = self._heard.get(member_id)
        return None if heard is None else now - heard.at

    def silent_and_running(self) -> list[str]:
        """The processes that were silent at the last look, and not stopped."""
        if self._looked is None:
            return []
        bound = self._looked - 1.2 * self._timeouts.heartbeat
        return [member_id for member_id, heard in self._heard.items() if heard.at <= bound and heard.looks == 0]

    def _look_at(self, heard: _Contact, now: float, silent: float) -> list[SilenceEvent]:
        if not self._is_stopped(heard.member.peer.pid):
            heard.looks = 0
            return []
        if heard.looks == 0:
            heard.first_look = now
        heard.looks += 1
        stopped = now - heard.first_look
        if silent < self._timeouts.suspect or heard.looks < MIN_LOOKS or stopped < self._timeouts.suspect / 2:
            return []
        words = f"silent for {silent:.2f} s, and stopped at each of {heard.looks} looks in {stopped:.2f} s"
        return [Stalled(heard.member.id, words)]
