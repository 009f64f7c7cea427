"""Parts of a session on their own: votes and decisions, silence, epoch guard, timeouts, fault points."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, CorruptData, HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked, Work
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.transport.base import closed_there
from holdfast.comms.transport.liveness import this_process
from holdfast.ft import events, faultpoints, step_protocol
from holdfast.ft.communicators import collect_votes
from holdfast.ft.detectors.heartbeat import SilenceTracker
from holdfast.ft.event_lines import to_record
from holdfast.ft.events import EpochRevoked, Event, ViewInstalled
from holdfast.ft.membership.events import Cleared, Stalled, Suspicion
from holdfast.ft.membership.view import Job, Timeouts, View, delta_between
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.session import Attempt
from holdfast.ft.telemetry import event_log
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.harness import LocalCluster
from support.comms.meeting import alone
from support.programs.forked_programs import run_forked
from support.views import member
from support.waiting import PATIENCE

# -- votes


def test_votes_are_exchanged_by_an_op_if_they_did_not_come_with_the_connections() -> None:
    votes = [
        step_protocol.Vote(step_protocol.HOLDER, 4, prepared, 10, rewinds)
        for rewinds in range(4)
        for prepared in (False, True)
    ]

    def body(comm: Communicator) -> tuple[list[step_protocol.Vote], list[step_protocol.Vote]]:
        mine = votes[comm.rank]
        bare: Any = SimpleNamespace(
            connect_payloads=None, size=comm.size, device=comm.device, all_gather_single=comm.all_gather_single
        )
        came: Any = SimpleNamespace(connect_payloads=[vote.numbers() for vote in votes])
        return collect_votes(bare, mine, PATIENCE), collect_votes(came, mine, PATIENCE)

    with LocalCluster(2, "inproc") as cluster:
        assert cluster.run(body) == [(votes[:2], votes)] * 2


# -- silence


def watch(stopped: bool, host: str = "h") -> SilenceTracker:
    silence = SilenceTracker(member(0), Timeouts(heartbeat=0.1, suspect=0.5), lambda pid: stopped)
    silence.follow([member(0), member(1, host)], 0.0)
    return silence


@pytest.mark.parametrize(("stopped", "when"), [(True, [0.5]), (False, [])])
def test_a_silent_process_is_stalled_unless_it_is_seen_to_run(stopped: bool, when: list[float]) -> None:
    silence = watch(stopped)
    found = [(t / 100, *silence.look(t / 100)) for t in range(0, 55 if stopped else 1000, 5)]
    assert [(at, *map(type, decisions)) for at, *decisions in found if decisions] == [(at, Stalled) for at in when]


@pytest.mark.parametrize("host", ["h", "there"])
def test_a_detector_that_was_stalled_itself_looks_again_before_it_reports(host: str) -> None:
    silence = watch(stopped=True, host=host)
    silence.look(0.05)
    assert silence.look(30.0) == ()
    assert silence.look(30.05) == ()


def test_a_heartbeat_ends_the_silence() -> None:
    silence = watch(stopped=True)
    for t in range(0, 45, 5):
        silence.look(t / 100)
    silence.hear("p1", 0.45)
    assert not any(silence.look(t / 100) for t in range(50, 90, 5))


def test_on_another_host_silence_is_a_suspicion_until_a_heartbeat_comes() -> None:
    silence = watch(stopped=True, host="there")
    assert silence.look(0.4) == ()
    assert silence.look(0.5) == (Suspicion("p1", "p0", "silent for 0.50 s"),)
    assert silence.look(0.6) == ()
    assert silence.hear("p1", 0.7) == (Cleared("p1", "p0"),)


# -- the epoch guard


def test_an_epoch_that_is_over_cannot_be_held() -> None:
    guard = EpochGuard()
    guard.install(three(1, 0))
    with guard.held(1):
        pass
    assert guard.revoke(1, PeerFailed((1,), "it died"))
    assert not guard.revoke(1, PeerFailed((2,), "it died too"))
    with pytest.raises(PeerFailed, match="rank 1 failed: it died"), guard.held(1):
        pass
    guard.install(three(2, 0))
    with pytest.raises(PeerFailed, match="rank 1 failed: it died"), guard.held(1):
        pass
    with guard.held(2):
        pass
    guard.install(three(3, 0))
    for replaced in (1, 2):
        with pytest.raises(Revoked, match="a later epoch has begun"), guard.held(replaced):
            pass


def test_a_revoked_epoch_is_not_the_next_one() -> None:
    guard = EpochGuard()
    guard.install(three(1, 0))
    guard.install(three(2, 0))
    guard.revoke(2, Revoked(2))
    with pytest.raises(OpTimeout):
        guard.wait(1, 0.01)


@pytest.mark.parametrize("how", ["install", "announce", "end"])
def test_a_thread_that_waits_for_the_next_view_is_woken(how: str) -> None:
    guard, _ = guard_of_member()
    with carried(guard):
        guard.revoke(1, PeerFailed((1,), "it died"))
        given = HoldfastError("it is over") if how == "end" else three(2, 0, 2)
        wakes = threading.Timer(0.05, getattr(guard, how), [given])
        wakes.start()
        if how == "end":
            with pytest.raises(HoldfastError, match="it is over"):
                guard.wait(1, 2 * PATIENCE)
        else:
            assert guard.wait(1, 2 * PATIENCE).epoch == 2
        wakes.join()


def three(epoch: int, *ranks: int) -> View:
    return View(epoch, "running", tuple(map(member, ranks)), Job("job", 3, 1, 3, ("shm",), "shm"), f"epoch {epoch}")


def guard_of_member() -> tuple[EpochGuard, list[tuple[str, int]]]:
    """The epoch guard of the first member of epoch 1, and the events that it emits: kind and epoch."""
    said: list[tuple[str, int]] = []

    def emit(event: Event) -> None:
        assert isinstance(event, ViewInstalled | EpochRevoked)
        said.append((event.kind, event.epoch))

    guard = EpochGuard(member(0).id, emit)
    guard.install(three(1, 0, 1, 2))
    return guard, said


def announced(old: View, new: View) -> bytes:
    change = delta_between(old, new)
    assert change is not None
    return change.encode()


@pytest.mark.parametrize(("ranks", "lost"), [((0, 2), (1,)), ((0, 1, 2, 3), None)], ids=["smaller", "larger"])
def test_a_member_adopts_an_announced_view_and_later_installs_it(
    ranks: tuple[int, ...], lost: tuple[int, ...] | None
) -> None:
    guard, said = guard_of_member()
    guard.adopt_announced_view(announced(three(1, 0, 1, 2), three(2, *ranks)))
    assert guard.wait(1, 0.0) == three(2, *ranks)
    why = guard.why_over(1)
    assert isinstance(why, PeerFailed if lost else Revoked)
    assert getattr(why, "ranks", None) == lost
    guard.revoke(1, Revoked(1), "comes late")
    guard.install(three(2, *ranks))
    assert said == [("installed", 1), ("revoked", 1), ("installed", 2)]
    assert not guard.is_over(2)


def carried(guard: EpochGuard) -> Communicator:
    members = KnownMembers(rank=0, peers=[this_process()], store=dist.HashStore(), epoch=1)
    comm = connect_members("inproc", members)
    guard.bind(comm)
    return comm


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_member_that_announced_the_next_view_installs_it_when_it_looks_for_it(epoch: int) -> None:
    """Unless a later one was installed before."""
    guard, said = guard_of_member()
    with carried(guard):
        assert guard.announce(three(2, 0, 2))
        assert said == [("installed", 1)]
        if epoch == 3:
            guard.install(three(3, 0, 2))
        assert guard.wait(1, 0.0) == three(epoch, 0, 2)
        guard.install(three(epoch, 0, 2))
    assert said == [("installed", 1), ("installed", epoch)]


@pytest.mark.parametrize(
    "word",
    [
        b"",
        b"nonsense",
        announced(three(1, 0, 1, 2), three(2, 1, 2)),
        announced(three(2, 0, 1, 2), three(3, 0, 1)),
        announced(three(1, 0, 1, 2), msgspec.structs.replace(three(2, 0, 1, 2), phase="finished")),
    ],
    ids=["empty", "nonsense", "without this process", "not the next one", "the end"],
)
def test_an_announcement_without_a_usable_next_view_is_ignored(word: bytes) -> None:
    guard, said = guard_of_member()
    guard.adopt_announced_view(word)
    assert said == [("installed", 1)]
    assert not guard.is_over(1)


@given(st.binary(max_size=300))
def test_any_bytes_of_an_announcement_are_adopted_or_ignored(word: bytes) -> None:
    guard, _ = guard_of_member()
    guard.adopt_announced_view(word)
    assert guard.wait(0, 0.0).rank_of(member(0).id) is not None


# -- timeouts, fault points, events


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"heartbeat": 0.4}, "at least twice heartbeat"),
        ({"rebuild": 0.5}, "must exceed suspect"),
        ({"operation": 0.2}, "before a stopped peer is found"),
        ({"join": 0.05}, "nobody could join in time"),
        ({"suspect": 0.0}, "must be finite and above 0"),
        ({"rebuild": float("inf")}, "must be finite"),
        ({"join": "1"}, "is not a number of seconds"),
    ],
)
def test_timeouts_that_cannot_work_together_are_refused(times: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Timeouts(**times)


def test_fault_points_are_named_and_cost_nothing_until_armed() -> None:
    seen: list[tuple[str, int, int, int]] = []
    faultpoints.reach("commit.before_barrier", 1, 2, 3)
    faultpoints.arm(lambda *where: seen.append(where))
    try:
        faultpoints.reach("commit.before_barrier", 1, 2, 3)
    finally:
        faultpoints.arm(None)
    assert seen == [("commit.before_barrier", 1, 2, 3)]
    with pytest.raises(ValueError, match=r"no fault point 'commit\.somewhere'; there are step\.begin"):
        faultpoints.parse("commit.somewhere:1:2")
    with pytest.raises(ValueError, match="is not point:step:rank"):
        faultpoints.parse("step.begin:1")
    assert faultpoints.parse("") is None


def test_events_go_to_a_file_of_their_own_and_to_listeners(tmp_path: Path) -> None:
    log, heard = EventLog("p1", tmp_path), list[events.Event]()
    unsubscribe = log.subscribe(heard.append)
    log.subscribe(lambda event: 1 / 0)
    began = time.monotonic()
    log.emit(events.ViewInstalled(epoch=3, members=("p1",), rank=0))
    unsubscribe()
    log.emit(events.StepsFinished(step=0))
    log.close()
    log.emit(events.StepsFinished(step=1))
    lines = lines_of(tmp_path / "p1.jsonl")
    assert [line["kind"] for line in lines] == ["installed", "finished"]
    assert lines[0]["process"] == "p1" and lines[0]["epoch"] == 3 and began <= lines[0]["time"] <= time.monotonic()
    assert list(map(to_record, heard)) == lines[:1]


def test_what_must_hear_an_event_at_once_does_so_before_anything_is_held() -> None:
    """Nothing but the record is made under the lock of an epoch; an event of an epoch that is over is not recorded."""
    order: list[str] = []
    guard, log = EpochGuard(), EventLog("p1", "")
    guard.install(three(1, 0))

    def note(what: str) -> None:
        ended = threading.Thread(target=guard.why_over, args=(1,), daemon=True)
        ended.start()
        ended.join(0.2)
        order.append(what if ended.is_alive() else f"{what}, nothing held")

    log.at_once(events.StepBegun, lambda event: note(f"at once: step {event.step}"))
    log.subscribe(lambda event: None, wants=lambda event: note("recorded") is None)
    log.emit(events.StepBegun(step=3, epoch=1), guard.held(1))
    assert order == ["at once: step 3, nothing held", "recorded"]
    guard.revoke(1, Revoked(1))
    with pytest.raises(Revoked):
        log.emit(events.StepBegun(step=4, epoch=1), guard.held(1))
    assert order[2:] == ["at once: step 4, nothing held"]
    log.close()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


class Hanging:
    """A call that hangs until `go_on` is set, and then does what it did before."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.begun, self.go_on = call, threading.Event(), threading.Event()

    def __call__(self, *given: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(2 * PATIENCE)
        return self._call(*given)


def test_a_file_that_hangs_stops_nobody_and_what_is_dropped_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "MOST_WAITING", 5)
    monkeypatch.setattr(event_log, "_append", write := Hanging(event_log._append))
    log, heard = EventLog("p1", tmp_path), list[int]()
    log.subscribe(lambda event: heard.append(getattr(event, "step", -1)))
    log.emit(events.StepBegun(step=0, epoch=1))
    assert write.begun.wait(20.0)
    for number in range(1, 9):  # the file has one, four wait, four are dropped
        log.emit(events.StepBegun(step=number, epoch=1))
        assert not log.flush(0.0), "the file has not had them"
        while len(heard) <= number:
            time.sleep(0.001)
    assert caplog.text.count("its event log hangs; events are dropped") == 1
    write.go_on.set()
    assert log.flush(20.0)
    log.close()
    lines = lines_of(tmp_path / "p1.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "attempt"] == [0, 1, 2, 3, 4]
    assert [line["count"] for line in lines if line["kind"] == "events_dropped"] == [4]
    assert heard == list(range(9)), "a listener has its own thread"


def test_a_listener_that_hangs_delays_no_file_and_the_end_only_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "CLOSE_SECONDS", 0.2)
    log, listener = EventLog("p1", tmp_path), Hanging(lambda event: None)
    log.subscribe(listener)
    log.emit(events.StepsFinished(step=0))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < PATIENCE
    assert [line["kind"] for line in lines_of(tmp_path / "p1.jsonl")] == ["finished"]
    assert "a listener to its events hangs; 1 events may be lost" in caplog.text
    listener.go_on.set()


def test_a_log_that_nobody_closes_is_written_at_the_end_of_its_process(tmp_path: Path) -> None:
    text = (
        "import time\nfrom holdfast.ft.events import StepsFinished\n"
        "from holdfast.ft.telemetry import event_log as log\n"
        "append = log._append; log._append = lambda *given: (time.sleep(0.2), append(*given))[1]; "
        f"log.EventLog('p1', {str(tmp_path)!r}).emit(StepsFinished(step=0))"
    )
    done = run_forked(text, ["program.py"])
    assert done.returncode == 0, done.stderr
    assert [line["kind"] for line in lines_of(tmp_path / "p1.jsonl")] == ["finished"]


# -- the end of an attempt's block: what is left in it to run, and what is not known to have failed


def end_of_block(comm: Communicator, body: Callable[[], object]) -> list[object]:
    """Run `body` as the block of an attempt over `comm`; returns with what the session is told that it has ended."""
    told: list[object] = []

    def end_attempt(failure: HoldfastError | None) -> bool:
        told.append(None if failure is None else type(failure))
        return failure is None

    session: Any = SimpleNamespace(alive=(True,), end_attempt=end_attempt)
    with Attempt(session, comm, 0, 1) as attempt:
        body()
    assert attempt.committed == (told == [None])
    return told


def issue(comm: Communicator, does: Callable[[], object] = lambda: None, fails: Exception | None = None) -> Work:
    """Issue an asynchronous op that does something, and then fails with an error."""

    def body(deadline: float) -> None:
        does()
        if fails is not None:
            raise fails

    return comm.issue("custom", 0, body, None, async_op=True)


DIED = PeerFailed((2,), "it died")


def test_a_block_ends_once_the_ops_have_that_nobody_waits_for(tmp_path: Path) -> None:
    with alone(tmp_path, "inproc") as comm, comm.split([0]) as part:
        for each in (comm, part):
            ended: list[str] = []
            slow = partial(issue, each, lambda ended=ended: (time.sleep(0.05), ended.append("op")))
            assert end_of_block(comm, slow) == [None]
            assert ended == ["op"]


@pytest.mark.parametrize("over", ["the communicator", "a split", "a split that is dropped"])
def test_a_block_fails_with_an_op_that_nobody_waits_for(tmp_path: Path, over: str) -> None:
    with alone(tmp_path, "inproc") as comm:
        part = comm if over == "the communicator" else comm.split([0])

        def body() -> None:
            nonlocal part
            issue(part, fails=DIED).ends_within(PATIENCE)
            if over == "a split that is dropped":
                part.close()
                part = comm

        assert end_of_block(comm, body) == [PeerFailed]
        assert end_of_block(comm, lambda: None) == [None], "it is told once"
        part.close()


def test_an_error_of_an_op_that_nobody_waits_for_is_raised_if_it_is_no_consequence_of_a_death(tmp_path: Path) -> None:
    with alone(tmp_path, "inproc") as comm, pytest.raises(CorruptData, match="other bytes"):
        end_of_block(comm, lambda: issue(comm, fails=CorruptData("other bytes")))


@pytest.mark.parametrize("how", ["caught", "closed", "aborted"])
def test_what_a_block_has_dealt_with_itself_does_not_undo_it(tmp_path: Path, how: str) -> None:
    with alone(tmp_path, "inproc") as comm, comm.split([0]) as part:

        def body() -> None:
            if how == "caught":
                with pytest.raises(PeerFailed):
                    issue(part, fails=DIED).wait()
            elif how == "closed":
                began = threading.Event()
                issue(part, lambda: (began.set(), time.sleep(0.05)), DIED)
                assert began.wait(PATIENCE)
                part.close()
            else:
                issue(comm).wait()
                comm.abort(DIED)

        assert end_of_block(comm, body) == [None]


def test_the_calls_of_a_window_belong_to_a_block_and_waits_for_signals_do_not(tmp_path: Path) -> None:
    with alone(tmp_path, "inproc") as comm, comm.window(torch.zeros(2)) as window:
        calls, memory = list[Work](), window.memory
        write, written = memory.write, list[int]()

        def slow(rank: int, *where: Any) -> None:
            time.sleep(0.05)
            write(rank, *where)
            written.append(rank)

        def fails(rank: int, *where: Any) -> None:
            raise closed_there(rank)

        def body(then: Callable[..., None]) -> None:
            memory.write = then  # type: ignore[method-assign]
            calls.extend((window.wait_signal(0, async_op=True), window.put(torch.ones(2), 0, async_op=True)))

        assert end_of_block(comm, lambda: body(slow)) == [None]
        assert written == [0] and not calls[0].done()
        assert end_of_block(comm, lambda: body(fails)) == [Revoked]
        for _ in range(2):
            window.signal(0)
        for waits in calls[::2]:
            waits.wait(PATIENCE)


# -- what becomes of an open step when its epoch has ended: votes, decisions, and times between commits


def holder(done: int, prepared: bool) -> step_protocol.Vote:
    return step_protocol.Vote(step_protocol.HOLDER, done, prepared, 10)


NEW, FOUND, REWOUND = (
    step_protocol.Vote(step_protocol.NEWCOMER, 0, False, 10),
    step_protocol.Vote(step_protocol.FOUNDER, 0, False, 10),
    step_protocol.Vote(step_protocol.HOLDER, 4, False, 10, rewinds=1),
)


@pytest.mark.parametrize(
    ("votes", "committed", "expected"),
    [
        pytest.param([holder(4, True)] * 2, [True] * 2, (5, 0, ()), id="all had prepared the step"),
        pytest.param([holder(4, True), holder(4, False)], [False] * 2, (4, 0, ()), id="one had not"),
        pytest.param(
            [holder(5, False), holder(4, True), holder(5, True)],
            [False, True, False],
            (5, 0, ()),
            id="one has committed it, and prepared the next",
        ),
        pytest.param([NEW, *[holder(4, True)] * 2, FOUND], [False, True, True, False], (5, 1, (0, 3)), id="newcomers"),
        pytest.param([NEW, FOUND, FOUND], [False] * 3, (0, 1, (0, 2)), id="founders alone"),
        pytest.param([holder(6, True), REWOUND, REWOUND], [False] * 3, (4, 1, (0,)), id="one missed a rollback"),
    ],
)
def test_a_step_that_all_had_prepared_or_one_has_committed_is_committed_and_the_first_gives_the_state(
    votes: list[step_protocol.Vote], committed: list[bool], expected: tuple[int, int, tuple[int, ...]]
) -> None:
    """Else, it is done again. Newcomers have no vote; members without the state, or with an older one, take it."""
    decisions = [step_protocol.decide(votes, rank) for rank in range(len(votes))]
    assert [each.committed for each in decisions] == committed
    assert {(each.done, each.source, each.receivers) for each in decisions} == {expected}


@pytest.mark.parametrize(("mine", "theirs"), [(NEW, holder(4, False)), (holder(6, True), REWOUND)])
def test_a_newcomer_or_a_member_that_missed_a_rollback_votes_as_the_others_once_it_has_their_state(
    mine: step_protocol.Vote, theirs: step_protocol.Vote
) -> None:
    """Should the epoch end before the others know, no state is sent to it again."""
    commits = step_protocol.CommitState()
    commits.standing, commits.done, commits.total = mine.standing, mine.done, mine.total
    commits.settle(step_protocol.decide([mine, theirs, theirs], 0))
    commits.take_over(4)
    assert commits.vote() == theirs and commits.pending is None


def test_members_without_the_state_and_ranks_with_different_steps_are_refused() -> None:
    with pytest.raises(HoldfastError, match="everybody who had it died"):
        step_protocol.decide([NEW], 0)
    with pytest.raises(Mismatch, match="rank 1 was asked for 20 steps, rank 0 for 10"):
        step_protocol.decide([holder(4, False), step_protocol.Vote(step_protocol.HOLDER, 4, False, 20)], 0)
    stray = [holder(4, False), step_protocol.Vote(step_protocol.NEWCOMER, 0, False, 20)]
    with pytest.raises(Mismatch, match="rank 1 was asked for 20 steps"):
        step_protocol.decide(stray, 1)
    assert step_protocol.decide(stray, 0).receivers == (1,), "a newcomer that is wrong has to go, the others stay"
    for behind in (holder(4, False), holder(3, True)):
        with pytest.raises(Mismatch, match="come apart"):
            step_protocol.decide([behind, holder(5, False)], 0)
