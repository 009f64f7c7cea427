"""All detectors of one process. One that is missing or raises is reported, and other evidence takes its place."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, TypeVar

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError, describe
from holdfast.comms.plugins.spec import Available, DetectorInfo
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.heartbeat import MessageHeartbeats
from holdfast.ft.detectors.observers import ObserversDetector
from holdfast.ft.detectors.process_watch import LookingDetector
from holdfast.ft.events import DetectorLost
from holdfast.ft.membership.view import Member, View
from holdfast.ft.ports import OpPosition, Timer

T = TypeVar("T")

LOOKS_A_HEARTBEAT = 4
"""How often detectors look, in one heartbeat, while one of them is in doubt."""

_log = logging.getLogger("holdfast.ft")
_encode = msgspec.msgpack.Encoder().encode
_routed = msgspec.msgpack.Decoder(tuple[str, bytes])
_suspicion = msgspec.msgpack.Decoder(tuple[Annotated[int, msgspec.Meta(ge=1)], str, str])
_TO_ALL = ""  # the name for suspicions, which every detector receives; no name that a plugin can have


STAND_INS: Mapping[str, tuple[str, Callable[[DetectorContext], Detector]]] = {
    "pidfd": ("looks at /proc once a heartbeat", LookingDetector),
    "heartbeat": ("heartbeats in messages, and looks at /proc", MessageHeartbeats),
    "observers": ("another one of its kind, begun anew", ObserversDetector),
}
"""By the name of a detector that is lost: what this process goes by instead, and what makes that.

Without observers, a process that is cut off from a dead host would wait without end."""


class Detectors:
    """Made and used in one event loop, from the detectors that are available here."""

    def __init__(
        self, context: DetectorContext, infos: list[DetectorInfo], send: Callable[[str | None, bytes], None]
    ) -> None:
        """`send(member_id, body)` reaches `received` in another process; None: in all connected ones."""
        self._me = context.me
        self._heartbeat = context.timeouts.heartbeat
        self._time = context.loop
        self._send = send
        self.places: dict[str, OpPosition] = {}
        """The last known positions of the members of this host in their ops."""
        self._view: View | None = None
        self._looking: Timer | None = None
        self._watched: tuple[Member, ...] = ()
        self._stopped_by: tuple[str, View | None] = ("", None)
        """The detector that has ended the epoch of a view here: it alone knows when this process may go on."""
        self._detectors: dict[str, Detector] = {}
        self._context = dataclasses.replace(context, confirm=self.heard)
        for info in infos:
            own = dataclasses.replace(
                context,
                send=partial(self._send_to, info.name),
                send_all=partial(self._send_to, info.name, None),
                suspect=self._suspect,
                confirm=self.heard,
                placed=self._placed,
                stop=partial(self._stop, info.name),
            )
            try:
                status = info.probe()
                if isinstance(status, Available):
                    self._detectors[info.name] = info.make(own)
                else:
                    self._lose(info.name, "; ".join(filter(None, (status.reason, status.install_hint))))
            except Exception as error:
                self._lose(info.name, describe(error), error)

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        """Watch exactly these from now on."""
        self._view, self._watched = view, watched
        self.places.clear()
        self._each(lambda detector: detector.follow(view, watched))

    def beat(self) -> None:
        """Once a heartbeat."""
        now = self._time.time()
        self._each(lambda detector: detector.beat(now))
        self._look()

    def _look(self) -> None:
        now = self._time.time()
        self._each(lambda detector: detector.look(now))
        if self._looking is None and any(self._each(lambda detector: detector.doubtful)):
            self._looking = self._time.call_later(self._heartbeat / LOOKS_A_HEARTBEAT, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._look()

    def linked(self, member_id: str) -> None:
        """A connection to another process was made."""
        self._each(lambda detector: detector.linked(member_id))

    def refused(self, member_id: str) -> None:
        """The host of another process refuses connections to its address: no process listens there any more."""
        now = self._time.time()
        self._each(lambda detector: detector.refused(member_id, now))

    def heard(self, member_id: str) -> None:
        """Another process has shown that it lives."""
        now = self._time.time()
        self._each(lambda detector: detector.heard(member_id, now))

    def received(self, member_id: str, body: bytes) -> None:
        """A message from the detectors of another process. Raises `CorruptData` for an invalid one."""
        try:
            self._received(member_id, body)
        except UNDECODABLE as error:
            raise CorruptData(f"what the detectors of {member_id} say cannot be read: {error}") from error

    def _received(self, member_id: str, body: bytes) -> None:
        name, words = _routed.decode(body)
        now = self._time.time()
        if name == _TO_ALL:
            epoch, member, evidence = _suspicion.decode(words)
            if self._view is not None and self._view.epoch == epoch:
                self._suspected(member_id, member, evidence, now)
        elif name in self._detectors:
            try:
                self._detectors[name].received(member_id, words, now)
            except UNDECODABLE:
                raise
            except Exception as error:
                self._leave_out(name, error)

    def reported(self, observer: str, member: str, evidence: str | None) -> None:
        """Another process suspects a member, or has cleared it (None)."""
        now = self._time.time()
        self._each(lambda detector: detector.reported(observer, member, evidence, now))

    def failed(self, view: View, failure: HoldfastError) -> None:
        """An op of this process's communicator has failed."""
        if self._view is None or self._view.epoch != view.epoch:
            return
        now = self._time.time()
        self._each(lambda detector: detector.failed(view, failure, now))

    def needless(self) -> set[str]:
        """The ids of the processes that read the signs of life of this one.

        It reads theirs, too. None while anything is in doubt.
        """
        if any(self._each(lambda detector: detector.doubtful)):
            return set()
        return set().union(*self._each(lambda detector: detector.reads))

    @property
    def missed(self) -> int:
        """The number of heartbeats of others that did not arrive, so far. Thread-safe."""
        return sum(self._each(lambda detector: detector.missed))

    def silent_for(self, member_id: str) -> float | None:
        """Seconds since the last sign of life of a process; None if no detector watches it."""
        now = self._time.time()
        found = self._each(lambda detector: detector.silent_for(member_id, now))
        return min((seconds for seconds in found if seconds is not None), default=None)

    def close(self) -> None:
        """Close all detectors."""
        if self._looking is not None:
            self._looking.cancel()
        self._each(lambda detector: detector.close())
        self._detectors.clear()

    def _each(self, act: Callable[[Detector], T]) -> list[T]:
        """The result of `act` for each detector. One that raises is removed, so that it does not stop the others."""
        found = []
        for name, detector in self._detectors.copy().items():
            try:
                found.append(act(detector))
            except Exception as error:
                self._leave_out(name, error)
        return found

    def _leave_out(self, name: str, error: Exception) -> None:
        """Remove a detector that has just raised."""
        detector = self._detectors.pop(name, None)
        if detector is not None:
            with contextlib.suppress(Exception):
                detector.close()
            self._lose(name, describe(error), error)
            if self._stopped_by == (name, self._view):
                self._context.resign(f"its detector {name!r} had stopped it, and is lost")

    def _lose(self, name: str, why: str, error: Exception | None = None) -> None:
        """Say that this process does without a detector, and go by other evidence in its place."""
        instead, make = STAND_INS.get(name, ("nothing", None))
        _log.debug("detector %r is lost", name, exc_info=error)
        self._context.note(DetectorLost(detector=name, reason=why, instead=instead))
        if make is not None:
            stand_in = self._detectors[f"{name} again"] = make(self._context)
            stand_in.follow(self._view, self._watched)

    def _stop(self, name: str, reason: str) -> None:
        self._stopped_by = name, self._view
        self._context.stop(reason)

    def _send_to(self, name: str, member_id: str | None, body: bytes) -> None:
        self._send(member_id, _encode((name, body)))

    def _suspect(self, member: str, evidence: str) -> None:
        if self._view is not None:
            self._send_to(_TO_ALL, None, _encode((self._view.epoch, member, evidence)))
            self._suspected(self._me.id, member, evidence, self._time.time())

    def _suspected(self, observer: str, member: str, evidence: str, now: float) -> None:
        self._each(lambda detector: detector.suspected(observer, member, evidence, now))
        self._look()

    def _placed(self, member_id: str, place: OpPosition) -> None:
        self.places[member_id] = place
        self._each(lambda detector: detector.placed(member_id, place))
