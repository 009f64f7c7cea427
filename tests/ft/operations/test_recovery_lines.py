"""The record of what happened: typed events, the lines of logs, and what an engineer with stderr alone sees."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from holdfast.comms.errors import CorruptData
from holdfast.ft import events
from holdfast.ft.event_lines import KINDS, OtherEvent, decode_event, encode_event, event_of, to_record
from holdfast.ft.events import Event, stamped
from holdfast.ft.telemetry import event_log
from holdfast.ft.telemetry.event_log import EventLogger
from support.programs.forked_programs import run_holdfast

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
    event, record = decode_event(line), msgspec.json.decode(line)
    assert (event.time, event.process, event.pid, event.kind) == (1.5, record["process"], 7, record["kind"])
    assert {**to_record(event), **record} == {**to_record(event), **record, "kind": event.kind}
    assert type(event) is KINDS[record["kind"]] and str(event)


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
    match get_origin(type_), get_args(type_):
        case _, () if type_ is float:
            return st.floats(0.0, 1e9)
        case _, () if type_ is int:
            return st.integers(0, 1 << 40)
        case _, () if type_ is type(UNSET):
            return st.just(UNSET)
        case origin, (item, *_) if origin is tuple:
            return st.lists(_any_of(item), max_size=4).map(tuple)
        case origin, (key, value) if origin is dict:
            return st.dictionaries(_any_of(key), _any_of(value), max_size=4)
        case _, ():
            return st.from_type(type_)
        case _, options:
            return st.one_of(*map(_any_of, options))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
@settings(max_examples=25)  # of each of sixty kinds, which share the types of their fields
@given(data=st.data())
def test_every_kind_is_read_as_it_was_written_and_says_so_in_a_sentence(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(an_event_of(kind))
    assert decode_event(encode_event(event)) == event == event_of(to_record(event))
    assert str(event) and type(event).__doc__


def test_an_unknown_kind_keeps_its_fields() -> None:
    line = b'{"kind":"later","time":2.0,"process":"p","pid":1,"depth":3}'
    event = decode_event(line)
    assert isinstance(event, OtherEvent) and (event.kind, event.fields) == ("later", {"depth": 3})
    assert decode_event(encode_event(event)) == event


GOOD = to_record(stamped(events.StepCommitted(step=3, epoch=2), "p1", 7, 1.5))
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
        event_of(record)
    with pytest.raises(CorruptData):
        decode_event(msgspec.json.encode(record))


@given(st.one_of(st.binary(), st.recursive(st.none() | st.booleans() | st.text(), st.lists).map(msgspec.json.encode)))
def test_any_other_line_is_refused_and_breaks_nothing(line: bytes) -> None:
    with pytest.raises(CorruptData):
        decode_event(line)


@given(st.sampled_from(OLD_LINES), st.data())
def test_a_damaged_line_is_an_event_or_refused(line: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(line) - 1))
    damaged = line[:at] + bytes([data.draw(st.integers(0, 255))]) + line[at + 1 :]
    try:
        event = decode_event(damaged)
    except CorruptData:
        return
    assert isinstance(event, Event) and isinstance(event.time, float)


JOB = """
import os, signal
from holdfast import ft

with ft.Session(min_size=2) as session:
    for attempt in session.steps(6):
        with attempt:
            if attempt.step == 3 and attempt.rank == 2 and attempt.comm.size == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            attempt.comm.barrier()
"""
LINE = re.compile(r"\[\d\] holdfast \d\d:\d\d:\d\d\.\d{3} (?P<text>.*)")


def test_a_job_that_loses_a_rank_tells_its_story_in_few_lines(tmp_path: Path) -> None:
    """One of three ranks is killed."""
    (tmp_path / "job.py").write_text(JOB)
    environ = {name: value for name, value in os.environ.items() if name != "HOLDFAST_LOG"}
    done = run_holdfast("run", "-n", "3", tmp_path / "job.py", environ=environ, timeout=240)
    lines = [found["text"] for line in done.stdout.splitlines() if (found := LINE.fullmatch(line))]
    lost = next(number for number, line in enumerate(lines) if "rank 2 is lost" in line or "rank 2 (p" in line)
    story = lines[lost:]
    assert 5 <= len(story) <= 10, "\n".join(lines)
    assert all(re.match(r"rank [01], epoch \d+: ", line) for line in story), "\n".join(story)
    told = "\n".join(story)
    for part in ("begins with 2 members", "the communicator of 2 ranks stands after", "step 3 is committed, "):
        assert told.count(part) == 1, told
    assert "job is finished after step 5" in story[-1]


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
