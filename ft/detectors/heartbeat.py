"""`heartbeat`: processes of this host beat in shared memory; a silent one is checked for being stopped.

Silence alone proves nothing: a process that holds its GIL for long, is swapped out or starved is silent too. A process
that is stopped at every look is ended. For one that is silent but runs, this process confirms to other hosts, which
cannot look, that it lives. `SilenceTracker` evaluates silence, of processes of other hosts too, without I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.membership.events import Cleared, Stalled, Suspicion
from holdfast.ft.membership.view import Member, Timeouts, View
from holdfast.ft.ports import PageReader

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


_log = logging.getLogger("holdfast.ft")
_encode = msgspec.msgpack.Encoder().encode
_words = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=0)] | list[str])


class MessageHeartbeats(Detector):
    """Evicts a process of this host that is stopped, by the heartbeats in its messages: what goes without a page."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._silence = SilenceTracker(context.me, context.timeouts, context.processes.is_stopped)
        self._mates: Mapping[str, Member] = {}

    @property
    def missed(self) -> int:
        return self._silence.missed

    def silent_for(self, member_id: str, now: float) -> float | None:
        return self._silence.silent_for(member_id, now)

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._mates = self.context.mates(watched)
        self._silence.follow(self._mates.values(), self.context.loop.time())

    def heard(self, member_id: str, now: float) -> None:
        for finding in self._silence.hear(member_id, now):
            self.context.tell(finding)

    def look(self, now: float) -> None:
        for finding in self._silence.look(now):
            if isinstance(finding, Stalled):
                self.context.note(events.MemberStalled(member=finding.member, evidence=finding.evidence))
            self.context.tell(finding)
        self.doubtful = self._silence.any_silent


class HeartbeatDetector(MessageHeartbeats):
    """Evicts a stopped process within the suspect time, and no other process."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._page = context.processes.page()
        self._readers: dict[str, PageReader] = {}
        self._unopened: dict[str, int] = {}
        self._confirm_at = 0.0

    @property
    def reads(self) -> Collection[str]:
        return self._readers.keys()

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        super().follow(view, watched)
        for member_id in self._readers.keys() - self._mates.keys():
            self._readers.pop(member_id).close()
        for member_id, fd in self._unopened.copy().items():
            self._open(member_id, fd)

    def linked(self, member_id: str) -> None:
        self.context.send(member_id, _encode(self._page.number))

    def received(self, member_id: str, body: bytes, now: float) -> None:
        words = _words.decode(body)
        if isinstance(words, int):
            self._open(member_id, words)
        else:
            for each in words:
                self.context.confirm(each)

    def _open(self, member_id: str, fd: int) -> None:
        member = self._mates.get(member_id)
        if member is None:
            self._unopened[member_id] = fd
            return
        self._unopened.pop(member_id, None)
        if member_id in self._readers:
            return
        try:
            self._readers[member_id] = self.context.processes.open_page(member.peer, fd)
        except OSError as error:
            _log.warning("the heartbeat of %s in shared memory cannot be read, its messages are: %s", member_id, error)

    def beat(self, now: float) -> None:
        self._page.beat(now, self.context.place())

    def look(self, now: float) -> None:
        for member_id, reader in self._readers.items():
            found = reader.read()
            if found is not None:
                self.heard(member_id, found[0])
                self.context.placed(member_id, found[1])
        super().look(now)
        running = [member_id for member_id in self._silence.silent_and_running() if self._lives(member_id)]
        if running and now >= self._confirm_at:
            self._confirm_at = now + self.context.timeouts.heartbeat
            self.context.send_all(_encode(running))

    def _lives(self, member_id: str) -> bool:
        """Whether a silent process exists. One that has ended is not stopped either, and must not be confirmed."""
        return not self.context.lost(member_id) and not self.context.processes.is_gone(self._mates[member_id].peer)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._page.close()
