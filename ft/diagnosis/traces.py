"""Traces of all ranks for other tools: Perfetto (`trace`), and torch's analyser of flight recordings (`write_dumps`).

For https://ui.perfetto.dev or chrome://tracing there is a track per rank and an arrow per collective. The format is
Chrome's JSON trace format ("Trace Event Format", Google): times in microseconds, `X` for slices with a duration, `s`,
`t`, `f` for the steps of an arrow, which attach to the slice around them, `i` for instants.

`torchfrtrace FOLDER` analyses one file a rank, in the format of `torch._C._distributed_c10d._dump_fr_trace` (version
2.10): a pickle of plain dicts, which this module writes and never reads. It compares ranks within one process group,
and its groups do not change, so the files hold one epoch: the last one in which an op failed or is still running, else
the newest.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
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


VERSION = "2.10"
PREFIX = "holdfast_rank_"

_LIBRARIES = {"gloo", "nccl", "rccl"}
"""The backends of ours that the analyser knows; it refuses others, so those are called gloo."""

_TORCH_NAMES = {
    "connect": "barrier",
    "window": "new_window",
    "all_gather": "all_gather_v",
    "reduce_scatter": "reduce_scatter_v",
    "all_to_all": "all_to_all_single",
}
"""Ops that have another name in torch, or whose arguments the analyser would check by rules that ours do not have."""

_SAME_NAMES = {
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
    "split",
}

Dump = dict[str, Any]


def write_dumps(evidence: JobEvidence, folder: Path) -> list[Path]:
    """Write a file for each recorded rank of one epoch into `folder`, which is made; returns the files by rank.

    Raises `OSError` if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank, dump in sorted(dumps(evidence).items()):
        paths.append(folder / f"{PREFIX}{rank}")
        paths[-1].write_bytes(pickle.dumps(dump))
    return paths


def dumps(evidence: JobEvidence) -> Mapping[int, Dump]:
    """The content of the files by rank in the epoch's largest communicator."""
    failed = [group.epoch for group in evidence.groups if group.blocked]
    epoch = max(failed or [group.epoch for group in evidence.groups], default=0)
    groups = [group for group in evidence.groups if group.epoch == epoch]
    if not groups:
        return {}
    main = max(groups, key=lambda group: group.size)
    ranks = {track.recording.identity: rank for rank, track in main.tracks.items()}
    unrecorded = itertools.count(main.size)
    for group in groups:
        for track in group.tracks.values():
            if track.recording.identity not in ranks:
                ranks[track.recording.identity] = next(unrecorded)

    entries: dict[int, list[tuple[int, Dump]]] = {rank: [] for rank in ranks.values()}
    configurations: dict[int, Dump] = {rank: {} for rank in ranks.values()}
    for group in groups:
        members = {r: ranks[track.recording.identity] for r, track in group.tracks.items()}
        everyone = [members[r] if r in members else r if group is main else next(unrecorded) for r in range(group.size)]
        first = _first_collective(group)
        for rank, track in group.tracks.items():
            me = members[rank]
            configurations[me][group.name] = _configuration(group.name, group, everyone)
            for op in track.ops:
                if op.signature.collective and op.ordinal >= first:
                    entries[me].append((op.number, _entry(group, track, op, group.name)))
                elif op.signature.op in ("send", "recv"):
                    # torch matches a message among the members of a group: each direction of a pair is one.
                    pair = (rank, op.signature.peer) if op.signature.op == "send" else (op.signature.peer, rank)
                    name = f"{group.name} {pair[0]}->{pair[1]}"
                    configurations[me][name] = _configuration(name, group, [everyone[end] for end in pair])
                    entries[me].append((op.number, _entry(group, track, op, name)))
    return {rank: _dump(configurations[rank], entries[rank]) for rank in entries}


def _first_collective(group: RankGroup) -> int:
    """The first ordinal that all rings still hold: torch's analyser takes an older one for missing elsewhere."""
    wrapped = [track for track in group.tracks.values() if track.recording.ops[0].number > 1 and track.collectives]
    return max((min(track.collectives) for track in wrapped), default=0)


def _configuration(name: str, group: RankGroup, ranks: list[int]) -> Dump:
    return {"name": name, "desc": f"epoch {group.epoch}", "ranks": str(ranks)}


def _dump(configuration: Dump, entries: list[tuple[int, Dump]]) -> Dump:
    ordered = [entry for _, entry in sorted(entries, key=lambda numbered: numbered[0])]
    for number, entry in enumerate(ordered):
        entry["record_id"] = entry["op_id"] = number
    return {
        "version": VERSION,
        "pg_config": configuration,
        "pg_status": {name: _status(ordered, name) for name in configuration},
        "comm_lib_version": "",
        "entries": ordered,
    }


def _status(entries: list[Dump], name: str) -> dict[str, int]:
    mine = [entry for entry in entries if entry["process_group"][0] == name]
    begun = max((entry["collective_seq_id"] for entry in mine), default=-1)
    done = max((entry["collective_seq_id"] for entry in mine if entry["state"] == "completed"), default=-1)
    return {
        "last_enqueued_collective": begun,
        "last_started_collective": begun,
        "last_completed_collective": done,
    }


def _entry(group: RankGroup, track: Track, op: OpRecord, name: str) -> Dump:
    """One op. Its number in the group pairs it with those of other ranks; sizes are those on which ranks must agree."""
    sizes = [list(shape) for shape in op.signature.shapes] or [[]]
    dtypes = [op.signature.dtype]
    library = op.communicator.backend if op.communicator.backend in _LIBRARIES else "gloo"
    left = None if op.left is None else _nanoseconds(track, op.left)
    return {
        "frames": [],
        "pg_id": 0,
        "process_group": (name, f"epoch {group.epoch}"),
        "thread_name": track.recording.identity,
        "thread_id": str(track.recording.process.pid),
        "collective_seq_id": op.ordinal,
        "p2p_seq_id": 0 if op.signature.collective else op.ordinal,
        "profiling_name": f"{library}:{_torch_name(track.rank, op)}",
        "time_created_ns": _nanoseconds(track, op.entered),
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "state": "completed" if op.status is OpStatus.DONE else "started",
        "time_discovered_started_ns": _nanoseconds(track, op.entered),
        "time_discovered_completed_ns": left,
        "retired": op.status is OpStatus.DONE,
        "timeout_ms": 0,
        "is_p2p": not op.signature.collective,
    }


def _torch_name(rank: int, op: OpRecord) -> str:
    """torch's name of an op, with ours behind it where it is another."""
    ours, peer = op.signature.op, op.signature.peer
    if not op.signature.collective:
        # The two members of its group are 0 and 1 in the order of their ranks.
        source, target = (rank, peer) if ours == "send" else (peer, rank)
        lower = int(source > target)
        return f"send {lower}->{1 - lower}" if ours == "send" else f"recv {1 - lower}<-{lower}"
    if ours in _SAME_NAMES:
        return ours
    plain = ours.removesuffix("_object")
    return f"{_TORCH_NAMES.get(plain, plain if plain in _SAME_NAMES else 'barrier')} {ours}"


def _nanoseconds(track: Track, moment: float) -> int:
    """A time of the recording as nanoseconds since 1970."""
    return round((track.recording.wall + moment - track.recording.opened) * 1e9)
