"""The lines of event logs: writes the events of `holdfast.ft.events`, and reads them, whole or as the logs grow.

A line is a JSON object with `kind`, `time` (seconds on CLOCK_MONOTONIC, which all processes of a host share),
`process`, `pid` and the fields of its kind. An unknown kind, of a later version, is read as an `OtherEvent`. An
unfinished last line is skipped: its process was killed while it wrote, or is writing it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData
from holdfast.ft.events import Event


class OtherEvent(Event, frozen=True, tag=""):
    """An event of a kind that this version does not know."""

    name: str
    fields: dict[str, Any]

    @property
    def kind(self) -> str:
        return self.name

    def __str__(self) -> str:
        return f"{self.name} " + ", ".join(f"{name} {value}" for name, value in self.fields.items())


_HEADER = ("time", "process", "pid", "kind")


def _kinds(base: type[Event]) -> dict[str, type[Event]]:
    found = {}
    for each in base.__subclasses__():
        tag = each.__struct_config__.tag
        if isinstance(tag, str) and each is not OtherEvent and not each.__subclasses__():
            found[tag] = each
        found.update(_kinds(each))
    return found


KINDS: Mapping[str, type[Event]] = _kinds(Event)
"""The classes of events by their names on the wire."""


class _Header(msgspec.Struct, frozen=True):
    """What every line has."""

    time: float
    process: str
    pid: int
    kind: str


_encode = msgspec.json.Encoder().encode
_header = msgspec.json.Decoder(_Header).decode
_known = msgspec.json.Decoder(functools.reduce(operator.or_, KINDS.values())).decode
_fields = msgspec.json.Decoder(dict[str, Any]).decode


def encode_event(event: Event) -> bytes:
    """The line of an event, without its newline."""
    if isinstance(event, OtherEvent):
        return _encode(to_record(event))
    return _encode(event)


def decode_event(line: bytes) -> Event:
    """The event of a line. Raises `CorruptData` if it is none, or a field is missing or of the wrong type."""
    try:
        header = _header(line)
        if header.kind in KINDS:
            event: Event = _known(line)
            return event
        return _other(header, _fields(line))
    except UNDECODABLE as error:
        raise CorruptData(f"no event: {error}: {line[:200]!r}") from None


def to_record(event: Event) -> dict[str, Any]:
    """An event as the mapping that its line holds: what listeners of a session get."""
    if isinstance(event, OtherEvent):
        return {"kind": event.name, "time": event.time, "process": event.process, "pid": event.pid, **event.fields}
    return _fields(_encode(event))


def make_event(kind: str, fields: Mapping[str, Any]) -> Event:
    """An event of this process by the name of its kind. Raises `CorruptData` if a field is missing or wrong."""
    return event_of({**fields, "kind": kind, "time": -1.0, "process": "", "pid": 0})


def event_of(record: Mapping[str, Any]) -> Event:
    """The event of a mapping, as `decode_event`. Raises `CorruptData`."""
    try:
        header = msgspec.convert(record, _Header)
        if header.kind in KINDS:
            return msgspec.convert(record, KINDS[header.kind])
        return _other(header, record)
    except msgspec.ValidationError as error:
        raise CorruptData(f"no event: {error}: {dict(record)!r}") from None


def _other(header: _Header, record: Mapping[str, Any]) -> OtherEvent:
    fields = {name: value for name, value in record.items() if name not in _HEADER}
    return OtherEvent(time=header.time, process=header.process, pid=header.pid, name=header.kind, fields=fields)


# Logs --------------------------------------------------------------------------------------------------------------


class EventTail:
    """The events of all logs in a folder, as they grow. `bad` is called once per file with a line that is no event."""

    def __init__(self, folder: Path, bad: Callable[[str], object] = lambda reason: None) -> None:
        self._folder, self._bad = folder, bad
        self._read: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}
        self._told: set[Path] = set()

    def new(self) -> list[Event]:
        """The events since the last call, by their `time`."""
        try:
            paths = sorted(self._folder.glob("*.jsonl"))
        except OSError:  # the folder went with its job
            return []
        events = [event for path in paths for event in self.new_in(path)]
        return sorted(events, key=lambda event: event.time)

    def new_in(self, path: Path) -> list[Event]:
        """The events of one log since the last call, in the order of its lines."""
        at = self._read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(at)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError as error:
            self._tell(path, f"event log {path}: {error.strerror}")
            return []
        self._read[path] = at + len(whole) + len(newline)
        first = self._lines.get(path, 0) + 1
        lines = whole.split(b"\n") if newline else []
        self._lines[path] = first - 1 + len(lines)
        events = []
        for number, line in enumerate(lines, start=first):
            try:
                events.append(decode_event(line))
            except CorruptData:
                if line:
                    self._tell(path, f"event log {path}: line {number} is no event of a job")
        return events

    def _tell(self, path: Path, reason: str) -> None:
        if path not in self._told:
            self._told.add(path)
            self._bad(reason)


def read_events(where: Path, bad: Callable[[str], object] = lambda reason: None) -> list[Event]:
    """The events of one log (.jsonl), in its order, or of all logs in a folder, by time. `bad`: see `EventTail`."""
    return EventTail(where.parent, bad).new_in(where) if where.suffix == ".jsonl" else EventTail(where, bad).new()


def merge(logs: Iterable[Iterable[Event]]) -> list[Event]:
    """All events by time; events of one process keep their order."""
    return sorted((event for log in logs for event in log), key=lambda event: event.time)


def refuse(reason: str) -> NoReturn:
    """What a reader calls that raises `CorruptData` at the first line that is no event."""
    raise CorruptData(reason)
