"""Messages between members: received as they were sent, and refused as a whole when malformed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.membership.events import (
    Cleared,
    Death,
    ProvenDeaths,
    SpareAnnounced,
    Suspicion,
    ViewDeltaReceived,
    ViewRead,
)
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.membership.view_delta import ViewDelta
from holdfast.ft.node import messages
from holdfast.ft.node.messages import Notice
from support.mutations import mutated

ME = Member("p0", "x:1", this_process())
VIEW = View(3, "running", (ME,), Job("job", 1, 1, 1, ("gloo",), "gloo"), "test")
CHANGE = ViewDelta(4, "running", (0,), ((1, ME),), (ME,), "p1 died")

words, epochs = st.text(max_size=20), st.integers(1, 2**62)
deaths = st.lists(st.builds(Death, words, words, words), max_size=4).map(tuple)
items = st.dictionaries(words, st.binary(max_size=40), max_size=4)
SAID: dict[str, st.SearchStrategy[tuple[Notice, messages.Message]]] = {
    "beat": epochs.map(lambda epoch: (messages.beat(View(epoch, "running", (), VIEW.job, "")), messages.Beat(epoch))),
    "beat before any view": st.just((messages.beat(None), messages.Beat(0))),
    "install": st.just((messages.install(VIEW), ViewRead(VIEW))),
    "change": st.just((messages.change(CHANGE), ViewDeltaReceived(CHANGE))),
    "spare": st.just((messages.spare(ME), SpareAnnounced(ME))),
    "deaths": deaths.map(lambda seen: (messages.deaths(seen), ProvenDeaths(seen))),
    "leave": st.tuples(words, words).map(lambda said: (messages.leave(*said), messages.Farewell(*said))),
    "share": st.tuples(epochs, items).map(lambda given: (messages.share(*given), messages.Share(*given))),
    "suspect": st.builds(Suspicion, words, st.just(""), words, epochs).map(
        lambda statement: (messages.suspicion(statement), statement)
    ),
    "clear": st.builds(Cleared, words, st.just(""), epochs).map(
        lambda statement: (messages.suspicion(statement), statement)
    ),
    "detect": st.binary(max_size=40).map(lambda body: (messages.detect(body), messages.DetectorMessage(body))),
}
"""Of each kind: the notice, and the message that is received."""


def listening(heard: list[Any]) -> dict[str, Callable[[str, bytes], bytes]]:
    """Handlers that record what they receive."""
    return messages.handlers(lambda peer, message: heard.append((peer, message)))


@pytest.mark.parametrize("kind", SAID)
@given(data=st.data())
def test_a_notice_is_received_as_it_was_sent(kind: str, data: st.DataObject) -> None:
    (name, body), expected = data.draw(SAID[kind])
    heard: list[Any] = []
    assert listening(heard)[name]("p9", body) == b""
    assert heard == [("p9", expected)]


@pytest.mark.parametrize("kind", [kind for kind in SAID if kind != "detect"])
@given(
    data=st.data(),
    how=st.sampled_from(["flip", "cut", "remove", "insert"]),
    where=st.integers(0, 10**4),
    what=st.integers(0, 10**4),
)
def test_a_damaged_notice_is_decoded_or_refused(
    kind: str, data: st.DataObject, how: str, where: int, what: int
) -> None:
    (name, body), expected = data.draw(SAID[kind])
    heard: list[Any] = []
    try:
        listening(heard)[name]("p9", b"".join(mutated([body], how, where, what)))
    except CorruptData as error:
        assert not heard
        assert "p9" in str(error)
        return
    assert [type(message) for _, message in heard] == [type(expected)]


@given(name=st.sampled_from(sorted(listening([]))), body=st.binary(max_size=100))
def test_any_bytes_are_a_notice_or_corrupt(name: str, body: bytes) -> None:
    heard: list[Any] = []
    try:
        listening(heard)[name]("p9", body)
    except CorruptData:
        assert not heard
    else:
        assert heard
