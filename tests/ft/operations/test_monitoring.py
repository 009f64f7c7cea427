"""What an operator sees of a job: `holdfast top`, the lines on stderr and in logs, and metrics."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.ft import Timeouts, event_lines, events
from holdfast.ft.diagnosis.jobs import JobState, LastFault, NoSuchJob, ProcessRow, locate
from holdfast.ft.events import Event, stamped
from holdfast.ft.telemetry import event_log, flight
from holdfast.ft.telemetry.event_log import EventLog, EventLogger
from holdfast.ft.telemetry.flight import OpStatus, RecordingState
from holdfast.ft.telemetry.metrics import Metrics, OpTally, ports
from holdfast.harness import LocalCluster
from holdfast.harness.cli.top_screen import render
from support.programs.forked_programs import run_forked, said, said_as_json
from support.waiting import PROGRAM_SECONDS, becomes_true

# -- `holdfast top` shows a job that runs, hangs, lost a rank and ended, and only reads its files


look: Callable[[Path], dict[str, Any]] = partial(said_as_json, "top")
"""The output of `holdfast top --json`."""


def until(directory: Path, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first output for which a condition holds."""
    assert becomes_true(lambda: true(look(directory)), interval=0.05), look(directory)
    return look(directory)


def steps_with_a_gate(session: Any, gate: str) -> None:
    """20 steps; rank 1 of the first epoch waits in step 5 for a file to appear (or its end)."""
    victim = False
    for attempt in session.steps(20):
        victim = victim or (attempt.step == 0 and attempt.rank == 1)
        with attempt:
            while victim and attempt.step == 5 and not Path(gate).exists():
                time.sleep(0.01)
            attempt.comm.all_reduce(torch.ones(8))


def test_a_job_is_shown_while_it_hangs_after_it_lost_a_rank_and_when_it_is_done(tmp_path: Path) -> None:
    options = {"min_size": 3}
    with (
        LocalCluster(3, "shm", spares=1, session=options) as cluster,
        cluster.start(steps_with_a_gate, str(tmp_path / "never")) as job,
    ):
        job.wait_for_spares()
        hung = until(job.directory, lambda said: any(r["waits_for"] == [1] and r["inside"] for r in said["rows"]))
        assert (hung["phase"], hung["members"], hung["backend"], hung["last_fault"]) == ("running", 3, "shm", None)
        assert [row["rank"] for row in hung["rows"]] == [0, 1, 2, None]
        assert [row["state"] for row in hung["rows"]] == ["running", "running", "running", "spare"]
        assert [row["pid"] for row in hung["rows"]][:3] == [job.pid(rank) for rank in range(3)]
        assert hung["rows"][1]["step"] == 5
        assert not hung["rows"][1]["inside"]

        job.kill(1)
        job.results(timeout=PROGRAM_SECONDS)
        done = until(job.directory, lambda said: all(row["state"] == "done" for row in said["rows"]))
        assert (done["phase"], done["step"], done["faults"]) == ("finished", 19, 1)
        fault = done["last_fault"]
        assert fault["epoch"] == hung["epoch"]
        assert 0 < fault["recovery"] < fault["resume"] < 30
        assert len(done["rows"]) == 3

        shown = said("top", job.directory, "--once").output
        assert "finished" in shown
        assert "last fault" in shown


def test_top_runs_live_in_a_terminal_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "p1.jsonl").write_text('{"time":1,"process":"p1","pid":1,"kind":"joined","address":"x"}\n')
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "holdfast.harness.cli.app", "top", str(tmp_path), "--every", "0.05"]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
    os.close(inside)
    try:
        shown = b""
        while b"holdfast top" not in shown:
            shown += os.read(terminal, 4096)
        process.send_signal(2)
        while True:  # the terminal closes when the process has
            try:
                os.read(terminal, 4096)
            except OSError:
                break
        assert process.wait(PROGRAM_SECONDS) == 0
    finally:
        process.kill()
        process.wait(PROGRAM_SECONDS)
        os.close(terminal)


def test_top_writes_nothing_to_the_folder_that_it_watches(tmp_path: Path) -> None:
    """Nor does it make the register of a job that has ended."""
    (tmp_path / "p1.jsonl").write_text('{"time":1,"process":"p1","pid":1,"kind":"joined"}\nhalf a li')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for options in ((), ("--register", f"sqlite://{tmp_path}/register.sqlite")):
        assert said_as_json("top", tmp_path, *options)["phase"] == "unknown"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_logs_are_followed_line_by_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "p1.jsonl"
    tail = event_lines.EventTail(tmp_path)
    process = b'"process":"p1","pid":7'
    log.write_bytes(b'{"time":2,"kind":"b",%b}\n{"time":1,"kind":"a",%b}\n{"time":3,%b,' % (process, process, process))
    assert [event.kind for event in tail.new()] == ["a", "b"]
    assert tail.new() == []
    with log.open("ab") as file:
        file.write(b'"kind":"c"}\nrubbish\n[]\n{"kind":"no time"}\n{"time":4,"kind":"no process"}\n')
    assert [event.kind for event in tail.new()] == ["c"]


def test_the_screen_shows_members_steps_and_failures() -> None:
    rows = (
        ProcessRow(0, "p0", 10, "running", 7, 12.5, "all_reduce(float32, [4], sum)", True, 2.5, (1,)),
        ProcessRow(1, "p1", 11, "stopped", 7, 0.0, "barrier()", False, 2.6),
    )
    fault = LastFault(61.0, 3, "rank 2 (p9) is gone: its process ended", 0.0042, None)
    console = Console(width=110, record=True)
    with console.capture() as shown:
        console.print(render(JobState("job", "running", 4, 2, "shm", 7, 12.5, 1, fault, rows)))
    for words in ("epoch 4", "12.5 steps/s", "all_reduce", "2.5 s", "stopped", "rank 2 (p9) is gone", "in 4.2 ms"):
        assert words in shown.get()
    waiting = ProcessRow(None, "p1", 7, "waits for 2 members", -1, 0.0, "", False, 0.0)
    with console.capture() as shown:
        console.print(render(JobState("job", "forming", 1, 1, "", -1, 0.0, 0, None, (waiting,), needed=2)))
    assert "waits for 2 more" in shown.get() and "waits for 2 members" in shown.get()


def test_jobs_that_end_during_the_search_for_another_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            folder = tmp_path / "holdfast-x" / "job-y"
            folder.mkdir(parents=True)
            (folder / "register.sqlite").touch()
            shutil.rmtree(tmp_path / "holdfast-x")

    with ThreadPoolExecutor(1) as other:
        coming = other.submit(come_and_go)
        try:
            for _ in range(2_000):
                with pytest.raises(NoSuchJob, match="no job of that name"):
                    locate("no-such-job")
        finally:
            over.set()
    coming.result()
    done = said("top", "no-such-job")
    assert (done.exit_code, "no job of that name" in done.output) == (1, True)


def test_the_screen_says_that_processes_wait_for_members() -> None:
    """The start needs a third process; later two of them are needed, and one was killed."""
    times = Timeouts(heartbeat=0.1, suspect=0.5, operation=20.0, rebuild=5.0, join=30.0)
    with LocalCluster(2, session={"size": 3, "min_size": 2, "timeouts": times}) as cluster:
        job = cluster.start(steps_with_a_gate, str(cluster.logs / "gate"))
        said = until(job.directory, lambda said: said["needed"] == 1 and len(said["rows"]) == 2)
        assert said["phase"] == "forming"
        assert [row["state"] for row in said["rows"]] == ["waits for 1 member"] * 2
    with LocalCluster(2, session={"min_size": 2, "timeouts": times}) as cluster:
        job = cluster.start(steps_with_a_gate, str(cluster.logs / "gate"))
        job.wait_for("committed", step=2)
        job.kill(1)
        said = until(job.directory, lambda said: said["needed"] == 1)
        assert [row["state"] for row in said["rows"]] == ["waits for 1 member", "killed"]


# -- metrics: a scrape of a real job's endpoint, beside its flight recordings, and invalid settings


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str) -> Samples:
    """The endpoint's values, by name and labels."""
    assert url.startswith("http://127.0.0.1:")
    text = urllib.request.urlopen(url, timeout=5.0).read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped_steps(session: Any, scraped_at: int) -> Samples:
    """Steps of which the third kills a rank; the survivors scrape themselves near the end."""
    victim, said = False, {}
    for attempt in session.steps(scraped_at + 1):
        victim = victim or (attempt.step == 0 and attempt.rank == 2)
        if attempt.step == scraped_at:
            logged = map(event_lines.to_record, event_lines.read_events(Path(os.environ["HOLDFAST_LOG_DIR"])))
            mine = [event for event in logged if event["process"] == session.identity]
            [url] = [event["url"] for event in mine if event["kind"] == "metrics"]
            said = scrape(url)
        with attempt:
            if attempt.step == 2 and victim:
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            attempt.comm.all_reduce(torch.ones(256))
    return said


LINE = re.compile(r"holdfast (?P<time>\d\d:\d\d:\d\d\.\d{3}) (?P<text>.*)")


def test_a_job_that_lost_a_rank_has_counted_all_recorded_the_ops_of_all_ranks_and_told_its_story_in_few_lines() -> None:
    with (
        LocalCluster(3, "shm", environ={"HOLDFAST_METRICS_PORT": "0", "HOLDFAST_LOG": ""}) as cluster,
        cluster.start(scraped_steps, 5) as job,
    ):
        results = job.results(timeout=PROGRAM_SECONDS)
        recordings = [flight.read(path) for path in flight.find(job.directory / "events")]
        output = "".join(path.read_text() for path in job.directory.glob("process-*.log"))
    for counted in results:
        assert counted["holdfast_members", ()] == 2
        assert counted["holdfast_step", ()] == 4
        assert counted["holdfast_epochs_total", ()] == 2
        assert counted["holdfast_failures_detected_total", ()] == 1
        assert counted["holdfast_rebuild_seconds_count", ()] == 2
        for name in ("detection", "recovery", "resume"):
            assert counted[f"holdfast_{name}_seconds_count", ()] == 1
            assert 0 < counted[f"holdfast_{name}_seconds_sum", ()] < 30
        assert counted["holdfast_recovery_seconds_sum", ()] <= counted["holdfast_resume_seconds_sum", ()]
        ops = counted["holdfast_op_seconds_count", (("op", "all_reduce"),)]
        assert ops == 6  # five steps, one of them twice
        assert counted["holdfast_op_seconds_bucket", (("le", "+Inf"), ("op", "all_reduce"))] == ops
        assert counted["holdfast_op_bytes_total", (("op", "all_reduce"),)] == ops * 1024
        assert counted["holdfast_ops_failed_total", (("op", "all_reduce"),)] == 1
        assert ("holdfast_heartbeats_missed_total", ()) in counted
    killed, *survivors = sorted(recordings, key=lambda recording: recording.state)
    assert [each.state for each in (killed, *survivors)] == [RecordingState.OPEN, *[RecordingState.CLOSED] * 2]
    assert (killed.ops[-1].signature.op, killed.ops[-1].step, killed.step) == ("barrier", 1, 2)
    named = []
    for survivor in survivors:
        assert len({op.communicator.epoch for op in survivor.ops}) == 2
        (failed,) = [op for op in survivor.ops if op.status != OpStatus.DONE]
        assert (failed.signature.op, failed.step) == ("all_reduce", 2)
        named.append(failed.failed_ranks)
    assert (2,) in named and set(named) <= {(2,), ()}, "the other one may hear first that the epoch is over"
    told = [found for line in output.splitlines() if (found := LINE.fullmatch(line))]
    lines = [found["text"] for found in sorted(told, key=lambda found: str(found["time"]))]
    lost = next(number for number, line in enumerate(lines) if "rank 2 is lost" in line or "rank 2 (p" in line)
    story = lines[lost:]
    assert 5 <= len(story) <= 10, "\n".join(lines)
    assert all(re.match(r"rank [01], epoch \d+: ", line) for line in story), "\n".join(story)
    for part in ("begins with 2 members", "the communicator of 2 ranks stands after", "step 2 is committed, "):
        assert "\n".join(story).count(part) == 1, story
    assert "job is finished after step 5" in story[-1]


def metrics(asked: str, tally: OpTally | None = None) -> Metrics:
    return Metrics(asked, "job", EventLog("p1", ""), tally or OpTally(None), lambda: 7)


def test_buckets_count_ops_up_to_their_bound_until_the_server_is_closed() -> None:
    tally = OpTally(None)
    journal = tally.journal("job", 1, 0, 2, "shm")
    for nap in (0.0, 0.0, 0.3):
        journal.enter("barrier", 1, 0, None, None, -1)
        time.sleep(nap)
        journal.leave(None)
    served = metrics("0", tally)
    said = scrape(served.url)
    served.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(served.url, timeout=1.0)
    buckets = [v for (name, labels), v in said.items() if name == "holdfast_op_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert said["holdfast_op_seconds_bucket", (("le", "0.262144"), ("op", "barrier"))] == 2
    assert said["holdfast_op_seconds_bucket", (("le", "+Inf"), ("op", "barrier"))] == 3
    assert said["holdfast_op_seconds_sum", (("op", "barrier"),)] >= 0.3
    assert said["holdfast_heartbeats_missed_total", ()] == 7


def test_each_process_takes_the_first_free_port_of_a_range_and_none_left_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HoldfastError, match=f"no port of {port} is free"):
            metrics(str(port))
        served = metrics(f"{port}-{port + 50}")
        try:
            assert served.url != f"http://127.0.0.1:{port}/metrics"
            assert scrape(served.url)["holdfast_rank", ()] == -1
        finally:
            served.close()


@pytest.mark.parametrize("asked", ["http", "70000", "-1", "10-5", "0-9", "1-2-3", ""])
def test_a_setting_that_names_no_ports_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="HOLDFAST_METRICS_PORT"):
        ports(asked)


def test_numbers_stay_in_the_process_whatever_another_library_has_set(tmp_path: Path) -> None:
    """Otherwise prometheus_client would keep them in files, with the counts of earlier processes of the same number."""
    (tmp_path / "there").mkdir()
    text = """
import sys, urllib.request
from holdfast.ft.events import StepCommitted, ViewInstalled
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.metrics import Metrics, OpTally
events = EventLog("p0")
metrics = Metrics("0", "job", events, OpTally(None), lambda: 0)
events.emit(StepCommitted(step=3, epoch=1))
events.emit(ViewInstalled(epoch=1, members=("p0",), rank=0))
print(urllib.request.urlopen(metrics.url).read().decode())
metrics.close()
"""
    for folder in ("there", "there", "missing"):
        environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / folder)}
        done = run_forked(text, ["program"], environ=environ)
        assert done.returncode == 0, done.stderr
        assert 'holdfast_steps_committed_total{how="normal"} 1.0' in done.stdout
        assert "holdfast_epochs_total 1.0" in done.stdout
        assert 'holdfast_process_info{job="job"' in done.stdout
    assert list((tmp_path / "there").iterdir()) == []


# -- the record of what happened: typed events, the lines of logs, and what an engineer with stderr alone sees


OLD_LINES = [
    b'{"time":1.5,"process":"p1-a","pid":7,"kind":"joined","address":"127.0.0.1:33329"}',
    b'{"time":1.5,"process":"p1-a","pid":7,"kind":"spare","epoch":3,"to":["p2-b"]}',
    b'{"time":1.5,"process":"p1-a","pid":7,"kind":"installed","epoch":4,"members":["p1-a"],"rank":0,"reason":"x"}',
    b'{"time":1.5,"process":"p1-a","pid":7,"kind":"committed","step":12,"epoch":4,"how":"recovered"}',
    b'{"time":1.5,"process":"p1-a","pid":7,"kind":"detected","members":["p2-b"],"evidence":"it ended"}',
    b'{"time":1.5,"process":"p1-a","pid":7,"kind":"condemned","member":"p2-b","evidence":"silent"}',
    b'{"time":1.5,"process":"chaos","pid":7,"kind":"fault","what":"link-cut","number":0,"target":"p2-b","how":"drop"}',
]


@pytest.mark.parametrize("line", OLD_LINES, ids=lambda line: msgspec.json.decode(line)["kind"])
def test_lines_of_earlier_versions_are_read(line: bytes) -> None:
    event, record = event_lines.decode_event(line), msgspec.json.decode(line)
    assert (event.time, event.process, event.pid, event.kind) == (1.5, record["process"], 7, record["kind"])
    assert {**event_lines.to_record(event), **record} == {**event_lines.to_record(event), **record, "kind": event.kind}
    assert type(event) is event_lines.KINDS[record["kind"]] and str(event)


def an_event_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    """Any event of a kind; numbers are as they can be in JSON."""
    return st.builds(
        kind,
        **{
            field.name: _any_of(field.type)
            for field in msgspec.structs.fields(kind)
            if field.name not in ("time", "process", "pid")
        },
    ).map(lambda event: stamped(event, "p1-a", 7, 1.5))


def _any_of(type_: Any) -> st.SearchStrategy[Any]:
    drawn = {float: st.floats(0.0, 1e9), int: st.integers(0, 1 << 40), type(UNSET): st.just(UNSET)}
    match get_origin(type_), get_args(type_):
        case _, () if type_ in drawn:
            return drawn[type_]
        case origin, (item, *_) if origin is tuple:
            return st.lists(_any_of(item), max_size=4).map(tuple)
        case origin, (key, value) if origin is dict:
            return st.dictionaries(_any_of(key), _any_of(value), max_size=4)
        case _, ():
            return st.from_type(type_)
        case _, options:
            return st.one_of(*map(_any_of, options))


@pytest.mark.parametrize("kind", event_lines.KINDS.values(), ids=lambda kind: kind.__name__)
@settings(max_examples=10)  # of each of sixty kinds, which share the types of their fields
@given(data=st.data())
def test_every_kind_is_read_as_it_was_written_and_says_so_in_a_sentence(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(an_event_of(kind))
    assert (
        event_lines.decode_event(event_lines.encode_event(event))
        == event
        == event_lines.event_of(event_lines.to_record(event))
    )
    assert str(event) and type(event).__doc__


def test_an_unknown_kind_keeps_its_fields() -> None:
    line = b'{"kind":"later","time":2.0,"process":"p","pid":1,"depth":3}'
    event = event_lines.decode_event(line)
    assert isinstance(event, event_lines.OtherEvent) and (event.kind, event.fields) == ("later", {"depth": 3})
    assert event_lines.decode_event(event_lines.encode_event(event)) == event


GOOD = event_lines.to_record(stamped(events.StepCommitted(step=3, epoch=2), "p1", 7, 1.5))
BAD: list[dict[str, Any]] = [
    *(
        {name: value for name, value in GOOD.items() if name != missing}
        for missing in ("time", "process", "pid", "kind")
    ),
    {**GOOD, "time": True},
    {**GOOD, "time": "1.5"},
    {**GOOD, "pid": 1.5},
    {**GOOD, "step": "3"},
    {**GOOD, "step": True},
    {name: value for name, value in GOOD.items() if name != "epoch"},
]


@pytest.mark.parametrize("record", BAD, ids=str)
def test_a_record_that_is_no_event_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(CorruptData):
        event_lines.event_of(record)
    with pytest.raises(CorruptData):
        event_lines.decode_event(msgspec.json.encode(record))


@given(st.one_of(st.binary(), st.recursive(st.none() | st.booleans() | st.text(), st.lists).map(msgspec.json.encode)))
def test_any_other_line_is_refused_and_breaks_nothing(line: bytes) -> None:
    with pytest.raises(CorruptData):
        event_lines.decode_event(line)


@given(st.sampled_from(OLD_LINES), st.data())
def test_a_damaged_line_is_an_event_or_refused(line: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(line) - 1))
    damaged = line[:at] + bytes([data.draw(st.integers(0, 255))]) + line[at + 1 :]
    try:
        event = event_lines.decode_event(damaged)
    except CorruptData:
        return
    assert isinstance(event, Event) and isinstance(event.time, float)


@contextmanager
def program(*handlers: logging.Handler) -> Iterator[None]:
    """A program that has set up these handlers, and no other logging."""
    logger, root = logging.getLogger("holdfast"), logging.getLogger()
    before = logger.level, list(logger.handlers), list(root.handlers)
    root.handlers[:], logger.handlers[:] = handlers, []
    logger.setLevel(logging.NOTSET)
    try:
        event_log.set_up()
        yield
    finally:
        logger.setLevel(before[0])
        logger.handlers[:], root.handlers[:] = before[1:]


@pytest.mark.parametrize(
    ("level", "seen"), [("debug", "dwi"), ("", "wi"), ("info", "wi"), ("warning", "w"), ("off", "")]
)
def test_the_level_of_the_lines_can_be_chosen(
    level: str, seen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_LOG", level)
    log, members = EventLogger(named(1)[0]), named(1, 2)
    told = {
        "d": events.StepBegun(step=1, epoch=1),
        "w": events.RegisterUnreachable(reason="no answer"),
        "i": events.StateReceived(step=1, epoch=1, source=2),
    }
    log(installed(1, members, members[0]))
    with program():
        for event in told.values():
            log(event)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("holdfast ") for line in lines)
    assert len(lines) == len(seen)
    assert all(str(told[each]) in "".join(lines) for each in seen)


def test_a_program_with_handlers_of_its_own_gets_the_lines_there(capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.StreamHandler(text := io.StringIO())
    with program(own):
        EventLogger("p1-000001")(events.RegisterUnreachable(reason="no answer"))
    assert capsys.readouterr().err == ""
    assert "the register cannot be reached: no answer" in text.getvalue()


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOG", "loud")
    with pytest.raises(ValueError, match="HOLDFAST_LOG='loud' is none of debug, info, warning, off"):
        event_log.set_up()


# -- which rank tells what


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="holdfast.ft")
    return caplog


def named(*numbers: int) -> tuple[str, ...]:
    return tuple(f"p{number}-{number:06x}" for number in numbers)


def installed(epoch: int, members: tuple[str, ...], identity: str) -> events.ViewInstalled:
    rank = members.index(identity) if identity in members else None
    return events.ViewInstalled(epoch=epoch, members=members, rank=rank, reason="test")


def recover(members: tuple[str, ...], lost: str, following: tuple[str, ...]) -> None:
    """Every member that lives logs the events of one death."""
    for identity in [member for member in members if member != lost]:
        log = EventLogger(identity)
        log(installed(1, members, identity))
        log(events.DeathsDetected(members=(lost,), evidence="its process ended"))
        log(events.EpochRevoked(epoch=1, reason="it is lost"))
        log(installed(2, following, identity))
        log(events.CommunicatorBuilt(epoch=2, seconds=0.004, rank=0, size=len(following)))
        log(events.RecoveryEnded(step=3, epoch=2, seconds=0.1, usual=0.05, joined=0, left=1))


def test_one_member_tells_what_all_learn(lines: pytest.LogCaptureFixture) -> None:
    members = named(*range(500))
    recover(members, members[7], members[:7] + members[8:])
    assert len(lines.messages) == 6
    assert lines.messages[1].startswith("rank 0, epoch 1: rank 7 is lost: its process ended; the survivors")
    assert all(message.startswith("rank 0, ") for message in lines.messages)


def test_the_first_survivor_tells_the_death_of_the_first_rank(lines: pytest.LogCaptureFixture) -> None:
    members = named(1, 2, 3)
    recover(members, members[0], named(9, 2, 3))
    assert [message.partition(":")[0] for message in lines.messages] == ["rank 1, epoch 1"] * 2 + [
        "rank 1, epoch 2"
    ] * 3


def test_a_newcomer_that_becomes_rank_0_tells_only_what_it_alone_knows(lines: pytest.LogCaptureFixture) -> None:
    log, (me, other) = EventLogger(named(9)[0]), named(9, 2)
    log(events.SpareWaits(epoch=1, to=(other,)))
    log(installed(2, (me, other), me))
    log(events.CommunicatorBuilt(epoch=2, size=2))
    log(events.StateReceived(step=4, epoch=2, source=1, bytes=2048, seconds=0.01, via="shm"))
    assert len(lines.messages) == 2
    assert lines.messages[0].startswith(f"spare {me}: this process waits as a spare of epoch 1")
    assert lines.messages[1].startswith("rank 0, epoch 2: this rank has the state after step 4 from rank 1 (2 KiB by")


def test_a_process_writes_no_flood_and_says_how_much_it_left_out(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, members = EventLogger(named(1)[0]), named(1, 2)
    log(installed(1, members, members[0]))
    for _ in range(100):
        log(events.RegisterUnreachable(reason="no answer"))
    assert len(lines.messages) == event_log.MOST_LINES
    monkeypatch.setattr(event_log, "WINDOW", 0.0)
    log._window_ends = 0.0
    log(events.RegisterUnreachable(reason="no answer"))
    assert lines.messages[-2].endswith("61 lines were left out; HOLDFAST_LOG=debug shows all")
