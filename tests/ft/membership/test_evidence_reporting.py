"""The evidence that a member reports: what an event added, and nothing that others have seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.transport.base import Peer
from holdfast.ft.membership.events import Cleared, Death, Event, ProvenDeaths, Suspicion
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.evidence_reporting import new_findings
from holdfast.ft.membership.topology import Shape
from holdfast.ft.membership.view import Job, Member, View

MEMBERS = tuple(Member(f"p{n}", f"h{n // 2}:{7000 + n}", Peer(f"h{n // 2}", n + 1, 1)) for n in range(6))
VIEW = View(1, "running", MEMBERS, Job("job", 6, 1, 6, ("gloo",), "gloo"), "all are here")
ME = MEMBERS[1]
MESH, SPARSE = Shape(), Shape(mesh=1, rings=1)

someone = st.sampled_from([m.id for m in MEMBERS if m.id != ME.id] + ["spare"])
observer = st.sampled_from([ME.id, "p2", "p4"])
word = st.integers(0, 3)
events = st.one_of(
    st.builds(Suspicion, someone, observer, st.just("silent"), word),
    st.builds(Cleared, someone, observer, word),
    st.builds(lambda ids: ProvenDeaths(tuple(Death(who, "ended") for who in ids)), st.lists(someone, max_size=3)),
)


def after(event: Event, evidence: Evidence, shape: Shape) -> Evidence:
    """Apply an event as the membership state machine does."""
    match event:
        case Suspicion():
            return evidence.with_suspicion(event, VIEW, shape)
        case Cleared():
            return evidence.with_clearance(event, VIEW, shape)
        case ProvenDeaths(deaths):
            return evidence.with_deaths(deaths, VIEW, shape)
    raise AssertionError(event)


@given(st.lists(events, max_size=12), st.sampled_from([MESH, SPARSE]))
def test_a_member_reports_its_own_evidence_and_nothing_else(happened: list[Event], shape: Shape) -> None:
    evidence = Evidence()
    for event in happened:
        before, evidence = evidence, after(event, evidence, shape)
        words = new_findings(event, ME, VIEW, evidence, before)

        here = {m.id for m in MEMBERS if m.peer.host == ME.peer.host}
        assert {death.id for death in words.deaths} == (evidence.dead.keys() - before.dead.keys()) & here

        mine = {who for who, against in evidence.suspected.items() if ME.id in against and who in VIEW.ranks}
        was_mine = {who for who, against in before.suspected.items() if ME.id in against and who in VIEW.ranks}
        doubted = {word.member for word in words.seen if isinstance(word, Suspicion)}
        cleared = {word.member for word in words.seen if isinstance(word, Cleared)}
        assert doubted == mine - was_mine
        assert cleared == {who for who in was_mine - mine if who not in evidence.dead}
        assert all(word.observer == ME.id and word.number > 0 for word in words.seen)
