"""Gathers the evidence about a job from the files in its log folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from holdfast.comms.transport.liveness import this_host
from holdfast.ft.diagnosis.clocks import offsets
from holdfast.ft.diagnosis.evidence import JobEvidence, ProcessState, life
from holdfast.ft.events import Event
from holdfast.ft.telemetry.event_reader import read_events
from holdfast.ft.telemetry.flight import BadRecording, Recording, find, read


def gather(logs: Path, now: float) -> JobEvidence:
    """The evidence in a folder of recordings and event logs; `now` is this host's monotonic time."""
    recordings, bad = [], []
    for path in find(logs):
        try:
            recordings.append(read(path))
        except BadRecording as error:
            bad.append(str(error))
    lives = {recording.identity: life(recording.process) for recording in recordings}
    events = read_events(logs, bad.append)
    return assemble(recordings, lives, events, now, bad)


def assemble(
    recordings: Iterable[Recording],
    lives: Mapping[str, ProcessState],
    events: Sequence[Event],
    now: float,
    bad: Iterable[str] = (),
) -> JobEvidence:
    """Evidence from its parts, with the hosts' clocks aligned."""
    found = JobEvidence(tuple(recordings), lives, events, now, tuple(bad))
    known = offsets(found.groups)
    here = now + known.get(this_host(), 0.0)
    return JobEvidence(found.recordings, lives, events, here, found.bad, known)
