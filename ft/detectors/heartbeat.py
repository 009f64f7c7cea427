"""`heartbeat`: processes of this host say in shared memory that they run; whoever is silent is looked at.

Silence alone proves nothing: a process that holds its GIL for long, is swapped out or starved is silent too. One that
is stopped at every look is ended. One that is silent and runs is vouched for to other hosts, which cannot look.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated

import msgspec

from holdfast.comms.transport.liveness import is_stopped
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.heartbeat_page import Pulse, PulseReader
from holdfast.ft.detectors.silence import Silence
from holdfast.ft.membership.events import Stalled
from holdfast.ft.membership.view import Member, View

_log = logging.getLogger("holdfast.ft")
_encode = msgspec.msgpack.Encoder().encode
_words = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=0)] | list[str])


class Heartbeat(Detector):
    """Evicts a stopped process within the suspect time, and nobody else."""

    def __init__(self, surroundings: DetectorContext) -> None:
        super().__init__(surroundings)
        self._silence = Silence(surroundings.me, surroundings.timeouts, is_stopped)
        self._pulse = Pulse()
        self._readers: dict[str, PulseReader] = {}
        self._mates: Mapping[str, Member] = {}
        self._unopened: dict[str, int] = {}
        self._vouch_at = 0.0

    @property
    def missed(self) -> int:
        return self._silence.missed

    def silent_for(self, member_id: str, now: float) -> float | None:
        return self._silence.silent_for(member_id, now)

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        me = self.surroundings.me
        self._mates = {m.id: m for m in watched if m.peer.host == me.peer.host and m.peer.pid != me.peer.pid}
        self._silence.follow(self._mates.values(), self.surroundings.loop.time())
        for member_id in self._readers.keys() - self._mates.keys():
            self._readers.pop(member_id).close()
        for member_id, fd in list(self._unopened.items()):
            self._open(member_id, fd)

    def linked(self, member_id: str) -> None:
        self.surroundings.send(member_id, _encode(self._pulse.fd))

    def received(self, member_id: str, body: bytes, now: float) -> None:
        words = _words.decode(body)
        if isinstance(words, int):
            self._open(member_id, words)
        else:
            for each in words:
                self.surroundings.vouch(each)

    def _open(self, member_id: str, fd: int) -> None:
        member = self._mates.get(member_id)
        if member is None:
            self._unopened[member_id] = fd
            return
        self._unopened.pop(member_id, None)
        if member_id in self._readers:
            return
        try:
            self._readers[member_id] = PulseReader(member.peer, fd)
        except OSError as error:
            _log.warning("the heartbeat of %s in shared memory cannot be read, its messages are: %s", member_id, error)

    def heard(self, member_id: str, now: float) -> None:
        self._hear(member_id, now)

    def _hear(self, member_id: str, when: float) -> None:
        for verdict in self._silence.hear(member_id, when):
            self.surroundings.tell(verdict)

    def beat(self, now: float) -> None:
        self._pulse.beat(now, self.surroundings.place())

    def look(self, now: float) -> None:
        for member_id, reader in self._readers.items():
            found = reader.read()
            if found is not None:
                self._hear(member_id, found[0])
                self.surroundings.placed(member_id, found[1])
        for verdict in self._silence.look(now):
            if isinstance(verdict, Stalled):
                self.surroundings.note("stalled", member=verdict.member, evidence=verdict.evidence)
            self.surroundings.tell(verdict)
        self.doubtful = self._silence.somebody_is_silent
        running = self._silence.silent_and_running()
        if running and now >= self._vouch_at:
            self._vouch_at = now + self.surroundings.timeouts.heartbeat
            self.surroundings.send_all(_encode(running))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._pulse.close()
