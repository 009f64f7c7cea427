"""A trace of all ranks for https://ui.perfetto.dev or chrome://tracing: a track per rank, an arrow per collective.

The format is Chrome's JSON trace format ("Trace Event Format", Google): times in microseconds, `X` for slices with a
duration, `s`, `t`, `f` for the steps of an arrow, which attach to the slice around them, `i` for instants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.ft.diagnosis.evidence import JobEvidence, RankGroup, Track
from holdfast.ft.event_lines import to_record
from holdfast.ft.telemetry.flight import OpRecord, OpStatus

Event = dict[str, Any]

_INSTANTS = ("detected", "suspected", "revoked", "installed", "rebuilt", "committed", "aborted_step", "evicted")


def trace(evidence: JobEvidence) -> dict[str, Any]:
    """The trace as an object for `json.dump`. Times count from the first op or event."""
    events = sorted(_events(evidence, _tracks(evidence)), key=lambda event: event["ph"] != "M")
    began = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = _us(event["ts"] - began)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _tracks(evidence: JobEvidence) -> Mapping[str, int]:
    """By identity, the number of a process's track: its pid, or a free number if another process has that pid."""
    pids = [recording.process.pid for recording in evidence.recordings]
    found: dict[str, int] = {}
    free = max(pids, default=0) + 1
    for recording in evidence.recordings:
        pid = recording.process.pid
        if pid in found.values():
            pid, free = free, free + 1
        found[recording.identity] = pid
    return found


def _events(evidence: JobEvidence, numbers: Mapping[str, int]) -> Iterator[Event]:
    """All trace events, with `ts` in seconds on the clock of the first host."""
    for recording in evidence.recordings:
        ranks = sorted({op.communicator.rank for op in recording.ops if "/" not in op.communicator.name})
        label = f"rank {', '.join(map(str, ranks))} ({recording.identity})" if ranks else recording.identity
        pid = numbers[recording.identity]
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": ranks[0] if ranks else 9999}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": "ops"}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 2, "args": {"name": "events"}}
    for number, group in enumerate(evidence.groups):
        for track in group.tracks.values():
            for op in track.ops:
                yield _slice(evidence, group, track, op, numbers)
        yield from _arrows(number, group, numbers)
    yield from _instants(evidence, numbers)


def _slice(evidence: JobEvidence, group: RankGroup, track: Track, op: OpRecord, numbers: Mapping[str, int]) -> Event:
    arguments: dict[str, Any] = {
        "call": str(op.signature),
        "communicator": group.name,
        "epoch": group.epoch,
        "rank": track.rank,
        "seq": op.seq,
        "step": op.step,
        "bytes": op.nbytes,
        "status": op.status.name.lower(),
    }
    if op.waiting is not None:
        arguments["waited for"] = list(op.waiting.takes + op.waiting.gives)
    if op.failed_ranks:
        arguments["failed ranks"] = list(op.failed_ranks)
    return {
        "ph": "X",
        "name": op.signature.op,
        "cat": "op" if op.status is OpStatus.DONE else "op,failed",
        "pid": numbers[track.recording.identity],
        "tid": 1,
        "ts": track.entered(op),
        "dur": _us(evidence.left(track, op) - track.entered(op)),
        "args": arguments,
    }


def _arrows(number: int, group: RankGroup, numbers: Mapping[str, int]) -> Iterator[Event]:
    """One arrow for each collective, through all ranks in order."""
    for ordinal in sorted({o for track in group.tracks.values() for o in track.collectives}):
        tracks = [track for track in group.tracks.values() if ordinal in track.collectives]
        for place, track in enumerate(tracks if len(tracks) > 1 else []):
            op = track.collectives[ordinal]
            last = place == len(tracks) - 1
            event: Event = {
                "ph": "s" if place == 0 else "f" if last else "t",
                "name": op.signature.op,
                "cat": "collective",
                "id": f"{number}/{ordinal}",
                "pid": numbers[track.recording.identity],
                "tid": 1,
                "ts": track.entered(op),
            }
            if last:
                event["bp"] = "e"
            yield event


def _instants(evidence: JobEvidence, numbers: Mapping[str, int]) -> Iterator[Event]:
    """The events of the members' logs, on the tracks of the members that logged them."""
    hosts: Mapping[str, tuple[int, float]] = {
        r.identity: (numbers[r.identity], evidence.offsets.get(r.process.host, 0.0)) for r in evidence.recordings
    }
    for event in evidence.events:
        where = hosts.get(event.process)
        if where is None or event.kind not in _INSTANTS:
            continue
        pid, offset = where
        extra = {
            name: value for name, value in to_record(event).items() if name not in ("time", "process", "pid", "kind")
        }
        at = event.time + offset
        yield {"ph": "i", "s": "t", "name": event.kind, "pid": pid, "tid": 2, "ts": at, "args": extra}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
