"""`heartbeat`: processes of this host beat in shared memory; a silent one is checked for being stopped.

Silence alone proves nothing: a process that holds its GIL for long, is swapped out or starved is silent too. A
process that is stopped at every look is ended. For one that is silent but runs, this process confirms to other hosts,
which cannot look, that it lives.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.process_watch import PageReader
from holdfast.ft.detectors.silence import SilenceTracker
from holdfast.ft.membership.events import Stalled
from holdfast.ft.membership.view import Member, View

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
        for member_id, fd in list(self._unopened.items()):
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
