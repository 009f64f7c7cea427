"""The record of what happened: typed events, their sentences, and the lines of logs."""

from __future__ import annotations

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
