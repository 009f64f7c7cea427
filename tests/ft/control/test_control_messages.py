"""Messages between members and between their detectors: received as they were sent, or refused as a whole."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData, OpTimeout
from holdfast.comms.plugins.registry import registry
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.detectors.watch import Detectors
from holdfast.ft.membership import events
from holdfast.ft.membership.view import Job, Member, View, ViewDelta
from holdfast.ft.node import messages
from holdfast.ft.ports import OpPosition
from support.mutations import damages, mutated
from support.views import detector_context

THIS = this_process()
GONE = 1 << 22
"""A process id that no process has."""

MEMBERS = (
    Member("p0", "x:1", THIS),
    Member("p1", "x:1", Peer(THIS.host, GONE, 1)),
    Member("p2", "x:1", Peer("elsewhere", GONE, 1)),
    Member("p3", "x:1", Peer("elsewhere", GONE + 1, 1)),
)
VIEW = View(3, "running", MEMBERS, Job("job", 4, 1, 1, ("gloo",), "gloo"), "test")
ME = MEMBERS[0]
CHANGE = ViewDelta(4, "running", (0,), ((1, ME),), (ME,), "p1 died")

words, epochs = st.text(max_size=20), st.integers(1, 2**62)
deaths = st.lists(st.builds(events.Death, words, words, words), max_size=4).map(tuple)
items = st.dictionaries(words, st.binary(max_size=40), max_size=4)
SENT: dict[str, st.SearchStrategy[messages.Message]] = {
    "beat": st.builds(messages.Beat, epochs),
    "install": st.just(events.ViewRead(VIEW)),
    "change": st.just(events.ViewDeltaReceived(CHANGE)),
    "spare": st.just(events.SpareAnnounced(ME)),
    "deaths": st.builds(events.ProvenDeaths, deaths),
    "leave": st.builds(messages.Farewell, words, words),
    "share": st.builds(messages.Share, epochs, items),
    "suspect": st.builds(
        messages.Suspicions,
        st.lists(st.builds(events.Suspicion, words, words, words, epochs), max_size=3).map(tuple),
        st.lists(st.builds(events.Cleared, words, words, epochs), max_size=3).map(tuple),
    ),
    "detect": st.builds(messages.DetectorMessage, st.binary(max_size=40)),
}


def listening(heard: list[Any]) -> dict[str, Callable[[str, bytes], bytes]]:
    """Handlers that record what they receive."""
    return messages.handlers(lambda peer, message: heard.append((peer, message)))


@pytest.mark.parametrize("kind", SENT)
@given(data=st.data())
def test_a_notice_is_received_as_it_was_sent(kind: str, data: st.DataObject) -> None:
    message = data.draw(SENT[kind])
    name, body = messages.notice(message)
    heard: list[Any] = []
    assert listening(heard)[name]("p9", body) == b""
    assert (name, heard) == (kind, [("p9", message)])


@pytest.mark.parametrize("kind", SENT)
@given(data=st.data(), damage=damages | st.binary(max_size=100))
def test_a_damaged_notice_and_any_bytes_are_decoded_or_refused(
    kind: str, data: st.DataObject, damage: tuple[str, int, int] | bytes
) -> None:
    sent = data.draw(SENT[kind])
    body = damage if isinstance(damage, bytes) else b"".join(mutated([messages.notice(sent)[1]], *damage))
    heard: list[Any] = []
    try:
        listening(heard)[kind]("p9", body)
    except CorruptData as error:
        assert not heard
        assert "p9" in str(error)
        return
    assert [type(message) for _, message in heard] == [type(sent)]


# -- messages between detectors


NAMES = ["", "pidfd", "heartbeat", "observers", "transport", "progress", "nobody's"]
IDS = [member.id for member in MEMBERS]


class DetectorSet:
    """The detectors of a process, without the kernel's. `said` went to others, `told` to its membership."""

    def __init__(self, rank: int) -> None:
        self.said: list[tuple[str | None, bytes]] = []
        self.told: list[Any] = []
        self._loop = asyncio.new_event_loop()
        told = dict.fromkeys(("tell", "stop", "resign", "note"), self.told.append)
        context = detector_context(MEMBERS[rank], self._loop, place=lambda: OpPosition(3, 7, True), **told)
        infos = [info for name, info in registry().detectors.items() if name != "pidfd"]
        self.detectors = Detectors(context, infos, lambda whom, body: self.said.append((whom, body)))
        self.parts: dict[str, Any] = dict(self.detectors._detectors)
        self.detectors.follow(VIEW, tuple(member for member in MEMBERS if member.id != MEMBERS[rank].id))

    def hear(self, peer: str, body: bytes) -> bool:
        """Whether the body of a message `detect` was accepted. Unexpected errors come through."""
        try:
            self.detectors.received(peer, body)
        except CorruptData:
            return False
        return True

    def state(self) -> Any:
        """All that the detectors know and have sent."""
        known = {
            "unopened": self.parts["heartbeat"]._unopened,
            "readers": sorted(self.parts["heartbeat"]._readers),
            "heard here": self.parts["heartbeat"]._silence._heard,
            "heard there": self.parts["observers"]._silence._heard,
            "edges": self.parts["observers"]._observers._edges,
            "places": self.parts["progress"]._progress._places,
        }
        return copy.deepcopy((known, self.said, self.told))

    def close(self) -> None:
        self.detectors.close()
        self._loop.close()


def messages_of_detectors() -> list[bytes]:
    """One message of each kind that detectors send."""
    with closing(DetectorSet(0)) as speaker:
        speaker.detectors.linked("p1")
        speaker.parts["progress"].context.send_all(speaker.parts["progress"]._say(OpPosition(3, 6, True), asking=True))
        speaker.parts["heartbeat"].context.send_all(msgspec.msgpack.encode(["p2", "p3"]))
        speaker.detectors.failed(VIEW, OpTimeout("all_reduce", 1, 5.0, (2,)))
        return [body for _, body in speaker.said]


SAYINGS = messages_of_detectors()
peers = st.sampled_from([*IDS[1:], "a stranger"])
numbers = st.integers(-(1 << 63), (1 << 64) - 1)
said = st.one_of(
    st.binary(max_size=40),
    numbers.map(msgspec.msgpack.encode),
    st.lists(st.text(max_size=5) | st.sampled_from(IDS), max_size=4).map(msgspec.msgpack.encode),
    st.tuples(st.booleans(), numbers, numbers, st.booleans()).map(msgspec.msgpack.encode),
    st.tuples(numbers | st.just(3), st.sampled_from(IDS) | st.text(), st.text()).map(msgspec.msgpack.encode),
)
any_body = st.one_of(
    st.binary(max_size=80),
    st.tuples(st.sampled_from(NAMES), said).map(msgspec.msgpack.encode),
    st.tuples(st.text(), said, st.none()).map(msgspec.msgpack.encode),
)


def test_an_example_of_every_message_is_accepted() -> None:
    routes = [msgspec.msgpack.decode(body)[0] for body in SAYINGS]
    assert sorted(routes) == ["", "heartbeat", "heartbeat", "progress"]
    with closing(DetectorSet(0)) as listener:
        before = listener.state()
        assert all(listener.hear("p3", body) for body in SAYINGS)
        assert listener.state() != before


@given(peers, any_body | st.tuples(st.sampled_from(SAYINGS), st.lists(damages, min_size=1, max_size=3)))
def test_any_bytes_and_any_change_of_a_message_are_accepted_or_refused_and_the_detectors_continue(
    peer: str, message: bytes | tuple[bytes, list[tuple[str, int, int]]]
) -> None:
    body, changes = message if isinstance(message, tuple) else (message, [])
    for damage in changes:
        body = mutated([body], *damage)[0] if body else body
    with closing(DetectorSet(0)) as listener:
        before = listener.state()
        if not listener.hear(peer, body):
            assert listener.state() == before
        listener.detectors.beat()
        for good in SAYINGS:
            assert listener.hear("p3", good)


def said_to(route: str, said: Any) -> bytes:
    return msgspec.msgpack.encode((route, msgspec.msgpack.encode(said)))


@pytest.mark.parametrize(
    "body",
    [
        said_to("heartbeat", -1),
        said_to("heartbeat", ["p1", 7]),
        said_to("heartbeat", None),
        said_to("progress", (True, 3, -1, True)),
        said_to("progress", (True, -3, 1, True)),
        said_to("progress", (1, 3, 1, True)),
        said_to("", (0, "p1", "why")),
        said_to("", (3, "p1")),
        b"\x92\xa2\xff\xfe\xc4\x00",
        said_to("heartbeat", ["p2", "p3"]).replace(b"p2", b"p\xff"),
    ],
)
def test_an_unknown_message_and_text_that_is_not_utf8_are_refused(body: bytes) -> None:
    with closing(DetectorSet(0)) as listener:
        before = listener.state()
        assert not listener.hear("p1", body)
        assert listener.state() == before
