"""Logs what happens to a job: one line for each event of a recovery.

Lines of level INFO tell a recovery, DEBUG has every step. What all members learn, one of them tells: the first that
was a member before. HOLDFAST_LOG chooses the level.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time

from holdfast.ft.events import DeathsDetected, Event, SpareWaits, ViewInstalled, ViewProposed
from holdfast.ft.telemetry.event_log import EventLog

LEVEL = "HOLDFAST_LOG"
"""The environment variable with the least level of lines: debug, info, warning or off."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "off": logging.CRITICAL + 1}
PREFIX = "holdfast "
"""How each line begins on stderr."""

MANY_MEMBERS = 32
"""In a job of more members, a rank tells at INFO only what concerns all."""
MOST_LINES, WINDOW = 40, 60.0
"""The most lines of a process in so many seconds; further ones are counted, and left out below DEBUG."""

_IDENTITY = re.compile(r"(?<![(\w])(?<!spare )p\d+-[0-9a-f]{6}\b")

_TELLS_WHO = frozenset({ViewInstalled, SpareWaits})

_log = logging.getLogger("holdfast.ft")


def set_up() -> None:
    """Show lines on stderr, unless the program has handlers of its own. Idempotent. Raises ValueError for HOLDFAST_LOG.

    The level is set only where HOLDFAST_LOG names one, or the program has set up nothing.
    """
    asked = os.environ.get(LEVEL, "").strip().lower()
    if asked and asked not in LEVELS:
        raise ValueError(f"{LEVEL}={asked!r} is none of {', '.join(LEVELS)}")
    logger = logging.getLogger("holdfast")
    if asked:
        logger.setLevel(LEVELS[asked])
    elif logger.level == logging.NOTSET and not logger.hasHandlers():
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())


def log_events(events: EventLog) -> None:
    """Log the events of a session from now on. Raises ValueError for HOLDFAST_LOG."""
    set_up()
    logger = EventLogger(events.process)
    events.subscribe(logger, logger.wants)


class _StderrHandler(logging.Handler):
    """Writes to the stderr of the moment, and nothing where the program has a handler of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        own = logging.getLogger("holdfast").handlers
        if logging.getLogger().handlers or any(not isinstance(each, _StderrHandler) for each in own):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(f"{PREFIX}%(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname}: {record.message}"
        return super().formatMessage(record)


class EventDescriber:
    """Gives each event of one process a level and a line, in the order of the events."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self._epoch, self._rank = 0, -1
        self._members: tuple[str, ...] = ()
        self._ranks: dict[str, int] = {}
        self._is_spare = False
        self._tellers: tuple[str, ...] = ()
        """The members that were members before, in rank order; the first that is not lost tells what all learn."""
        self._lost: set[str] = set()

    def level(self, event: Event) -> int:
        """The level of the event's line, after this process has learnt what the event says. Call it once an event."""
        match event:
            case ViewInstalled():
                self._install(event)
            case DeathsDetected():
                self._lost.update(event.members)
            case SpareWaits():
                self._is_spare = True
        return self._level(event)

    def line(self, event: Event) -> str:
        """The event as one line, with the rank and the epoch of this process."""
        text = f"{event}; {event.then}" if event.then else str(event)
        return f"{self.who()}: {_IDENTITY.sub(self._named, text)}"

    def who(self) -> str:
        """The rank and the epoch of this process, or what it is without a rank."""
        if self._rank >= 0:
            return f"rank {self._rank}, epoch {self._epoch}"
        return f"{'spare ' if self._is_spare else ''}{self._identity}"

    def _install(self, event: ViewInstalled) -> None:
        if self._members:
            known = set(self._members)
            self._tellers = tuple(member for member in event.members if member in known)
        else:
            self._tellers = () if self._is_spare else event.members
        self._epoch, self._members, self._lost = event.epoch, event.members, set()
        self._ranks = {member: rank for rank, member in enumerate(event.members)}
        self._rank = self._ranks.get(self._identity, -1)
        self._is_spare = False

    def _level(self, event: Event) -> int:
        if isinstance(event, ViewProposed) and self._rank < 0:  # to begin the job
            return logging.DEBUG
        is_teller = next((each for each in self._tellers if each not in self._lost), None) == self._identity
        if is_teller or event.level != logging.INFO:
            return event.level
        return logging.DEBUG if event.shared or len(self._members) > MANY_MEMBERS else logging.INFO

    def _named(self, found: re.Match[str]) -> str:
        rank = self._ranks.get(found[0])
        return found[0] if rank is None else f"rank {rank}"


class EventLogger:
    """Logs the events of one process. `wants` may be called from any thread, the logger itself from one."""

    def __init__(self, identity: str) -> None:
        self._describer = EventDescriber(identity)
        self._window_ends, self._lines = 0.0, 0

    def wants(self, event: Event) -> bool:
        """Whether the event may lead to a line, or changes who tells."""
        return type(event) in _TELLS_WHO or _log.isEnabledFor(event.level)

    def __call__(self, event: Event) -> None:
        """Log an event."""
        level = self._describer.level(event)
        if _log.isEnabledFor(level) and self._fits(level):
            _log.log(level, "%s", self._describer.line(event))

    def _fits(self, level: int) -> bool:
        """Count a line; whether it may be written. The first one of the next window says how many were left out."""
        now = time.monotonic()
        if now >= self._window_ends:
            left_out, self._lines, self._window_ends = self._lines - MOST_LINES, 0, now + WINDOW
            if left_out > 0:
                _log.warning("%s: %d lines were left out; %s=debug shows all", self._describer.who(), left_out, LEVEL)
        if level <= logging.DEBUG:
            return True
        self._lines += 1
        return self._lines <= MOST_LINES or _log.isEnabledFor(logging.DEBUG)
