"""The event log of a process: JSON lines in a file, and callbacks in this process.

Each line has `time` (`time.monotonic()`, shared by all processes of a host), `process`, `pid`, `kind` and the fields
of its kind. A line is one write to a file opened for appending, so a killed process leaves whole lines.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

DIRECTORY = "HOLDFAST_LOG_DIR"
"""The environment variable that names the directory of the logs; without it, events go to callbacks alone."""

KEPT_BYTES = 1 << 20

Listener = Callable[[dict[str, Any]], None]

_log = logging.getLogger("holdfast.ft")
_encode = msgspec.json.Encoder().encode


class EventLog:
    """The events of one process. Safe to use from several threads. The first event opens the file."""

    def __init__(self, process: str, directory: str | os.PathLike[str] | None = None) -> None:
        """Write to `<directory>/<process>.jsonl`. `directory` defaults to HOLDFAST_LOG_DIR; "" writes no file."""
        self.process = process
        self._pid = os.getpid()
        self._listeners: tuple[Listener, ...] = ()
        self._directory = os.environ.get(DIRECTORY) if directory is None else directory
        self._opening = threading.Lock()
        self._fd = -1
        self._kept: deque[bytes] = deque()
        self._away, self._lost = False, 0

    def emit(self, kind: str, **fields: Any) -> None:
        """Record an event with the current time. `fields` must be JSON values."""
        if not self._directory and not self._listeners:
            return
        event = {"time": time.monotonic(), "process": self.process, "pid": self._pid, "kind": kind, **fields}
        if self._directory:
            line = _encode(event) + b"\n"
            with self._opening:
                self._write(line)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener to events failed")

    def _write(self, line: bytes) -> None:
        """Append a line; if that fails (a full disk), keep it and write it before the next line that succeeds.

        At most `KEPT_BYTES` are kept; older lines are lost. The job goes on. A warning reports the first failure, and
        another the recovery with the number of lost lines.
        """
        if not self._directory:
            return
        try:
            if self._fd < 0:
                self._open(self._directory)
            while self._kept:
                _append(self._fd, self._kept[0])
                self._kept.popleft()
            _append(self._fd, line)
        except OSError as error:
            self._kept.append(line)
            if not self._away:
                _log.warning("%s cannot write its events for now: %s", self.process, error)
            self._away = True
            while sum(map(len, self._kept)) > KEPT_BYTES:
                self._kept.popleft()
                self._lost += 1
        else:
            if self._away:
                _log.warning("%s writes its events again; %d were lost", self.process, self._lost)
            self._away, self._lost = False, 0

    def _open(self, directory: str | os.PathLike[str]) -> None:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(directory) / f"{self.process}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` for each event from now on, in the thread that emits it; it must be quick.

        Returns a function that ends the subscription.
        """
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

        return unsubscribe

    def close(self) -> None:
        """Close the file; later events go to listeners alone. Idempotent."""
        with self._opening:
            self._directory = None
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _append(fd: int, line: bytes) -> None:
    """Write all of a line or nothing. Raises OSError."""
    written = os.write(fd, line)
    if written < len(line):
        os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
