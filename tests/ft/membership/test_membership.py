"""The membership state machine: its rules, every interleaving of a small world, random ones of larger worlds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from holdfast.ft.membership import events
from holdfast.ft.membership.dissemination import another_proposes_first
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.state_machine import Membership, runnable_backends, successors
from holdfast.ft.membership.topology import Shape, observers
from holdfast.ft.membership.view import Job, Member, StepError, Timeouts, View, delta_between
from holdfast.harness.simulate.show import known_bug_named
from support.samples.membership_world import (
    BUDGET,
    Action,
    InvariantBroken,
    World,
    actions,
    apply,
    check_settled,
    new_world,
    started,
)
from support.views import member


def explore(world: World) -> int:
    """Explore every order of events from `world` on; the number of different worlds seen."""
    seen, todo = {world}, [world]
    while todo:
        here = todo.pop()
        settled = True
        for action in actions(here):
            settled = settled and bool(action.by)
            there = apply(here, action)
            known = len(seen)
            seen.add(there)  # without a look before: that would hash it twice, and hashes take most of the time
            if len(seen) > known:
                todo.append(there)
        if settled:
            check_settled(here)
    return len(seen)


# One rule a test ----------------------------------------------------------------------------------------------

JOB = Job("job", 3, 1, 6, ("shm", "gloo"), "shm")
RUNNING = View(3, "running", (member(0), member(1), member(2)), JOB, "all 3 members are here")


def core(index: int, view: View | None = RUNNING, spares: tuple[Member, ...] = ()) -> Membership:
    """The core of process `index`, started, with `view` known and installed."""
    me = view.members[index] if view is not None and index < len(view.members) else member(index)
    fresh = Membership(me, JOB, Timeouts(), frozenset({"shm"}), spares=spares)
    state, _ = fresh.on(events.ViewRead(view), 0.0)
    return state.on(events.Started(), 0.0)[0]


def test_a_view_has_a_positive_epoch_and_each_member_once() -> None:
    with pytest.raises(ValueError, match="epoch 0 of a view is not positive"):
        structs.replace(RUNNING, epoch=0)
    with pytest.raises(ValueError, match="a member is twice in the view"):
        structs.replace(RUNNING, members=(*RUNNING.members, member(1)))


def dead(*indices: int) -> events.ProvenDeaths:
    return events.ProvenDeaths(tuple(events.Death(f"p{i}", "its process ended") for i in indices))


def proposed(effects: Iterable[events.Effect]) -> View:
    """The view that the last effect proposes."""
    last = [*effects][-1]
    assert isinstance(last, events.Propose)
    return last.view


def proposals(effects: Iterable[events.Effect]) -> list[View]:
    return [effect.view for effect in effects if isinstance(effect, events.Propose)]


def kinds(effects: Iterable[events.Effect]) -> list[type[events.Effect]]:
    return [type(effect) for effect in effects]


ONE_AWAY = structs.replace(RUNNING, members=(member(0), member(1), member(2, "other")))


def test_a_death_revokes_at_once_and_the_lowest_living_member_proposes() -> None:
    state, effects = core(1).on(dead(0), 10.0)
    assert effects[0] == events.Revoke(3, (events.Death("p0", "its process ended"),), "rank 0: its process ended")
    assert isinstance(effects[1], events.Propose) and effects[1].expected == 3
    assert proposed(effects).members == (member(1), member(2))
    assert proposed(effects).reason == "rank 0 (p0) is gone: its process ended; no spare"
    assert state.in_flight == proposed(effects)


def test_after_a_proven_death_the_others_keep_their_communicator_and_spares_wait_for_a_rebuild() -> None:
    view = structs.replace(RUNNING, job=structs.replace(JOB, on_death="go_on"))
    state, effects = core(1, view, spares=(member(3),)).on(dead(0), 10.0)
    degraded = effects[1].view  # type: ignore[union-attr]
    assert (degraded.members, degraded.degraded_from) == ((member(1), member(2)), 3)
    state, effects = state.on(events.CasWon(degraded), 10.1)
    assert not proposals(effects)
    _, effects = state.on(dead(2), 10.2)
    assert [each.degraded_from for each in proposals(effects)] == [3], "of the same"
    state, effects = state.on(events.EpochBroken(4, "a member asks for it"), 10.2)
    state, effects = state.on(events.Tick(), 10.4)
    (rebuilt,) = proposals(effects)
    assert (rebuilt.members, rebuilt.degraded_from) == ((member(1), member(2), member(3)), 0)


def test_a_member_that_may_live_or_too_few_others_make_no_degraded_epoch() -> None:
    view = structs.replace(RUNNING, job=structs.replace(JOB, on_death="go_on", min_size=3))
    (rebuilt,) = proposals(core(1, view, spares=(member(3),)).on(dead(0), 10.0)[1])
    assert (rebuilt.members[0], rebuilt.degraded_from) == (member(3), 0), "the spare is needed"
    hosts = tuple(member(rank, f"h{rank}") for rank in range(3))
    view = View(3, "running", hosts, structs.replace(JOB, on_death="go_on"), "all 3 members are here")
    state = core(0, view).on(events.Suspicion("p2", "p0", "silent"), 10.0)[0]
    effects = state.on(events.Suspicion("p2", "p1", "silent", 1), 10.0)[1]
    assert [each.degraded_from for each in proposals(effects)] == [0]


def test_later_ranks_propose_in_order_if_the_proposer_is_silent_and_without_delay_if_it_is_dead() -> None:
    state, effects = core(2).on(dead(0), 10.0)
    assert kinds(effects) == [events.Revoke]
    assert state.wake_at == pytest.approx(10.1)
    assert state.on(events.Tick(), 10.05)[1] == ()
    assert isinstance(state.on(events.Tick(), 10.1)[1][0], events.Propose)
    assert proposed(state.on(dead(1), 10.001)[1]).members == (member(2),)


def test_a_failed_op_without_a_failed_member_costs_an_epoch_and_no_member() -> None:
    state, effects = core(0).on(events.EpochBroken(2, "a connection was lost"), 10.0)
    assert effects == ()  # of an epoch that is over
    state, effects = state.on(events.EpochBroken(3, "a connection was lost"), 10.0)
    assert effects[0] == events.Revoke(3, (), "a connection was lost")
    assert (proposed(effects).epoch, proposed(effects).members) == (4, RUNNING.members)
    assert proposed(effects).reason == "nobody is lost, but an op has failed: a connection was lost"
    assert state.on(events.EpochBroken(3, "a connection was lost"), 10.1)[1] == ()


def test_a_spare_takes_the_place_of_the_dead_and_joiners_come_last() -> None:
    small = structs.replace(RUNNING, members=(member(0), member(1)))
    state, effects = core(1, small).on(events.SpareAnnounced(member(7)), 10.0)
    assert effects == () and state.wake_at == pytest.approx(10.2)  # its turn is after rank 0's, growing can wait
    assert proposed(state.on(dead(0), 10.0)[1]).members == (member(7), member(1))
    both = successors(small, {"p0": "gone"}, (member(7), member(8), member(9)))
    assert both.members == (member(7), member(1), member(8))
    assert both.reason == "rank 0 (p0) is gone: gone; spare p7 takes its place; p8 joins as rank 2"


def test_a_spare_is_kept_once_beside_others_and_a_dead_one_is_not_promoted() -> None:
    state = core(1, spares=(member(7),))
    for at in (1.0, 1.1):
        state = state.on(events.SpareAnnounced(member(8)), at)[0]
    assert state.spares == (member(7), member(8))
    state, effects = state.on(dead(7), 2.0)
    assert effects == () and state.spares == (member(8),)
    assert proposed(state.on(dead(0), 10.0)[1]).members == (member(8), member(1), member(2))


def test_deaths_seen_together_are_one_epoch_and_one_during_a_rebuild_leads_to_the_next() -> None:
    assert proposed(core(0).on(dead(1, 2), 10.0)[1]).members == (member(0),)
    state, effects = core(0).on(dead(1), 10.0)
    view = proposed(effects)
    state, effects = state.on(dead(2), 10.001)
    assert kinds(effects) == [events.Revoke]  # one proposal at a time
    state, effects = state.on(events.CasWon(view), 10.002)
    assert kinds(effects) == [events.Revoke, events.Install, events.Announce, events.Revoke, events.Propose]
    assert (proposed(effects).epoch, proposed(effects).members) == (5, (member(0),))


def test_a_job_below_min_size_waits_for_joiners_and_then_ends_with_the_reason() -> None:
    needy = structs.replace(RUNNING, job=structs.replace(JOB, min_size=3))
    state, effects = core(0, needy).on(dead(1), 10.0)
    assert kinds(effects) == [events.Revoke]
    assert state.wake_at == pytest.approx(70.0)
    grown = proposed(state.on(events.SpareAnnounced(member(7)), 20.0)[1])
    assert grown.members == (member(0), member(7), member(2))
    last = proposed(state.on(events.Tick(), 70.0)[1])
    assert last.phase == "failed" and "2 are left of the 3 needed, and nobody came within 60 s" in last.reason


def test_a_member_that_is_not_in_the_newest_view_is_evicted_and_stays_silent() -> None:
    later = View(5, "running", (member(1), member(2)), JOB, "p0 was fenced")
    state, effects = core(0).on(events.ViewRead(later), 10.0)
    assert kinds(effects) == [events.Revoke, events.Evicted]
    assert state.on(dead(1, 2), 11.0) == (state, ())
    assert state.wake_at is None


def test_the_difference_to_the_next_view_is_adopted_and_the_register_is_asked_for_any_other() -> None:
    following = View(4, "running", (member(0), member(1)), JOB, "p2 is gone")
    change = delta_between(RUNNING, following)
    assert change is not None
    adopted, effects = core(0).on(events.ViewDeltaReceived(change), 1.0)
    assert adopted.view == following and not any(isinstance(effect, events.ReadRegister) for effect in effects)
    later, effects = core(0).on(events.ViewDeltaReceived(structs.replace(change, epoch=5)), 1.0)
    assert (later.view, effects) == (RUNNING, (events.ReadRegister(5),))
    of_another = events.ViewDeltaReceived(structs.replace(change, gone=(7,)))
    assert core(0).on(of_another, 1.0) == (core(0), (events.ReadRegister(4),)), "there is no rank 7"
    assert core(0).on(events.ViewDeltaReceived(structs.replace(change, epoch=3)), 1.0) == (core(0), ()), "it is known"


def test_a_process_without_a_view_keeps_what_it_hears_of_others_for_its_first_one() -> None:
    state = core(0, None)
    for event in (events.Suspicion("p1", "p2", "it is silent"), dead(1)):
        state, effects = state.on(event, 1.0)
        assert effects == ()
    assert [type(effect) for effect in state.on(events.ViewRead(RUNNING), 2.0)[1]] == [events.Install, events.Revoke]


def test_the_register_being_away_delays_and_breaks_nothing() -> None:
    state, effects = core(0).on(dead(1), 10.0)
    state, effects = state.on(events.CasFailed("disk is gone"), 10.0)
    assert effects == () and state.wake_at == pytest.approx(10.1)
    _, effects = state.on(events.Tick(), 10.1)
    assert isinstance(effects[0], events.Propose)


def test_a_spare_ends_the_job_when_every_member_is_dead() -> None:
    state, effects = core(7).on(dead(0, 1), 10.0)
    assert effects == ()
    last = proposed(state.on(dead(2), 11.0)[1])
    assert (last.phase, last.reason) == ("failed", "every member died, and the state of the job with them")


def test_a_job_that_is_finished_or_that_all_stopped_early_releases_its_spares() -> None:
    for end in (events.LocalFinished(3), events.LocalFinished(3, "all stopped", stopped=True)):
        done = proposed(core(0).on(end, 10.0)[1])
        assert (done.phase, done.reason, done.stopped) == ("finished", end.reason, end.stopped)
        state, effects = core(7).on(events.ViewRead(done), 10.1)
        assert effects == (events.Install(done),) and state.ended == "finished"


def test_a_finished_member_does_not_end_the_job_before_a_newcomer_has_its_state() -> None:
    replaced = View(4, "running", (member(0), member(7), member(2)), JOB, "p7 takes the place of p1")
    state, _ = core(2, spares=(member(7),)).on(events.LocalFinished(3), 10.0)
    state, _ = state.on(events.ViewRead(replaced), 10.1)
    state, effects = state.on(events.LocalFinished(3), 10.2)  # said before it had heard of epoch 4
    assert effects == () and state.wake_at is None
    state, _ = state.on(events.LocalFinished(4), 10.3)
    assert proposed(state.on(events.Tick(), 10.6)[1]).phase == "finished"


def test_all_present_members_learn_at_once_of_an_exception_that_ends_the_job() -> None:
    error = StepError(5, 2, "ValueError", "a bad batch", "train.py:3 in train")
    state, _ = core(2).on(dead(0), 10.0)  # the turn of p1 comes before that of p2
    last = proposed(state.on(events.LocalFailed(error, "it came again"), 10.01)[1])
    assert (last.phase, last.reason, last.error) == ("failed", "it came again", error)
    assert last.members == (member(1), member(2))
    _, effects = core(1).on(events.ViewRead(last), 10.1)
    assert effects[-1] == events.Install(last)
    assert View.decode(last.encode()) == last


@pytest.mark.parametrize(("step", "again"), [(4, False), (5, True), (6, True), (7, False)])
def test_an_exception_comes_again_in_the_same_step_or_the_next_on_any_rank(step: int, again: bool) -> None:
    earlier = StepError(5, 2, "ValueError", "a bad batch", "train.py:3 in train")
    assert structs.replace(earlier, step=step, rank=0).repeats(earlier) is again
    assert not structs.replace(earlier, step=step, message="another").repeats(earlier)


def test_members_on_the_host_of_a_stalled_process_fence_it_once() -> None:
    state, effects = core(0).on(events.Stalled("p1", "stopped for 0.5 s"), 10.0)
    assert effects == (events.Fence(member(1), "stopped for 0.5 s"),)
    assert state.on(events.Stalled("p1", "stopped for 0.6 s"), 10.1)[1] == ()


def test_suspicion_across_hosts_needs_most_of_the_observers() -> None:
    view, away = ONE_AWAY, ONE_AWAY.members[2]
    state, effects = core(0, view).on(events.Suspicion("p2", "p0", "silent for 0.5 s"), 10.0)
    assert effects == (
        events.Report(events.Suspicion("p2", "p0", "silent for 0.5 s", 1), (member(1), away)),
    )  # one of two: too few
    cleared, effects = state.on(events.Cleared("p2", "p0"), 10.1)
    assert effects == (events.Report(events.Cleared("p2", "p0", 2), (member(1), away)),)
    assert cleared.on(events.Suspicion("p2", "p1", "silent for 0.5 s"), 10.2)[1] == ()
    _, effects = state.on(events.Suspicion("p2", "p1", "silent for 0.5 s"), 10.1)
    assert isinstance(effects[0], events.Revoke) and isinstance(effects[1], events.Propose)
    assert effects[0].dead == (events.Death("p2", "suspected by 2 of 2 observers: silent for 0.5 s"),)


@pytest.mark.parametrize(
    ("hosts", "side", "goes_on"),
    [("AAAB", "A", True), ("AAAB", "B", False), ("ABBB", "A", False), ("AABB", "A", True), ("AABB", "B", False)],
)
def test_the_smaller_of_two_hosts_does_not_evict_the_other_for_silence(hosts: str, side: str, goes_on: bool) -> None:
    """The members of each host are all observers of the other host.

    The host that may be the smaller half of a partition must leave the decision to the other.
    """
    view = structs.replace(RUNNING, members=tuple(member(rank, host) for rank, host in enumerate(hosts)))
    here = [m.id for m in view.members if m.peer.host == side]
    state, told = core(int(here[0][1:]), view), list[events.Effect]()
    for silent in (m.id for m in view.members if m.id not in here):
        for observer in here:
            state, effects = state.on(events.Suspicion(silent, observer, "silent for 0.5 s"), 10.0)
            told += effects
    told += state.on(events.Tick(), 10.5)[1]
    assert [[m.id for m in each.members] for each in proposals(told)] == ([here] if goes_on else [])


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 3), (1, 4, 4), (2, 5, 9)])
def test_in_a_large_job_no_host_alone_finds_a_member_of_another_lost(sizes: tuple[int, ...]) -> None:
    """It may be the one that is cut off, and have most of the member's few observers."""
    hosts = [f"h{host}" for host, members in enumerate(sizes) for _ in range(members)]
    view = View(3, "running", tuple(member(rank, host) for rank, host in enumerate(hosts)), JOB, "all are here")
    shape = Shape(mesh=1)
    for suspect in view.members:
        found, all_suspect = observers(view, suspect, shape), Evidence()
        for host in {observer.peer.host for observer in found}:
            evidence = Evidence()
            for observer in (each for each in found if each.peer.host == host):
                evidence = evidence.with_suspicion(events.Suspicion(suspect.id, observer.id, "silent"), view, shape)
            assert suspect.id not in evidence.lost
        for observer in found:
            all_suspect = all_suspect.with_suspicion(events.Suspicion(suspect.id, observer.id, "silent"), view, shape)
        assert suspect.id in all_suspect.lost


def test_members_on_other_hosts_get_a_report_of_a_death_they_cannot_see() -> None:
    assert events.Report(dead(1), (ONE_AWAY.members[2],)) in core(0, ONE_AWAY).on(dead(1), 10.0)[1]


def test_a_suspicion_is_reported_again_after_pauses_that_double_up_to_a_limit() -> None:
    state, effects = core(0, ONE_AWAY).on(events.Suspicion("p2", "p0", "silent for 0.5 s"), 10.0)
    now, beat = 10.0, Timeouts().heartbeat
    for doubling in (0, 1, 2, 3, 4, 4):
        assert any(isinstance(each, events.Report) for each in effects), doubling
        due = now + beat * 2**doubling
        assert state.tell_at == pytest.approx(due) and state.wake_at == pytest.approx(due)
        state, effects = state.on(events.Tick(), due - beat / 2)
        assert effects == ()
        now = due
        state, effects = state.on(events.Tick(), now)


def test_that_a_suspect_is_heard_again_is_repeated_a_few_times_only() -> None:
    state = core(0, ONE_AWAY).on(events.Suspicion("p2", "p0", "silent for 0.5 s"), 10.0)[0]
    state, effects = state.on(events.Cleared("p2", "p0"), 11.0)
    reports = []
    while state.tell_at is not None and len(reports) < 100:
        reports.append(any(isinstance(each, events.Report) for each in effects))
        state, effects = state.on(events.Tick(), state.tell_at)
    assert effects == () and all(reports) and 3 < len(reports) < 100


def test_the_job_takes_the_first_backend_that_all_members_can_run() -> None:
    here, there = (member(0), member(1)), (member(0), member(1, "other"))
    assert runnable_backends(("shm", "gloo"), ("gloo", "shm"), frozenset({"shm"}), here) == ("shm", "gloo")
    assert runnable_backends(("shm", "gloo"), ("gloo", "shm"), frozenset({"shm"}), there) == ("gloo",)


def test_a_process_that_can_run_none_of_the_backends_is_refused_and_changes_nothing() -> None:
    forming = View(1, "forming", (member(0),), structs.replace(JOB, backends=("shm",)), "p0 founds the job")
    stranger = Membership(member(1), structs.replace(JOB, backends=("gloo",)), Timeouts())
    state, _ = stranger.on(events.ViewRead(forming), 0.0)
    state, effects = state.on(events.Started(), 0.0)
    assert effects == (events.Refused("no backend suits all: the members so far can run shm, this process gloo"),)
    assert state.ended == "refused"


def test_a_spare_elsewhere_is_kept_out_of_a_job_whose_backend_needs_one_host() -> None:
    stranger = Membership(member(7, "other"), structs.replace(JOB, backend=""), Timeouts(), frozenset({"shm"}))
    state, _ = stranger.on(events.ViewRead(RUNNING), 0.0)
    _, effects = state.on(events.Started(), 0.0)
    words = "the job runs on shm, which needs all members on one host: they are on h, this process is on other"
    assert effects == (events.Refused(words),)
    assert core(0).on(events.SpareAnnounced(member(7, "other")), 1.0)[0].spares == ()
    assert core(0).on(events.SpareAnnounced(member(7)), 1.0)[0].spares == (member(7),)


def test_too_few_candidates_end_the_formation_with_the_reason() -> None:
    forming = View(1, "forming", (member(0),), structs.replace(JOB, min_size=2, backend=""), "p0 founds the job")
    state = core(0, forming)
    assert state.wake_at == pytest.approx(60.0)
    last = proposed(state.on(events.Tick(), 60.0)[1])
    assert (last.phase, last.reason) == ("failed", "1 of 3 members came within 60 s, 2 are needed")


def test_later_members_of_a_large_job_wait_ever_longer_and_never_long_to_propose() -> None:
    view = View(3, "running", tuple(member(i) for i in range(200)), structs.replace(JOB, size=200), "all are here")
    turns = []
    for rank in (1, 2, 3, 4, 5, 8, 32, 199):
        now = 10.0
        state, effects = core(rank, view).on(dead(0), now)
        while not proposals(effects):
            now = state.wake_at or 99.0
            assert now < 10.0 + 12 * Timeouts().heartbeat
            state, effects = state.on(events.Tick(), now)
        turns.append(now)
    assert turns == sorted(set(turns))


def test_one_member_of_a_host_proposes_first_and_members_of_other_hosts_do_not_wait_for_it() -> None:
    view = structs.replace(RUNNING, members=(member(0, "a"), member(1, "a"), member(2, "b")))
    first = [another_proposes_first(view, me, lost=()) for me in view.members]
    assert first == [False, True, False]
    assert not another_proposes_first(view, view.members[1], lost=("p0",))
    assert not another_proposes_first(None, view.members[1], lost=())


def test_the_reason_for_a_view_names_eight_changes_and_counts_the_rest() -> None:
    view = structs.replace(RUNNING, members=tuple(member(i) for i in range(12)))
    reason = successors(view, {f"p{i}": "killed" for i in range(9)}, ()).reason
    assert reason.count("is gone") == 8
    assert reason.endswith("and 1 more changes")


def test_a_process_with_other_terms_is_refused_with_both() -> None:
    """The other terms: tests/ft/session/test_joining.py; another version: tests/ft/operations/test_many_hosts.py."""
    words = "in use with on_death=rebuild, not go_on; use another name"
    assert words in (structs.replace(JOB, on_death="go_on").conflict(JOB) or "")
    assert JOB.conflict(JOB) is None


# Every interleaving ---------------------------------------------------------------------------------------------


ONCE = {"count": 3, "size": 3, "kills": 1}


@pytest.mark.parametrize(
    ("least", "world"), [(10_000, ONCE), (500, ONCE | {"kills": 0, "outages": 1}), (5_000, ONCE | {"size": 2})]
)
def test_every_order_of_forming_a_job(least: int, world: dict[str, Any]) -> None:
    """A death; the register fails once; a spare and a death."""
    assert explore(new_world(**world)) > least


RUNNING_WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "shrink": (500, ONCE | {"kills": 2, "ticks": 3, "outages": 1}),
    "spare": (500, ONCE | {"size": 2, "kills": 2, "ticks": 3, "outages": 1}),
    "two deaths, one spare": (500, ONCE | {"count": 4, "kills": 2, "ticks": 1}),
    "below min_size": (500, ONCE | {"count": 4, "min_size": 3, "kills": 2, "ticks": 1}),
    "below min_size for longer": (500, ONCE | {"count": 4, "min_size": 3, "kills": 2, "ticks": 2}),
    "two spares": (500, {"count": 4, "size": 2, "kills": 3, "ticks": 1}),
    "finishing": (500, ONCE | {"ticks": 1, "finishing": 1}),
    "finishing with a spare": (500, ONCE | {"size": 2, "kills": 2, "ticks": 1, "finishing": 1}),
    "ops fail without a failed member": (100, ONCE | {"kills": 0, "ticks": 1, "breaks": 2}),
    "ops fail, and a death": (100, ONCE | {"ticks": 1, "breaks": 1}),
    "a spare waits in a degraded epoch": (
        100,
        ONCE | {"size": 2, "kills": 2, "ticks": 1, "breaks": 1, "on_death": "go_on"},
    ),
    "large for its mesh": (100, ONCE | {"kills": 2, "ticks": 1, "mesh": 1}),
    "large for its mesh with a spare": (100, ONCE | {"size": 2, "kills": 2, "ticks": 1, "mesh": 1}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * name.endswith("longer")) for name in RUNNING_WORLDS]
)
def test_every_order_of_deaths_and_faults_in_a_running_job(name: str) -> None:
    least, world = RUNNING_WORLDS[name]
    running = started(new_world(**world))
    assert running.register is not None and running.register.phase == "running"
    assert explore(running) > least


def test_a_process_whose_job_has_ended_watches_nobody() -> None:
    world = started(new_world(2, size=1))
    epoch = world.processes[0].core.view.epoch
    assert [other.id for other in world.processes[0].core.watched()] == ["p1"], "its spare"
    world = started(apply(world, Action(0, events.LocalFinished(epoch), "finishing")))
    assert [process.core.ended for process in world.processes] == ["finished", "finished"]
    assert not any(process.core.watched() for process in world.processes)


# The checks catch cores with known bugs -----------------------------------------


@pytest.mark.parametrize("name", ["stale announcement", "lost race is final", "replacement comes last"])
def test_the_explorer_finds_known_bugs(name: str) -> None:
    with known_bug_named(name).inject(), pytest.raises(InvariantBroken):
        explore(started(new_world(3, size=2, kills=2, ticks=1)))


# Random orders of larger worlds ---------------------------------------------------------------------------------


@settings(suppress_health_check=list(HealthCheck))
@given(
    size=st.integers(1, 5),
    spares=st.integers(0, 3),
    faults=st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 2), st.integers(0, 1)),
    choices=st.lists(st.integers(0, 1_000_000), min_size=20, max_size=150),
)
def test_random_orders_break_nothing_and_settle(
    size: int, spares: int, faults: tuple[int, int, int, bool], choices: list[int]
) -> None:
    world = new_world(size + spares, size=size, **dict(zip(BUDGET, faults, strict=False)))
    for choice in choices:
        possible = sorted(actions(world), key=repr)
        if not possible:
            break
        world = apply(world, possible[choice % len(possible)])
    world = replace(world, **dict.fromkeys(BUDGET, 0))
    for _ in range(2_000):
        action = next(actions(world), None) or _waiting(world)
        if action is None:
            break
        world = apply(replace(world, ticks=1), action)
        world = replace(world, ticks=0)
    else:
        raise InvariantBroken(f"it goes on for ever: {action}")
    check_settled(world)


def _waiting(world: World) -> Action | None:
    """The tick that is due first, if a process waits for one."""
    waits = [
        (process.core.wake_at, i)
        for i, process in enumerate(world.processes)
        if process.alive and not process.evicted and process.core.wake_at is not None
    ]
    return Action(min(waits)[1], events.Tick(), "ticks") if waits else None
