"""The invariants: a good run breaks none of them, and each is seen failing on a run that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.errors import CorruptData
from holdfast.ft.event_lines import merge, read_events, refuse
from holdfast.harness.invariants import CHECKERS, Bounds, Event, Violation, check, examine
from support.event_records import an_event


class Run:
    """Writes an event stream: each event a millisecond after the one before."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 100.0

    def add(self, process: str, kind: str, **fields: Any) -> Run:
        self.now += 0.001
        self.events.append(an_event(kind, process, self.now, ord(process[-1]), **fields))
        return self

    def install(self, epoch: int, *members: str) -> Run:
        for rank, member in enumerate(members):
            self.add(member, "installed", epoch=epoch, members=list(members), rank=rank, reason="test")
        return self

    def step(self, step: int, epoch: int, *members: str, digest: str = "d") -> Run:
        for kind in ("attempt", "prepared", "committed"):
            for member in members:
                more = {"how": "normal", "digest": f"{digest}{step}"} if kind == "committed" else {}
                self.add(member, kind, step=step, epoch=epoch, **more)
        return self

    def commit(self, process: str, step: int, **fields: Any) -> Run:
        return self.add(process, "committed", **{"step": step, "epoch": 2, "how": "normal", **fields})

    def wait(self, seconds: float) -> Run:
        self.now += seconds
        return self


def good_run() -> Run:
    """A run of three ranks: c is killed in step 3, which all had prepared; the spare d replaces it."""
    run = Run().add("harness", "simulated", ranks=3, hosts=1)
    run.install(1, "a", "b", "c").step(1, 1, "a", "b", "c").step(2, 1, "a", "b", "c")
    run.add("a", "published", version=2).add("b", "fetched", version=2)
    for member in "abc":
        run.add(member, "attempt", step=3, epoch=1).add(member, "prepared", step=3, epoch=1)
        run.add(member, "op", op="all_reduce", seq=3, epoch=1, seconds=0.001, timeout=5.0)
    run.add("harness", "fault", what="kill", target="c").add("c", "died", why="SIGKILL")
    run.add("a", "detected", members=["c"], evidence="exited")
    run.add("a", "revoked", epoch=1, reason="c is gone").add("b", "revoked", epoch=1, reason="c is gone")
    run.add("a", "proposed", epoch=2).install(2, "a", "b", "d")
    run.commit("a", 3, epoch=1, how="recovered").commit("b", 3, epoch=1, how="recovered")
    run.add("d", "synced", step=3, epoch=2, source=0).step(4, 2, "a", "b", "d")
    run.add("a", "published", version=4).add("d", "fetched", version=4).add("a", "retired", version=2)
    for member in "abd":
        run.add(member, "finished", steps=4)
    return run.add("harness", "horizon", seconds=1.0)


def names(violations: list[Violation]) -> set[str]:
    return {violation.invariant for violation in violations}


def test_a_good_run_breaks_nothing_though_the_last_events_of_a_killed_process_may_be_missing() -> None:
    """A thread writes its log: what it had not written when the process was killed is lost."""
    events = good_run().events
    last = [event for event in events if event.process == "c" and event.kind != "died"]
    for kept in range(len(last) + 1):
        assert check([event for event in events if event not in last[kept:]]) == []


def test_every_checker_examines_events_of_a_good_run_and_three_need_a_simulation() -> None:
    events = good_run().events
    real = [event for event in events if event.kind not in ("simulated", "horizon")]
    for log, count in ((events, len(CHECKERS)), (real, len(CHECKERS) - 3)):
        findings = examine(log)
        assert len({finding.invariant for finding in findings}) == len(findings) == count
        assert all(finding.looked > 0 for finding in findings), findings
    assert all(finding.looked == 0 and not finding.violations for finding in examine([]))


def _not_suspected_by_enough(run: Run) -> None:
    run.install(3, "a", "b", "d", "e").add("a", "suspected", member="e", evidence="silent", of=3)
    run.add("b", "suspected", member="e", evidence="silent", of=3).add("b", "cleared", member="e").wait(2)
    run.install(4, "a", "b", "d")


def _no_progress(run: Run) -> None:
    run.events = [event for event in run.events if event.kind != "finished"]
    run.add("harness", "fault", what="kill", target="b")


def _give_up(run: Run, *members: str) -> None:
    run.events = [event for event in run.events if event.kind != "finished"]
    for member in members:
        run.add(member, "error", error="OpTimeout: rebuild").add(member, "died", why="it left")


def _split(run: Run, *order: str) -> None:
    """The last rank commits step 5, which the others abort and do again without it, in some order."""
    for member in "abd":
        run.add(member, "attempt", step=5, epoch=2)
    run.add("d", "prepared", step=5, epoch=2).add("a", "revoked", epoch=2).add("b", "revoked", epoch=2)
    run.install(3, "a", "b")
    for part in order:
        match part:
            case "late":
                run.commit("d", 5)
            case "abort":
                run.add("a", "aborted_step", step=5, epoch=2).add("b", "aborted_step", step=5, epoch=2)
            case "redo":
                run.step(5, 3, "a", "b")


BREAKING: dict[str, dict[str, Callable[[Run], object]]] = {
    "one membership an epoch": {
        "two memberships": lambda run: run.install(3, "a", "b").add(
            "d", "installed", epoch=3, members=["a", "d"], rank=1
        ),
        "other order": lambda run: run.install(3, "a", "b", "d").add(
            "b", "installed", epoch=3, members=["b", "a", "d"], rank=0
        ),
        "wrong rank": lambda run: run.add("a", "installed", epoch=3, members=["b", "a"], rank=0),
    },
    "epochs never go back": {
        "epoch back": lambda run: run.install(1, "a", "b", "c"),
        "same epoch again": lambda run: run.install(2, "a", "b", "d"),
        "step in an old epoch": lambda run: run.install(3, "a", "b", "d").add("a", "attempt", step=5, epoch=2),
    },
    "no effect of a revoked epoch": {
        "commit after revoke": lambda run: run.add("a", "revoked", epoch=2).commit("a", 5),
        "prepare after revoke": lambda run: run.add("a", "revoked", epoch=2).add("a", "prepared", step=5, epoch=2),
    },
    "ops end by their deadline": {
        "late op": lambda run: run.add("a", "op", op="all_reduce", seq=9, epoch=2, seconds=7.5, timeout=5.0),
        "late op without a timeout": lambda run: run.add("a", "op", op="barrier", seq=9, epoch=2, seconds=45.0),
        "attempt that never ends": lambda run: (
            run.add("a", "attempt", step=5, epoch=2).wait(60).add("a", "detected", members=["b"])
        ),
        "attempt that hangs in silence": lambda run: (
            run.add("a", "attempt", step=5, epoch=2).wait(60).add("b", "spare", epoch=2, to=[])
        ),
    },
    "equal bits": {
        "other bits": lambda run: run.commit("a", 5, digest="a").commit("b", 5, digest="b"),
    },
    "no evicted rank commits": {
        "evicted one commits": lambda run: run.commit("c", 5, epoch=1),
        "then the others abort": lambda run: _split(run, "late", "abort", "redo"),
        "after the others have aborted": lambda run: _split(run, "abort", "late", "redo"),
        "after the others have done it again": lambda run: _split(run, "abort", "redo", "late"),
    },
    "committed steps are kept": {
        "step twice": lambda run: run.commit("a", 4),
        "step lost": lambda run: run.commit("a", 6),
        "behind at the end": lambda run: run.commit("a", 5).add("a", "finished").add("b", "finished"),
        "synced back": lambda run: run.add("a", "synced", step=2, epoch=2, source=1),
    },
    "progress resumes": {
        "no progress": lambda run: (_no_progress(run), run.wait(60).add("a", "detected", members=["b"])),
        "rebuilt again and again": lambda run: (
            _no_progress(run),
            [run.wait(20).add("a", "detected", members=["b"]) for _ in range(10)],
        ),
    },
    "versions are kept": {
        "version back": lambda run: (
            run.add("a", "published", version=6).add("d", "fetched", version=6).add("d", "fetched", version=4)
        ),
        "version from nowhere": lambda run: run.add("b", "fetched", version=9),
        "version lost": lambda run: run.add("b", "lost", version=4),
        "published late": lambda run: run.add("a", "published", version=3),
        "fetched after retirement": lambda run: run.add("b", "fetched", version=2).add("b", "fetched", version=2),
    },
    "ranks keep their order": {
        "two ranks": lambda run: run.install(3, "a", "b", "a"),
        "other ranks": lambda run: run.install(3, "b", "a", "d"),
        "joiner first": lambda run: run.install(3, "e", "a", "b", "d"),
        "replacement last": lambda run: run.install(3, "a", "d", "e"),
        "too few": lambda run: run.add("a", "installed", epoch=3, members=["a"], rank=0, min_size=2, reason="test"),
    },
    "nobody healthy is evicted": {
        "healthy one evicted": lambda run: run.install(3, "a", "b", "d", "e").install(4, "a", "b", "d"),
        "not suspected by enough": _not_suspected_by_enough,
    },
    "a healed job ends": {
        "never ends": lambda run: (
            run.install(3, "a", "b", "d").add("a", "finished", steps=4).add("harness", "horizon", seconds=9.0)
        ),
    },
    "a job with enough members finishes": {
        "all give up": lambda run: _give_up(run, "a", "b", "d"),
        "all that live give up": lambda run: _give_up(run.add("a", "died", why="SIGKILL"), "b", "d"),
    },
    "the core goes on": {
        "the core breaks": lambda run: run.add("a", "broken", error="ValueError: a member is twice in the view"),
        "state apart": lambda run: run.add("a", "error", error="Mismatch: the state of the ranks has come apart"),
    },
}
"""By invariant, runs that break it."""


@pytest.mark.parametrize(
    ("invariant", "breaking"),
    [pytest.param(each, breaking, id=name) for each, runs in BREAKING.items() for name, breaking in runs.items()],
)
def test_each_checker_catches_a_run_that_breaks_its_invariant(
    invariant: str, breaking: Callable[[Run], object]
) -> None:
    run = good_run()
    breaking(run)
    assert invariant in names(check(run.events))


def test_every_checker_is_seen_failing() -> None:
    assert BREAKING.keys() == {checker.name for checker in CHECKERS}


# What is not a violation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["no state", "too few", "evicted"])
def test_a_job_with_too_few_members_or_without_its_state_need_not_finish(why: str) -> None:
    run = good_run()
    _give_up(run)
    match why:
        case "no state":  # the spare e has none
            run.add("e", "spare", epoch=2, to=[])
            for member in "abd":
                run.add(member, "died", why="SIGKILL")
            _give_up(run, "e")
        case "too few":
            run.events[1] = an_event(
                "installed", "a", 100.0015, 97, epoch=1, members=["a", "b", "c"], rank=0, min_size=3
            )
            run.add("b", "died", why="SIGKILL")
            _give_up(run, "a", "d")
        case "evicted":
            for member in "abd":
                run.add(member, "evicted", epoch=3, reason="test")
    assert "a job with enough members finishes" not in names(check(run.events))


def test_a_version_may_be_retired_while_it_is_being_fetched_and_its_number_be_published_anew() -> None:
    assert check(good_run().add("b", "fetched", version=2).events) == []
    run = good_run().add("a", "published", version=2)
    run.add("b", "fetched", version=2).add("b", "fetched", version=2)
    assert check(run.events) == []


def test_a_member_that_missed_a_rollback_may_take_over_an_older_state() -> None:
    run = Run().commit("a", 5, epoch=3).commit("b", 5, epoch=3)
    run.add("a", "restored", step=3, epoch=4, source="checkpoint").add("b", "synced", step=3, epoch=5, source=0)
    assert "committed steps are kept" not in names(check(run.events))


@pytest.mark.parametrize("known", ["fault", "died", "detected"])
def test_a_process_that_is_gone_may_leave_an_attempt_open(known: str) -> None:
    run = good_run().add("a", "attempt", step=5, epoch=2)
    match known:
        case "fault":
            run.add("harness", "fault", what="kill", target="a")
        case "died":
            run.add("a", "died", why="SIGKILL")
        case "detected":
            run.add("b", "detected", members=["a"], evidence="exited")
    run.wait(60).add("b", "spare", epoch=2, to=[])
    assert "ops end by their deadline" not in names(check(run.events))


def test_a_stopped_process_may_miss_its_deadline() -> None:
    run = good_run().add("a", "attempt", step=5, epoch=2).add("harness", "fault", what="pause", target="a").wait(60)
    run.add("a", "op", op="all_reduce", seq=9, epoch=2, seconds=60.002, timeout=5.0)
    run.add("a", "aborted_step", step=5, epoch=2)
    assert "ops end by their deadline" not in names(check(run.events))


def test_a_deadline_may_be_overrun_by_the_slack_and_a_log_may_end_before_the_bound_of_progress() -> None:
    run = good_run().add("a", "op", op="barrier", seq=9, epoch=2, seconds=5.4, timeout=5.0)
    assert check(run.events, Bounds(slack=0.5)) == []
    assert names(check(run.events, Bounds(slack=0.1))) == {"ops end by their deadline"}
    run = good_run().add("harness", "fault", what="kill", target="b").wait(5).add("a", "revoked", epoch=2)
    assert check(run.events, Bounds(progress=10.0)) == []


def test_a_job_that_starts_from_a_checkpoint_need_not_begin_with_step_one() -> None:
    run = Run().install(7, "a", "b").step(51, 7, "a", "b").step(52, 7, "a", "b")
    assert check(run.events) == []


def test_violations_are_reported_with_the_event_that_shows_them() -> None:
    """A simulator can read the violations after every event."""
    run = good_run().commit("a", 4)
    commits = next(checker for checker in CHECKERS if checker.name == "committed steps are kept")(Bounds())
    for event in run.events[:-1]:
        commits.observe(event)
    assert commits.violations == []
    commits.observe(run.events[-1])
    (violation,) = commits.violations
    assert (violation.process, violation.time) == ("a", run.events[-1].time)
    assert "step 4 again" in violation.message


def _line(time: float, process: str, kind: str, **fields: object) -> str:
    return json.dumps({"time": time, "process": process, "pid": 1, "kind": kind, **fields}) + "\n"


def test_logs_are_merged_by_time_without_a_line_cut_off_by_a_kill_and_one_broken_in_the_middle_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    whole, cut = _line(1.0, "a", "joined") + _line(3.0, "a", "finished"), _line(4.0, "a", "attempt", step=1)[:-20]
    path.write_text(whole + cut)
    (tmp_path / "b.jsonl").write_text(_line(2.0, "b", "joined", address="h:1"))
    events = read_events(tmp_path, refuse)
    assert [(event.process, event.kind) for event in events] == [("a", "joined"), ("b", "joined"), ("a", "finished")]
    assert events[1].address == "h:1"
    first, second = an_event("attempt", step=1), an_event("prepared", step=1)
    assert merge([[first, second], []]) == [first, second], "those of one process keep their order at equal times"
    path.write_text("nonsense\n" + whole)
    with pytest.raises(CorruptData, match=r"a\.jsonl: line 1 is no event"):
        read_events(path, refuse)
