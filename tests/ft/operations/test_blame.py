"""The flight recorder, and `holdfast blame`, which finds the suspect in the recordings of generated and real jobs."""

from __future__ import annotations

import json
import logging
import os
import random
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.flight_recorder import fr_trace

from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.comms.transport.base import Peer
from holdfast.ft.diagnosis import evidence
from holdfast.ft.diagnosis.analyse import analyse
from holdfast.ft.diagnosis.evidence import JobEvidence, ProcessState, assemble
from holdfast.ft.diagnosis.jobs import NoSuchJob, locate
from holdfast.ft.diagnosis.traces import PREFIX, trace, write_dumps
from holdfast.ft.events import Event, StepBegun
from holdfast.ft.telemetry import flight
from holdfast.ft.telemetry.flight import BadRecording, OpStatus, RecordingState, Signature, decode, find, read
from holdfast.ft.telemetry.flight.recorder import FlightRecorder, open_recorder
from support.blame_cases import FAULTS, KINDS, ModelCall, ModelWorld, generated, injected
from support.event_records import an_event
from support.programs.forked_programs import said, said_as_json
from support.waiting import PATIENCE

SUM = ModelCall("all_reduce", (4,), "sum")
ODD = ModelCall("all_reduce", (5,), "sum")
TREE = ModelCall("broadcast", (3,), peer=0)


def job(
    folder: Path,
    size: int,
    steps: int,
    *,
    calls: Sequence[ModelCall] = (SUM,),
    seconds: Sequence[float] = (),
    clocks: list[float] | None = None,
    capacity: int = 64,
    **faults: Any,
) -> JobEvidence:
    """The evidence of a modelled job: `steps` steps of these calls, and of 10 ms of computing a rank unless given."""
    world = ModelWorld(size, random.Random(1), latency=1e-5, **faults)
    for step in range(steps):
        world.compute(seconds or [0.01] * size)
        if not all(world.run([call] * size, step) for call in calls):
            break
    hosts = ["one host" if clocks is None else f"host {rank}" for rank in range(size)]
    clocks = clocks or [1000.0] * size
    paths = world.write(folder, hosts, clocks, waits=True, capacity=capacity)
    recordings = [read(path) for path in paths]
    return assemble(recordings, {r.identity: ProcessState.RUNNING for r in recordings}, [], clocks[0] + 100.0)


def barrier(
    recorder: FlightRecorder, rank: int, *, name: str = "job", epoch: int = 1, size: int = 2, left: bool = True
) -> Any:
    """Record a barrier of a communicator over shm; returns its journal."""
    journal = recorder.journal(name, epoch, rank, size, "shm")
    journal.enter("barrier", 1, 0, None, None, -1)
    if left:
        journal.leave(None)
    return journal


def recorder_of(folder: Path, rank: int = 1, **options: Any) -> FlightRecorder:
    return FlightRecorder(folder / f"p{rank}.flight", f"p{rank}", "job", **options)


def evidence_of(folder: Path, now: float = 1e6, events: Sequence[Event] = (), **gone: ProcessState) -> JobEvidence:
    """The evidence of the recordings in a folder, of processes which run."""
    recordings = [read(path) for path in find(folder)]
    return assemble(recordings, {each.identity: ProcessState.RUNNING for each in recordings} | gone, list(events), now)


def detected(evidence: str, **fields: Any) -> Event:
    """What p0 reports of p1."""
    return an_event("detected", "p0", members=["p1"], evidence=evidence, **fields)


# -- blame


@pytest.mark.parametrize("seeds", [range(1000, 1025), pytest.param(range(400), marks=pytest.mark.thorough)], ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_the_right_rank_comes_first_in_generated_cases(kind: str, seeds: range) -> None:
    judged = [generated(kind, seed) for seed in seeds]
    wrong = [(case.name, case.first) for case in judged if not case.right]
    assert len(wrong) <= len(judged) // 100, wrong


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (0, 2, 3, 4))])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_right_rank_comes_first_in_a_real_job(fault: str, seed: int) -> None:
    case = injected(fault, seed)
    assert case.right, f"{case.truth} was taken for {case.first}"


def test_a_healthy_job_has_no_suspect(tmp_path: Path) -> None:
    assert analyse(job(tmp_path, 4, 20)) == []


@pytest.mark.parametrize("steps", [4, 40])
def test_a_rank_that_was_late_for_few_ops_is_less_certain_than_any_mismatch(tmp_path: Path, steps: int) -> None:
    """A busy machine stops each rank now and then."""
    (suspect,) = analyse(job(tmp_path, 2, steps, seconds=(0.01, 0.03)))
    assert (suspect.kind, suspect.rank) == ("slow", 1)
    assert (suspect.score >= 0.6) == (steps > 4)


def test_a_rank_missing_from_an_op_is_named_with_its_last_op(tmp_path: Path) -> None:
    (suspect, *_) = analyse(job(tmp_path, 4, 20, dead_after={2: (7, -1)}))
    assert (suspect.kind, suspect.rank) == ("hang", 2)
    assert "the last that rank 2 did was to leave all_reduce(float32, [4], sum) (collective 7, op 7) in step 6" in (
        suspect.evidence
    )


def test_clocks_of_hosts_are_aligned_by_their_common_ops(tmp_path: Path) -> None:
    """The clocks differ by hours; the ops take 20 us, so the offsets are known to about that."""
    evidence = job(tmp_path, 3, 50, clocks=[1000.0, 9000.0, 50.0])
    assert evidence.offsets["host 0"] == 0
    assert evidence.offsets["host 1"] == pytest.approx(-8000.0, abs=1e-3)
    assert evidence.offsets["host 2"] == pytest.approx(950.0, abs=1e-3)


def test_a_receive_whose_message_was_sent_shows_the_link(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    for rank, op in enumerate(["send", "recv"]):
        journal = recorder_of(tmp_path, rank, now=lambda: 1.0).journal("job", 1, rank, 2, "ucx")
        for number in range(3):
            journal.enter(op, number, 8, tensor, 0, 1 - rank)
            if op == "send" or number < 2:
                journal.leave(None)
    (suspect, *_) = analyse(evidence_of(tmp_path, 100.0))
    assert (suspect.kind, suspect.rank, suspect.to) == ("cut", 0, 1)


def test_a_rank_whose_recording_is_read_before_the_others_is_not_behind_them(tmp_path: Path) -> None:
    clock = 1.0
    recorders = [recorder_of(tmp_path, rank, now=lambda: clock) for rank in range(2)]
    journals = [recorder.journal("job", 1, rank, 2, "shm") for rank, recorder in enumerate(recorders)]

    def barriers(first: int, last: int, error: Exception | None = None) -> None:
        for number in range(first, last):
            for journal in journals:
                journal.enter("barrier", number, 0, None, None, -1)
                journal.leave(error)

    barriers(1, 4)
    early = read(tmp_path / "p0.flight")
    clock = 2.0
    barriers(4, 8)
    barriers(8, 9, Mismatch("of another op"))
    recordings, lives = [early, read(tmp_path / "p1.flight")], dict.fromkeys(("p0", "p1"), ProcessState.RUNNING)
    assert analyse(assemble(recordings, lives, [], 1.5)) == []
    assert [finding.rank for finding in analyse(assemble(recordings, lives, [], 3.0))] == [0]


def test_nothing_counts_that_came_after_the_question(tmp_path: Path) -> None:
    """The log would tell of an end whose cause the recordings do not tell yet."""
    clock = 1.0
    recorders = [recorder_of(tmp_path, rank, now=lambda: clock) for rank in range(2)]
    journals = [recorder.journal("job", 1, rank, 2, "shm") for rank, recorder in enumerate(recorders)]
    for journal in journals:
        journal.enter("barrier", 1, 0, None, None, -1)
    clock = 2.0
    for journal in journals:
        journal.leave(None)
    recorders[1].close("StepFailed")
    said = detected("it left: StepFailed", time=2.0)
    assert analyse(evidence_of(tmp_path, 1.5, [said], p1=ProcessState.GONE)) == []
    assert analyse(evidence_of(tmp_path, 3.0, [said], p1=ProcessState.GONE))


def test_a_process_that_ends_in_order_between_two_looks_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_of(tmp_path)
    barrier(recorder, 1)

    def gone_in_order(process: Peer) -> ProcessState:
        recorder.close()
        return ProcessState.GONE

    monkeypatch.setattr(evidence, "life", gone_in_order)
    assert analyse(evidence.gather(tmp_path, time.monotonic())) == []


def test_a_killed_rank_is_found_long_after_the_survivors_continued(tmp_path: Path) -> None:
    """The survivors' rings hold no record of its epoch any more."""
    for rank, epoch in enumerate([2, 1]):
        barrier(recorder_of(tmp_path, rank), rank, epoch=epoch, size=3 - epoch)
    (suspect,) = analyse(evidence_of(tmp_path, p1=ProcessState.GONE))
    assert (suspect.kind, suspect.rank, suspect.epoch) == ("crash", 1, 1)


def test_a_finding_is_reported_once(tmp_path: Path) -> None:
    """The evidence is the members' own reports; one death in two communicators is one suspect."""
    for rank in range(2):
        recorder = recorder_of(tmp_path, rank)
        for name in ("job", "job/pair"):
            barrier(recorder, rank, name=name, left=rank == 1 and name == "job")
    said = detected("its process (pid 7) ended")
    suspects = analyse(evidence_of(tmp_path, 1e6, [said], p1=ProcessState.GONE))
    crashes = [suspect for suspect in suspects if suspect.kind == "crash"]
    assert [suspect.process for suspect in crashes] == ["p1"]
    assert crashes[0].evidence.count("process") == 1


def test_a_mismatch_is_reported_after_its_ops_are_overwritten(tmp_path: Path) -> None:
    """The rank that left because of it reported the mismatch; the others overwrote their records of it."""
    for rank in range(2):
        barrier(recorder_of(tmp_path, rank), rank)
    said = detected("it left: Mismatch: rank 0 called broadcast as op 9, rank 1 all_gather", errors=["Mismatch"])
    (first, *_) = analyse(evidence_of(tmp_path, 1e6, [said]))
    assert (first.kind, first.rank) == ("mismatch", 1)
    assert "rank 0 called broadcast as op 9" in first.evidence


# -- the trace


def test_the_trace_has_one_track_per_rank_and_arrows_between_matching_ops(tmp_path: Path) -> None:
    """Chrome's trace format: every arrow has one start and one end, each inside of a slice of its track.

    It begins with the first entry of an event log, before the first op.
    """
    evidence, early = job(tmp_path, 3, 5), an_event("installed", "p0", 5.0, members=["p0"])
    whole = assemble(evidence.recordings, evidence.lives, [early], evidence.now)
    events = json.loads(json.dumps(trace(whole)))["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) == 0.0
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0 (p0)", "rank 1 (p1)", "rank 2 (p2)"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 3 * 5
    assert all(e["dur"] >= 0 and e["args"]["status"] == "done" for e in slices)
    arrows = [e for e in events if e["ph"] in "stf"]
    by_id: dict[str, list[dict[str, Any]]] = {}
    for arrow in arrows:
        by_id.setdefault(arrow["id"], []).append(arrow)
        assert any(
            s["pid"] == arrow["pid"] and s["ts"] <= arrow["ts"] <= s["ts"] + s["dur"] and s["name"] == arrow["name"]
            for s in slices
        )
    assert len(by_id) == 5
    assert all("".join(step["ph"] for step in steps) == "stf" for steps in by_id.values())


def slices_of(evidence: JobEvidence) -> list[dict[str, Any]]:
    return [event for event in trace(evidence)["traceEvents"] if event["ph"] == "X"]


def test_the_open_ops_of_a_job_that_has_ended_end_with_it(tmp_path: Path) -> None:
    """A day after the job, which took less than a second."""
    alive = job(tmp_path, 2, 20, dead_after={1: (7, -1)})
    ended = assemble(alive.recordings, dict.fromkeys(alive.lives, ProcessState.GONE), [], alive.now + 86_400)
    assert max(each["ts"] + each["dur"] for each in slices_of(ended)) < 1e6
    assert max(finding.seconds for finding in analyse(ended)) < 1.0
    assert max(each["dur"] for each in slices_of(alive)) > 50e6, "a living rank is inside of it until now"


def test_recordings_of_containers_with_one_pid_have_tracks_of_their_own(tmp_path: Path) -> None:
    evidence = job(tmp_path, 3, 5, clocks=[1000.0, 9000.0, 50.0])
    alike = [
        msgspec.structs.replace(each, process=msgspec.structs.replace(each.process, pid=1))
        for each in evidence.recordings
    ]
    events = trace(assemble(alike, evidence.lives, [], evidence.now))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0 (p0)", "rank 1 (p1)", "rank 2 (p2)"]
    assert {event["pid"]: event["args"]["rank"] for event in events if event["ph"] == "X"} == {
        pid: int(name.split()[1]) for pid, name in names.items()
    }


@pytest.mark.parametrize(
    "content",
    [
        b'["not", "an", "object"]\n{}\n',
        b'{"time": "noon", "kind": "installed"}\n',
        b'{"time": NaN, "process": "p", "pid": 1, "kind": "x"}\n',
        b"{" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b'{"time": 1.0, "process": "p", "pid": 1, "kind": "detected", "members": 7}\n',
    ],
    ids=["list", "text", "nan", "deep", "bytes", "members"],
)
def test_an_invalid_log_is_named_and_skipped(content: bytes, tmp_path: Path) -> None:
    job(tmp_path, 2, 5, dead_after={1: (3, -1)})
    (tmp_path / "foreign.jsonl").write_bytes(content)
    (tmp_path / "folder.jsonl").mkdir()
    result = said("blame", tmp_path)
    assert result.exit_code == 0, result.output
    assert "foreign.jsonl: line 1 is no event of a job" in result.stdout
    assert "folder.jsonl: Is a directory" in result.stdout
    assert "rank 1" in result.stdout


# -- the command


def test_the_command_names_the_suspect_and_what_it_could_not_read_and_writes_a_trace(tmp_path: Path) -> None:
    """The recordings of a job in which rank 1 died, and a file that is not a recording."""
    for rank in range(3):
        journal = barrier(recorder_of(tmp_path, rank), rank, epoch=4, size=3)
        if rank != 1:
            journal.enter("all_reduce", 2, 8, torch.ones(2), "sum", -1)
            journal.leave(PeerFailed([1], "gone"))
    (tmp_path / "p3.flight").write_bytes(b"no recording")
    shown = said("blame", tmp_path)
    assert shown.exit_code == 0
    assert all(words in shown.output for words in ("rank 1", "crash", "not read"))
    told = said_as_json("blame", tmp_path, "--perfetto", tmp_path / "trace.json")
    assert [(s["kind"], s["rank"], s["epoch"]) for s in told["suspects"]] == [("crash", 1, 4)]
    assert len(told["not_read"]) == 1
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 5


def test_a_folder_without_a_job_is_reported_as_an_error(tmp_path: Path) -> None:
    assert said("blame", tmp_path).exit_code == 1
    with pytest.raises(NoSuchJob):
        locate(str(tmp_path))


# -- torch's own analyser reads the same recordings


def torch_says(evidence: JobEvidence, folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What torch's analyser prints about the recordings."""
    write_dumps(evidence, folder)
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(folder)])
    return caplog.text


@pytest.mark.parametrize("capacity", [64, 16], ids=["all ops", "rings that wrapped"])
@pytest.mark.parametrize("victim", range(4))
def test_both_name_the_rank_that_is_missing_from_a_collective(
    tmp_path: Path, victim: int, capacity: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 31 collectives in all, it does not come to the last."""
    hung = job(tmp_path, 4, 16, calls=(SUM, TREE), capacity=capacity, dead_after={victim: (30, -1)})
    said = torch_says(hung, tmp_path / "fr", caplog)
    assert (analyse(hung)[0].kind, analyse(hung)[0].rank) == ("hang", victim)
    assert said.count("Not all ranks joining collective, sequence number: 31") == 1
    assert f"missing ranks: {{{victim}}}" in said


def test_both_name_the_rank_whose_shape_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = ModelWorld(3, random.Random(2), latency=1e-5)
    for step in range(5):
        world.run([SUM] * 3, step)
    world.dead_after = dict.fromkeys(range(3), (5, 0))
    world.run([SUM, SUM, ODD], 5)
    world.write(tmp_path, ["h"] * 3, [0.0] * 3, waits=False, capacity=64)
    job = evidence_of(tmp_path)
    said = torch_says(job, tmp_path / "fr", caplog)
    assert (analyse(job)[0].kind, analyse(job)[0].rank) == ("mismatch", 2)
    assert "Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH" in said
    assert "Culprit rank 1" not in said


def test_messages_are_matched_by_direction_and_groups_by_their_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both directions of a pair, ops of every other name, a subgroup, and one send that nobody receives."""
    tensor = torch.ones(2)
    for rank in range(3):
        recorder = recorder_of(tmp_path, rank)
        journal = recorder.journal("job", 1, rank, 3, "shm")
        for op in ("connect", "window", "all_gather_object", "broadcast_object", "all_to_all", "unheard_of"):
            journal.enter(op, 0, 8, tensor if op == "window" else None, None, -1)
            journal.leave(None)
        if rank:
            for op in ("send", "recv") if rank == 1 else ("recv", "send"):
                journal.enter(op, 0, 8, tensor, 0, 3 - rank)
                journal.leave(None)
            barrier(recorder, rank - 1, name="job/1-2.0")
        if rank == 2:
            journal.enter("send", 0, 8, tensor, 0, 0)
    said = torch_says(evidence_of(tmp_path), tmp_path / "fr", caplog)
    assert said.count("Not all ranks joining collective") == 1
    assert "missing ranks: {0}" in said
    assert "errors" not in said


def test_the_command_writes_a_file_a_rank_and_says_when_it_cannot(tmp_path: Path) -> None:
    job(tmp_path, 4, 5)
    outcome = said("blame", tmp_path, "--torch-trace", tmp_path / "fr")
    assert outcome.exit_code == 0, outcome.output
    assert sorted(path.name for path in (tmp_path / "fr").iterdir()) == [f"{PREFIX}{rank}" for rank in range(4)]
    (tmp_path / "a file").write_text("")
    outcome = said("blame", tmp_path, "--torch-trace", tmp_path / "a file")
    assert outcome.exit_code == 1
    assert "cannot be written" in outcome.output


# -- the flight recorder: its records outlive the process, and damaged files are refused

TENSOR = torch.ones(2, 3)


def test_an_op_is_read_back_as_it_was_called(tmp_path: Path) -> None:
    made = recorder_of(tmp_path)
    made.at_step(StepBegun(step=7, epoch=1))
    journal = made.journal("job", epoch=3, rank=1, size=4, backend="shm")
    journal.enter("all_reduce", 12, TENSOR.nbytes, TENSOR, "sum", -1)
    journal.leave(None)
    (op,) = read(made.path).ops
    assert str(op.signature) == "all_reduce(float32, [2, 3], sum)"
    assert (op.seq, op.ordinal, op.step, op.nbytes, op.status) == (12, 1, 7, 24, OpStatus.DONE)
    assert (op.communicator.name, op.communicator.epoch, op.communicator.rank, op.communicator.size) == ("job", 3, 1, 4)
    assert op.left is not None and 0 <= op.left - op.entered < 1


def test_an_unfinished_op_is_recorded_with_the_ranks_that_it_waits_for(tmp_path: Path) -> None:
    journal = recorder_of(tmp_path).journal("job", 1, 0, 4, "ucx")
    journal.enter("broadcast", 1, 8, TENSOR, None, 2)
    journal.waits([2], gives=[1, 3], rounds=5)
    (op,) = read(tmp_path / "p1.flight").ops
    assert (op.status, op.left, op.signature.peer) == (OpStatus.INSIDE, None, 2)
    assert op.waiting is not None
    assert (op.waiting.takes, op.waiting.gives, op.waiting.rounds) == ((2,), (1, 3), 5)


@pytest.mark.parametrize(
    ("error", "status", "ranks"),
    [
        (PeerFailed([2], "gone"), OpStatus.PEER_FAILED, (2,)),
        (OpTimeout("barrier", 1, 0.5, [0, 3]), OpStatus.TIMED_OUT, (0, 3)),
        (Revoked(1), OpStatus.REVOKED, ()),
        (Mismatch("no"), OpStatus.MISMATCH, ()),
        (KeyboardInterrupt(), OpStatus.ERROR, ()),
    ],
)
def test_a_failed_op_is_recorded_with_its_error_and_ranks(
    tmp_path: Path, error: BaseException, status: OpStatus, ranks: tuple[int, ...]
) -> None:
    barrier(recorder_of(tmp_path), 0, size=4, left=False).leave(error)
    (op,) = read(tmp_path / "p1.flight").ops
    assert (op.status, op.failed_ranks) == (status, ranks)


def test_the_ring_keeps_the_last_ops_and_the_last_communicators(tmp_path: Path) -> None:
    made = recorder_of(tmp_path, capacity=16)
    for epoch in range(1, 400):
        barrier(made, 0, epoch=epoch, size=1)
    ops = read(made.path).ops
    assert [op.communicator.epoch for op in ops] == list(range(384, 400))
    assert [op.number for op in ops] == list(range(384, 400))


def test_collectives_are_counted_apart_from_messages_to_each_peer(tmp_path: Path) -> None:
    journal = recorder_of(tmp_path).journal("job", 1, 0, 4, "shm")
    for seq, (op, peer) in enumerate([("send", 1), ("barrier", -1), ("send", 2), ("send", 1), ("barrier", -1)]):
        journal.enter(op, seq, 0, None, 0 if op == "send" else None, peer)
        journal.leave(None)
    assert [op.ordinal for op in read(tmp_path / "p1.flight").ops] == [1, 1, 1, 2, 2]


def test_calls_beyond_the_text_capacity_lose_only_their_shapes(tmp_path: Path) -> None:
    journal = recorder_of(tmp_path, text_bytes=256).journal("job", 1, 0, 1, "shm")
    for n in range(50):
        journal.enter("all_reduce", n, n, torch.empty(n), "sum", -1)
        journal.leave(None)
    ops = read(tmp_path / "p1.flight").ops
    assert ops[0].signature == Signature("all_reduce", "float32", ((0,),), "sum")
    assert ops[-1].signature == Signature("all_reduce")
    assert ops[-1].nbytes == 49
    journal.enter("send", 50, 4, torch.empty(1), 7, 0)
    assert read(tmp_path / "p1.flight").ops[-1].signature == Signature("send")
    assert read(tmp_path / "p1.flight").ops[-1].ordinal == 1


@pytest.mark.parametrize("wrong", [None, 1])
def test_a_rank_that_has_no_room_for_arguments_is_not_taken_for_one_that_differs(
    tmp_path: Path, wrong: int | None
) -> None:
    """Rank 2 has replaced a dead one: its recording has room."""
    for rank in range(3):
        recorder = recorder_of(tmp_path, rank, text_bytes=1024)
        if rank < 2:
            before = recorder.journal("default", 1, rank, 3, "shm")
            for n in range(50):
                before.enter("all_reduce", n, n, torch.empty(n), "sum", -1)
                before.leave(None)
        journal = recorder.journal("default", 2, rank, 3, "shm")
        for n in range(100, 103):
            journal.enter("barrier" if rank == wrong and n == 102 else "all_reduce", n, n, torch.empty(n), "sum", -1)
            journal.leave(None)
    mismatches = [finding for finding in analyse(evidence_of(tmp_path)) if finding.kind == "mismatch"]
    assert [finding.rank for finding in mismatches] == ([] if wrong is None else [wrong])


def test_the_file_is_the_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    made = recorder_of(tmp_path)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        recorder_of(tmp_path)
    assert read(made.path).state == RecordingState.OPEN
    made.close("ValueError: no")
    assert (read(made.path).state, read(made.path).note) == (RecordingState.FAILED, "ValueError: no")


def test_recording_is_off_without_a_folder_to_write_to_or_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HOLDFAST_LOG_DIR", raising=False)
    assert open_recorder("p1", "job") is None
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOLDFAST_LOG_DIR", str(tmp_path / "file"))
    assert open_recorder("p1", "job") is None
    assert "records no ops" in caplog.text
    monkeypatch.setenv("HOLDFAST_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("HOLDFAST_RECORD", "0")
    assert open_recorder("p1", "job") is None
    monkeypatch.delenv("HOLDFAST_RECORD")
    assert open_recorder("p1", "job") is not None
    assert find(tmp_path / "logs") == [tmp_path / "logs" / "p1.flight"]


def test_a_recording_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    """Each record that the reader accepts is consistent: ordered times, and fields of one op."""
    made = recorder_of(tmp_path, capacity=64)
    over = threading.Event()

    def write() -> None:
        journal = made.journal("job", 1, 0, 1, "shm")
        number = 0
        while not over.is_set():
            number += 1
            journal.enter("all_reduce", number, 3 * number, TENSOR, "sum", -1)
            journal.leave(None)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        for _ in range(100):
            for op in read(made.path).ops:
                seen += 1
                assert op.seq == op.ordinal == op.number
                assert op.nbytes == 3 * op.number
                assert op.left is None or op.left >= op.entered
    finally:
        over.set()
        writer.join()
    assert seen > 100


# -- damaged recordings


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small recording with ops of all kinds."""
    made = recorder_of(tmp_path_factory.mktemp("recorded"), capacity=8, text_bytes=512)
    journal = made.journal("job", 1, 2, 4, "shm")
    for op, error in [("all_reduce", None), ("barrier", PeerFailed([1], "gone")), ("broadcast", Revoked(1))]:
        journal.enter(op, 1, 24, TENSOR, "sum", 3)
        journal.leave(error)
    journal.enter("all_gather", 4, 24, (TENSOR, TENSOR), None, -1)
    journal.waits([1], [3], 2)
    return made.path.read_bytes()


@given(st.data(), st.binary(max_size=300))
def test_a_recording_that_was_cut_short_and_noise_are_refused(
    recorded: bytes, data: st.DataObject, noise: bytes
) -> None:
    cut = recorded[: data.draw(st.integers(0, len(recorded) - 1))]
    as_long = (noise * (len(recorded) // len(noise) + 1))[: len(recorded)] if noise else noise
    for wrong in (cut, as_long):
        with pytest.raises(BadRecording):
            decode(wrong, wrong, wrong)


@given(st.data())
def test_a_damaged_recording_is_refused_or_reads_as_one(recorded: bytes, data: st.DataObject) -> None:
    """Any change of bytes gives a recording or `BadRecording`, and no other error."""
    damaged = bytearray(recorded)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1) | st.sampled_from(range(flight.NOTE_AT)))
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        recording = decode(bytes(damaged), bytes(damaged), bytes(damaged))
    except BadRecording:
        return
    assert len(recording.ops) + recording.torn <= recording.capacity


def _patched(recorded: bytes, at: int, value: bytes) -> bytes:
    return recorded[:at] + value + recorded[at + len(value) :]


def test_an_unknown_version_is_refused_by_its_number(recorded: bytes) -> None:
    newer = _patched(recorded, 8, (99).to_bytes(4, "little"))
    with pytest.raises(BadRecording, match="version 99; this holdfast reads 1"):
        decode(newer, newer, newer)


def test_an_op_that_is_being_written_is_left_out_and_counted(recorded: bytes) -> None:
    assert len(decode(recorded, recorded, recorded).ops) == 4
    torn = _patched(recorded, flight.ring_at(512), (9).to_bytes(8, "little"))
    recording = decode(torn, torn, torn)
    assert (len(recording.ops), recording.torn) == (3, 1)


def test_files_that_cannot_be_recordings_are_refused_unread(tmp_path: Path, recorded: bytes) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("empty", "huge"):
        (tmp_path / name).touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    for name in ("missing", "folder", "pipe", "empty", "huge"):
        path = tmp_path / name
        began = time.monotonic()
        with pytest.raises(BadRecording) as refused:
            read(path)
        assert isinstance(refused.value, HoldfastError)
        assert time.monotonic() - began < PATIENCE
