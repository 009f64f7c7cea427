"""The one place where a process says what happened: each of its `holdfast.ft.events` goes from here to every receiver.

Receivers are the file, the lines for people, listeners of the program, metrics, OpenTelemetry; each is served by a
thread of its own, so a file system that hangs, or a slow listener, stops neither the job nor the others. Only what must
know an event before the process goes on (the flight recording, of steps) hears it at once, in the emitter's thread.

A line of the file is one write to a file opened for appending, so a killed process leaves whole lines. For people
there is a line for each event of a recovery at INFO, for every step at DEBUG.
What all members learn, one of them tells: the first that was a member before. HOLDFAST_LOG chooses the level.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar, cast

from holdfast.comms.system import forks
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.ft.event_lines import encode_event
from holdfast.ft.events import (
    DeathsDetected,
    Event,
    EventsDropped,
    SpareWaits,
    ViewInstalled,
    ViewProposed,
    stamped,
)

DIRECTORY = "HOLDFAST_LOG_DIR"
"""The environment variable that names the directory of the logs; without it, events go to callbacks alone."""

KEPT_BYTES = 1 << 20
MOST_WAITING = 10_000
"""The most events that wait for the file or a listener; those that come then are dropped, and counted."""
CLOSE_SECONDS = 2.0
"""How long `close` waits for the file and the listeners to take the last events."""

_FLUSH_PAUSE = 0.001

Listener = Callable[[Event], None]
E = TypeVar("E", bound=Event)

_ANYWHERE: AbstractContextManager[object] = nullcontext()

_log = logging.getLogger("holdfast.ft")


class EventLog:
    """The events of one process. From any thread; `emit` never waits. The first event opens the file."""

    def __init__(self, process: str, directory: str | os.PathLike[str] | None = None) -> None:
        """Write to `<directory>/<process>.jsonl`. `directory` defaults to HOLDFAST_LOG_DIR; "" writes no file."""
        self.process = process
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may close the log
        self._receivers: tuple[_Receiver, ...] = ()
        self._at_once: dict[type[Event], list[Listener]] = {}
        directory = os.environ.get(DIRECTORY) if directory is None else directory
        if directory:
            file = _LogFile(process, directory)
            self._receivers = (_Receiver(process, "its event log", file.write, file.close),)

    def emit(self, event: Event, within: AbstractContextManager[object] | None = None) -> None:
        """Record an event of this process, with the current time; inside of `within`, which may refuse it by an error.

        What hears it at once hears it before that, so that nothing but the record is made inside.
        """
        if type(event) in self._at_once:
            for listener in self._at_once[type(event)]:
                listener(event)
        with _ANYWHERE if within is None else within:
            stamp = None
            for receiver in self._receivers:
                if receiver.wants is None or receiver.wants(event):
                    stamp = stamp or stamped(event, self.process, self._pid)
                    receiver.put(stamp)

    def subscribe(self, listener: Listener, wants: Callable[[Event], bool] | None = None) -> Callable[[], None]:
        """Call `listener(event)` for each event that it `wants` (default: all), in order, in a thread of its own.

        Returns a function that ends the subscription, once the listener has had all events before that.
        """
        receiver = _Receiver(self.process, "a listener to its events", listener, wants=wants)
        with self._lock:
            self._receivers = (*self._receivers, receiver)

        def unsubscribe() -> None:
            with self._lock:
                self._receivers = tuple(each for each in self._receivers if each is not receiver)
            receiver.close(time.monotonic() + CLOSE_SECONDS)

        return unsubscribe

    def at_once(self, kind: type[E], listener: Callable[[E], None]) -> None:
        """Call `listener(event)` for each event of `kind` in the thread that emits it. It must not raise or wait."""
        self._at_once.setdefault(kind, []).append(cast(Listener, listener))

    def flush(self, seconds: float) -> bool:
        """Wait until the file and all listeners have had all events so far; False if they have not in time."""
        return _wait_until_served(self._receivers, seconds)

    def close(self) -> None:
        """Serve the events so far, then close the file; later events go nowhere. Idempotent."""
        with self._lock:
            receivers, self._receivers = self._receivers, ()
        deadline = time.monotonic() + CLOSE_SECONDS
        for receiver in receivers:
            receiver.close(deadline)


def flush_all(seconds: float = CLOSE_SECONDS) -> None:
    """Wait, at the end of this process, until its event logs are written."""
    _wait_until_served(tuple(_running), seconds)


atexit.register(flush_all)


class _Receiver:
    """Serves events to one receiver, in order, in a thread of its own that its first event starts."""

    def __init__(
        self,
        process: str,
        name: str,
        serve: Listener,
        end: Callable[[], None] = lambda: None,
        wants: Callable[[Event], bool] | None = None,
    ) -> None:
        """`serve` takes each event; `end` is called after the last one. Both are called in the thread."""
        self._process, self._name, self._serve, self._end = process, name, serve, end
        self.wants = wants
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.accepted = self.served = self._dropped = 0

    def put(self, event: Event) -> None:
        with self._lock:
            fits = self.accepted - self.served < MOST_WAITING
            if fits:
                self.accepted += 1
                self._waiting.put(event)
            else:
                self._dropped += 1
            if self._thread is None:
                self._start()
        if not fits and self._dropped == 1:
            _log.warning("%s: %s hangs; events are dropped from here on", self._process, self._name)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"holdfast-events-{self._process}", daemon=True)
        self._thread.start()
        _running.add(self)

    def close(self, deadline: float) -> None:
        """Serve what waits, and end; what is not served by the `deadline` is left to the thread."""
        self._waiting.put(None)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            lost = self.accepted - self.served + self._dropped
            _log.warning("%s: %s hangs; %d events may be lost", self._process, self._name, lost)
            _running.discard(self)  # the end of the process does not wait for it again

    def _run(self) -> None:
        try:
            while (event := self._waiting.get()) is not None:
                self._call(event)
                self.served += 1
                if self._dropped:
                    self._report_dropped(event)
        finally:
            self._end()
            _running.discard(self)

    def _call(self, event: Event) -> None:
        try:
            self._serve(event)
        except Exception:
            _log.exception("%s: %s failed", self._process, self._name)

    def _report_dropped(self, event: Event) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        _log.warning("%s: %s goes on; %d events were dropped", self._process, self._name, dropped)
        self._call(stamped(EventsDropped(count=dropped), event.process, event.pid))


_running: set[_Receiver] = set()
"""The receivers with a thread."""
forks.run_in_children(_running.clear)  # it has no thread there


def _wait_until_served(receivers: tuple[_Receiver, ...], seconds: float) -> bool:
    """Wait until receivers have had what they have accepted so far; False if they have not in time."""
    deadline = time.monotonic() + seconds
    wanted = [(receiver, receiver.accepted) for receiver in receivers]
    while any(receiver.served < count for receiver, count in wanted):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_FLUSH_PAUSE)
    return True


class _LogFile:
    """The file of an event log. Belongs to one thread."""

    def __init__(self, process: str, directory: str | os.PathLike[str]) -> None:
        self._process, self._path = process, Path(directory) / f"{process}.jsonl"
        self._fd: OwnedDescriptor | None = None
        self._kept: deque[bytes] = deque()
        self._away, self._lost = False, 0

    def write(self, event: Event) -> None:
        """Append a line; if that fails (a full disk), keep it and write it before the next line that succeeds.

        At most `KEPT_BYTES` are kept; older lines are lost. The job goes on. A warning reports the first failure, and
        another the recovery with the number of lost lines.
        """
        line = encode_event(event) + b"\n"
        try:
            if self._fd is None or not self._fd.ours:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = OwnedDescriptor(os.open(self._path, flags, 0o600))
            while self._kept:
                _append(self._fd, self._kept[0])
                self._kept.popleft()
            _append(self._fd, line)
        except OSError as error:
            self._kept.append(line)
            if not self._away:
                _log.warning("%s cannot write its events for now: %s", self._process, error)
            self._away = True
            while sum(map(len, self._kept)) > KEPT_BYTES:
                self._kept.popleft()
                self._lost += 1
        else:
            if self._away:
                _log.warning("%s writes its events again; %d were lost", self._process, self._lost)
            self._away, self._lost = False, 0

    def close(self) -> None:
        if self._fd is not None:
            self._fd.close()


def _append(fd: int, line: bytes) -> None:
    """Write all of a line or nothing. Raises OSError."""
    written = os.write(fd, line)
    if written < len(line):
        os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Lines for people -----------------------------------------------------------------------------------------------

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
        """Whether the event may lead to a line, or changes which rank tells."""
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
