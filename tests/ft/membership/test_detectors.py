"""Failure detectors: what each reports, and how plugins add them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import CorruptData, OpTimeout, PeerFailed, ReduceOp, Unsupported
from holdfast.comms.plugins.registry import InvalidPlugin, Registry
from holdfast.comms.plugins.spec import API_VERSION, Available, DetectorInfo, hookimpl
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_stopped, this_process
from holdfast.ft import Session, Timeouts, events
from holdfast.ft.detectors import nccl_ras, process_watch
from holdfast.ft.detectors import plugin as own_detectors
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.nccl_ras import NcclRasDetector, RasStatus, decode, lost_members, query
from holdfast.ft.detectors.observers import NOT_LISTENING, Conclusion, ObserversDetector, SuspicionGraph
from holdfast.ft.detectors.progress import ProgressDetector, StragglerTracker
from holdfast.ft.detectors.watch import Detectors
from holdfast.ft.events import LostMajority, ResignedItself
from holdfast.ft.membership.events import Event, ProvenDeaths, Stalled, Suspicion, Unreachable
from holdfast.ft.membership.view import Job, Member, Phase, View
from holdfast.ft.node import messages
from holdfast.ft.node.connections import MemberConnections
from holdfast.ft.node.node import CALM_BEATS, CALM_BEATS_A_MESSAGE
from holdfast.ft.ports import OpPosition
from holdfast.harness import LocalCluster
from support.children import Child
from support.hosts import be_alone_on_host
from support.views import TIMES, detector_context, view_of
from support.waiting import PATIENCE, eventually

# -- observers: three hosts of two ranks, seen by one process


def observers(rank: int, hosts: str = "AABBCC", phase: Phase = "running") -> SuspicionGraph:
    view = view_of(hosts, phase=phase)
    mine = SuspicionGraph(view.members[rank], TIMES)
    mine.follow(view, [m for m in view.members if m is not view.members[rank]])
    return mine


def from_to(observers_: SuspicionGraph, pairs: Sequence[tuple[int, int]], now: float = 0.0) -> None:
    for observer, member in pairs:
        observers_.suspect(f"p{observer}", f"p{member}", "silent", now)


def judged(observers_: SuspicionGraph, until: float, since: float = 0.0) -> list[tuple[float, Conclusion]]:
    """Its conclusions with their times, looked at every 50 ms."""
    times = [round(since + step * 0.05, 2) for step in range(int((until - since) / 0.05) + 1)]
    return [(now, finding) for now in times for finding in observers_.look(now)]


def unreachable(found: Sequence[tuple[float, Conclusion]]) -> list[tuple[float, str]]:
    return [(when, finding.member) for when, finding in found if isinstance(finding, Unreachable)]


CUT_OFF = [(4, rank) for rank in range(4)]


@pytest.mark.parametrize("phase", ["running", "forming"])
def test_the_smaller_side_of_a_partition_stops_at_once_and_resigns_when_it_hears_the_others(phase: Phase) -> None:
    """While the job is forming it stays instead, and may be cut off again. The larger side goes on."""
    small, large = observers(4, phase=phase), observers(0)
    from_to(large, [(0, 4), (0, 5)])
    assert judged(large, 0.5) == []
    for began in (0.0, 1.0) if phase == "forming" else (0.0,):
        from_to(small, CUT_OFF, began)
        assert [type(finding) for _, finding in judged(small, began + 0.3, began)] == [LostMajority]
        for _, member in CUT_OFF:
            small.clear("p4", f"p{member}")
        until, expected = (began + 0.9, []) if phase == "forming" else (2.0, [ResignedItself])
        assert [type(finding) for _, finding in judged(small, until, began + 0.3)] == expected


def test_the_small_side_proposes_when_the_large_side_does_not() -> None:
    small = observers(4)
    from_to(small, CUT_OFF)
    assert unreachable(judged(small, 2.0)) == [(1.0, f"p{rank}") for rank in range(4)]


def test_a_member_that_reports_a_lost_majority_is_evicted_before_it_proposes() -> None:
    mine = observers(0, "AAAB")
    from_to(mine, [(3, 0), (3, 1), (3, 2)])
    assert unreachable(judged(mine, 0.95)) == [(0.5, "p3")]


def test_of_two_equal_sides_the_one_with_the_first_rank_continues() -> None:
    for rank, cut_off in ((0, False), (2, True)):
        side = observers(rank, "AABB")
        from_to(side, [(rank, other) for other in range(4) if other // 2 != rank // 2])
        assert any(isinstance(finding, LostMajority) for _, finding in judged(side, 0.3)) == cut_off


def test_one_cut_link_costs_the_fewest_members_after_a_while() -> None:
    """A and C do not hear each other, B hears both: no member has most observers against it."""
    pairs = [(0, 4), (0, 5), (1, 4), (1, 5), (4, 0), (4, 1), (5, 0), (5, 1)]
    for rank in (0, 2, 4):
        mine = observers(rank)
        from_to(mine, pairs)
        found = judged(mine, 2.0)
        assert {member for _, member in unreachable(found)} == {"p4", "p5"} - {f"p{rank}"}
        assert min(when for when, _ in found) >= 1.5


def test_a_link_that_flaps_for_a_short_time_costs_no_member() -> None:
    mine = observers(0)
    for flap in range(20):
        from_to(mine, [(0, 4), (1, 5)], flap * 1.0)
        assert judged(mine, flap + 0.9, flap) == []
        mine.clear("p0", "p4")
        mine.clear("p1", "p5")


@pytest.mark.parametrize(("epoch", "expected"), [(3, [(0.5, "p3")]), (4, [])])
def test_a_failure_that_a_transport_reports_acts_sooner_and_does_not_heal_but_in_a_new_epoch(
    epoch: int, expected: list[tuple[float, str]]
) -> None:
    mine, view = observers(0), view_of("AABBCC", epoch=epoch)
    mine.report("p2", "p3", "connection reset", 0.0)
    mine.clear("p2", "p3")
    mine.follow(view, view.members[1:])
    found = judged(mine, 5.0)
    assert unreachable(found) == expected
    assert all("connection reset" in conclusion.evidence for _, conclusion in found)


@pytest.mark.parametrize(("listens", "word"), [(True, Stalled), (False, Unreachable)])
@pytest.mark.parametrize("evidence", ["silent for 0.6 s", NOT_LISTENING])
async def test_a_local_straggler_is_ended_unless_it_has_left(evidence: str, listens: bool, word: type) -> None:
    """It may be about to join again, because it learnt before this process that both were evicted."""
    view = view_of("AABBCC")
    told: list[Event] = []
    detector = ObserversDetector(detector_context(view.members[0], asyncio.get_running_loop(), tell=told.append))
    detector.follow(view, view.members[1:])
    if not listens:
        detector.refused("p1", 0.0)
    for observer in ("p2", "p4"):
        detector.suspected(observer, "p1", evidence, 0.0)
    for step in range(40):
        detector.look(step * 0.05)
    about_p1 = [each for each in told if "p1" in repr(each)]
    assert [type(each) for each in about_p1] == [word]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.integers(0, 5))
def test_the_members_that_remain_can_all_reach_each_other(pairs: list[tuple[int, int]], rank: int) -> None:
    mine = observers(rank, "ABCDEF")
    for observer, member in pairs:
        mine.report(f"p{observer}", f"p{member}", "gone", 0.0)
    failed = {member for _, member in unreachable(judged(mine, 1.0))}
    left = [(a, b) for a, b in pairs if a != b and not {f"p{a}", f"p{b}"} & failed]
    assert all(rank in pair for pair in left), "only this process itself may be left, for the others to judge"
    assert len(failed) <= len({b for _, b in pairs} | {a for a, _ in pairs})


# -- progress


def progress(ticks: dict[int, int]) -> StragglerTracker:
    view = view_of("AAB")
    mine = StragglerTracker(view.members[0], TIMES, lambda pid: ticks[pid])
    mine.follow(view)
    return mine


@pytest.mark.parametrize(("moves", "words"), [(3, "it computes"), (0, "it waits")])
def test_a_late_member_is_examined_after_the_suspect_time(moves: int, words: str) -> None:
    ticks = {101: 50, 102: 0}
    mine = progress(ticks)
    mine.here(OpPosition(3, 7, True), 0.0)
    mine.there("p1", OpPosition(3, 6, False))
    mine.there("p2", OpPosition(3, 7, True))
    assert mine.look(0.4) == ()
    assert mine.look(0.5) == (), "the first look only notes the processor time"
    ticks[101] += moves
    [late] = mine.look(0.6)
    assert (late.member, late.op) == ("p1", 7)
    assert words in late.evidence and "entered 6 ops, 7 are entered here since 0.60 s" in late.evidence
    assert mine.look(0.7) == (), "each is told of once an op"
    assert [member.id for member in mine.behind(7)] == ["p1"]


def test_no_member_is_late_while_this_process_does_not_wait_or_is_in_another_epoch() -> None:
    mine = progress({})  # it looks at no process
    mine.there("p1", OpPosition(3, 2, False))
    mine.here(OpPosition(3, 7, False), 0.0)
    assert mine.look(60.0) == ()
    mine.here(OpPosition(2, 7, True), 60.0)
    assert mine.look(120.0) == (), "it is in an older epoch"
    mine = progress({101: 0})
    mine.here(OpPosition(3, 7, True), 0.0)
    mine.there("p1", OpPosition(2, 1, False))
    assert mine.look(1.0) == mine.look(2.0) == ()


def after_a_late_barrier(*came: int, joint: int = 5001) -> list[Event]:
    """What p0 reports of p1, p2 and p3 on its host after it was late in a barrier.

    By their last known positions none has entered the barrier; meanwhile `came` did, and their next heartbeats say so.
    """
    view, told = view_of("AAAA"), list[Event]()
    here = OpPosition(3, 5001, False)
    detector = ProgressDetector(detector_context(view.members[0], None, tell=told.append, place=lambda: here))
    detector.follow(view, view.members[1:])
    for rank in (1, 2, 3):
        detector.placed(f"p{rank}", OpPosition(3, 4000, False))
    late = OpTimeout("barrier", 5001, 0.05)
    late.communicator, late.joint = "job", joint
    detector.failed(view, late, 10.0)
    assert told == []
    for rank in came:
        detector.placed(f"p{rank}", OpPosition(3, 5001, False))
    detector.look(10.0 + TIMES.suspect)
    detector.look(10.1 + TIMES.suspect)
    return told


def test_a_straggler_is_judged_by_its_reports_after_the_op_was_late_unless_it_was_an_op_of_some_ranks() -> None:
    [stalled] = after_a_late_barrier(1, 2)
    assert isinstance(stalled, Stalled)
    assert stalled.member == "p3"
    assert stalled.evidence.startswith("it held up barrier until its time was up: it has entered 4000 ops, 5001 are")
    assert after_a_late_barrier(1, 2, 3) == []
    assert after_a_late_barrier(joint=0) == [], "such an op does not show which rank is behind"


# -- heartbeats in shared memory, and looks at processes


def test_a_heartbeat_page_is_readable_while_its_process_is_stopped_and_ends_with_it(
    start: Callable[..., Child],
) -> None:
    def body(pipe: Connection) -> None:
        pulse = process_watch.HeartbeatPage()
        pulse.beat(123.5, OpPosition(4, 17, True))
        pipe.send((pulse.fd, this_process()))
        pipe.recv()

    child = start(body)
    fd, peer = child.hear()
    child.stop()
    reader = process_watch.HeartbeatPageReader(peer, fd)
    assert reader.read() == (123.5, OpPosition(4, 17, True))
    assert is_stopped(child.pid)
    reader.close()
    with pytest.raises(OSError):
        process_watch.HeartbeatPageReader(Peer(peer.host, peer.pid, peer.started + 1), fd)
    child.kill()
    with pytest.raises(OSError):
        process_watch.HeartbeatPageReader(peer, fd)


def test_a_descriptor_that_is_no_heartbeat_page_is_refused_at_once(tmp_path: Path) -> None:
    """Opening a FIFO without a writer would wait."""
    os.mkfifo(tmp_path / "fifo")
    reads = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.closing(os.fdopen(reads)):
        for number in (0, 10**6, reads):
            with pytest.raises(OSError):
                process_watch.HeartbeatPageReader(this_process(), number)


def test_processor_time_moves_while_a_process_computes() -> None:
    before = process_watch.cpu_ticks(os.getpid())
    deadline = time.monotonic() + 5.0
    while process_watch.cpu_ticks(os.getpid()) == before:
        assert time.monotonic() < deadline
    assert not is_stopped(os.getpid())


async def test_a_dying_process_has_the_lowest_priority_while_its_memory_is_freed(start: Callable[..., Child]) -> None:
    def body(pipe: Connection) -> None:
        kept = bytearray(b"x") * (256 << 20)
        threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()
        pipe.send((this_process(), tuple(thread.native_id for thread in threading.enumerate())))
        pipe.recv()
        del kept

    policies: asyncio.Queue[int] = asyncio.Queue()
    policy = os.SCHED_OTHER
    for _ in range(20):  # on a busy machine it may be gone before we look
        child = start(body)
        peer, threads = child.hear()
        assert os.sched_getscheduler(child.pid) == os.SCHED_OTHER
        watched = process_watch.ProcessWatch(lambda deaths: policies.put_nowait(os.sched_getscheduler(peer.pid)))  # noqa: B023
        watched.follow([Member("victim", "x:1", peer, threads)])
        os.kill(child.pid, signal.SIGKILL)
        policy = await asyncio.wait_for(policies.get(), PATIENCE)
        watched.close()
        child.kill()
        if policy == os.SCHED_IDLE:
            break
    assert policy == os.SCHED_IDLE


# -- a death that no process on its host can report


def keep_in_step(session: Session) -> int:
    for attempt in session.steps(60):
        with attempt:
            time.sleep(0.02)
            attempt.comm.barrier()
    return session.rank or 0


def test_a_death_on_another_host_is_seen_long_before_the_suspect_time() -> None:
    """Its host refuses connections to its address."""
    times = Timeouts(heartbeat=0.2, suspect=60.0, operation=90.0, rebuild=90.0, join=90.0)
    with LocalCluster(3, "ucx", session={"timeouts": times, "min_size": 2}, prepare=be_alone_on_host) as ranks:
        job = ranks.start(keep_in_step)
        job.wait_for("committed", step=3)
        epoch = job.view().epoch
        killed = time.monotonic()
        job.kill(1)
        assert job.wait_for("rebuilt", epoch=epoch + 1)["time"] - killed < PATIENCE
        assert job.results() == [0, 1]


# -- plugins


SMOKE = DetectorInfo("smoke", API_VERSION, "smells smoke", "suspicion", Available, make=lambda context: None)


def plugin_of(*offered: Any) -> Any:
    return SimpleNamespace(holdfast_detectors=hookimpl(lambda: list(offered)))


def test_a_plugin_adds_a_detector_and_takes_it_out_again() -> None:
    registry, plugin = Registry(), plugin_of(SMOKE)
    registry.register(plugin)
    assert list(registry.detectors) == ["smoke"]
    registry.unregister(plugin)
    assert not registry.detectors


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        (("smoke",), "must return DetectorInfo"),
        ((replace(SMOKE, name="Smoke!"),), "not a detector name"),
        ((replace(SMOKE, api=(9, 0)),), "too new"),
        ((replace(SMOKE, evidence="rumour"),), "evidence must be"),
        ((replace(SMOKE, make=None),), "make must be callable"),
        ((SMOKE, SMOKE), "registered already"),
    ],
)
def test_a_plugin_with_a_malformed_detector_is_rejected_as_a_whole(offered: tuple[Any, ...], words: str) -> None:
    registry = Registry()
    with pytest.raises(InvalidPlugin, match=words):
        registry.register(plugin_of(*offered))
    assert not registry.detectors


def forbidden(*_: object) -> Any:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def live(pipe: Connection) -> None:
    pipe.send(this_process())
    pipe.recv()


def own_infos() -> list[DetectorInfo]:
    registry = Registry()
    registry.register(own_detectors)
    return list(registry.detectors.values())


LOST: list[Any] = [
    ("progress", "make"),
    *(
        pytest.param(name, method, marks=() if name == "pidfd" or method == "make" else pytest.mark.thorough)
        for name in ("pidfd", "heartbeat", "observers")
        for method in ("probe", "make", "follow", "beat", "look", "heard")
    ),
]
"""Each method is guarded alike for all detectors; what takes the place of a lost one, if anything does, differs."""


@pytest.mark.parametrize(("name", "method"), LOST)
async def test_a_detector_that_is_lost_is_closed_and_reported_and_other_evidence_takes_its_place(
    name: str,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    start: Callable[..., Child],
) -> None:
    """Whatever fails in it, and whenever: a process that is stopped or has ended is found, and ended for certain.

    An event tells of it, once, at a level at which it is a line for people; nothing else does.
    """
    closed: list[str] = []

    def spoiled(info: DetectorInfo) -> DetectorInfo:
        def make(context: DetectorContext) -> Detector:
            detector: Any = info.make(context)
            close = detector.close
            monkeypatch.setattr(detector, method, forbidden)
            monkeypatch.setattr(detector, "close", lambda: (closed.append(name), close()))
            return detector

        if info.name != name:
            return info
        if method in ("probe", "make"):
            return replace(info, **{method: forbidden})
        return replace(info, make=make)

    child, told, noted = start(live), list[Event](), list[events.Event]()
    away = Member("away", "b:1", Peer("another host", 1, 1))
    members = (Member("me", "a:1", this_process()), Member("child", "a:2", child.hear()), away)
    view = View(3, "running", members, Job("job", 3, 3, 3, ("gloo",), "gloo"), "test")
    context = detector_context(members[0], asyncio.get_running_loop(), tell=told.append, note=noted.append)
    detectors = Detectors(context, list(map(spoiled, own_infos())), lambda whom, body: None)

    async def until(kind: type[Event], member: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while not any(isinstance(event, kind) and member in repr(event) for event in told):
                detectors.heard("child" if member == "away" else "away")
                detectors.beat()
                await asyncio.sleep(TIMES.heartbeat / 4)

    detectors.follow(view, members[1:])
    child.stop()
    await until(Stalled, "child")
    await until(Suspicion, "away")
    process_watch.HostProcesses().kill(members[1].peer)
    await until(ProvenDeaths, "child")
    detectors.close()
    lost = [event for event in noted if isinstance(event, events.DetectorLost)]
    assert [(event.detector, bool(event.instead), event.level) for event in lost] == [(name, True, logging.WARNING)]
    assert closed == [name] * (method not in ("probe", "make")) and not caplog.text
    assert "Operation not permitted" in lost[0].reason


def test_the_built_in_detectors_are_plugins_and_available_here() -> None:
    names = ["pidfd", "heartbeat", "observers", "transport", "progress", "nccl_ras"]
    assert [each.name for each in own_infos()] == names
    assert all(isinstance(each.probe(), Available) for each in own_infos())


# -- heartbeats as messages


COUNTED = 8 * CALM_BEATS_A_MESSAGE


def note_beats() -> None:
    """Keep of each heartbeat: its epoch, whether it was calm, so that a message may be left out, whether one was."""
    beats: list[tuple[int, bool, bool]] = []
    notify_all, needless, calm = MemberConnections.notify_all, Detectors.needless, [False]

    def asked(self: Detectors) -> set[str]:
        calm[0] = True
        return needless(self)

    def noted(self: MemberConnections, method: str, body: bytes, but: Collection[str] = ()) -> None:
        if isinstance(beat := messages.decode(method, body), messages.Beat):
            beats.append((beat.epoch, calm[0], bool(but)))
            calm[0] = False
        notify_all(self, method, body, but)

    MemberConnections.notify_all = noted  # type: ignore[method-assign]
    Detectors.needless = asked  # type: ignore[method-assign]
    MemberConnections.beats = beats  # type: ignore[attr-defined]


def beats_of_last_epoch(session: Session) -> list[tuple[bool, bool]]:
    beats: list[tuple[int, bool, bool]] = MemberConnections.beats  # type: ignore[attr-defined]
    enough = 0
    for attempt in session.steps(10_000):
        enough = enough or len(beats) + 2 * CALM_BEATS + COUNTED
        with attempt:
            done = torch.tensor([float(len(beats) >= enough)])
            attempt.comm.all_reduce(done, ReduceOp.MIN)
            epoch = attempt.comm.epoch
        time.sleep(0.01)
        if done:
            break
    return [(calm, left_out) for of, calm, left_out in beats[:enough] if of == epoch]


def test_in_a_calm_epoch_a_mate_gets_one_message_in_five_heartbeats() -> None:
    with LocalCluster(2, "shm", session={"timeouts": Timeouts(heartbeat=0.05)}, prepare=note_beats) as cluster:
        for beats in cluster.start(beats_of_last_epoch).results():
            calm, left_out = zip(*beats, strict=True)
            assert not any(left_out[:CALM_BEATS]), "after a change of the view a message goes with each heartbeat"
            assert calm[-COUNTED:].count(False) == 8
            assert any(left_out[-COUNTED:]), "a message goes while a heartbeat is late, too"


@pytest.mark.parametrize("call", ["", "os.pidfd_open", "signal.pidfd_send_signal"])
def test_a_process_is_ended_and_never_another_one_with_its_number(
    call: str, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Child]
) -> None:
    """Also where a call is forbidden."""
    peer = start(live).hear()
    if call:
        monkeypatch.setattr(call, forbidden)
    process_watch.HostProcesses().kill(Peer(peer.host, peer.pid, peer.started + 1))
    assert not process_watch.HostProcesses.is_gone(peer)
    process_watch.HostProcesses().kill(peer)
    eventually(lambda: process_watch.HostProcesses.is_gone(peer))
    process_watch.HostProcesses().kill(peer)


# -- nccl_ras: what NCCL's RAS service tells of lost processes, over its socket from a service of these tests


PLACES = ((100, "10.0.0.1"), (101, "10.0.0.1"), (100, "10.0.0.2"), (103, "10.0.0.2"))
MEMBERS = tuple(Member(f"m{i}", f"{host}:7000", Peer(f"boot-{host}", pid, 1)) for i, (pid, host) in enumerate(PLACES))
OVER_NCCL, OVER_GLOO = (
    View(3, "running", MEMBERS, Job("job", 4, 2, 4, (backend,), backend), "test") for backend in ("nccl", "gloo")
)


def rank(number: int, pid: int, host: str, **status: bool) -> dict[str, Any]:
    """A rank as NCCL writes it (src/ras/client_support.cc, 2.30)."""
    other = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    line = {"rank": number, "host": host, "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": status or other}
    return line if status else {**line, "collective_counts": {"AllReduce": 7}}


def status_of(missing: list[dict[str, Any]], present: int = 100) -> bytes:
    ranks = [rank(0, present, "10.0.0.1")]
    communicator = {
        "hash": "0x1f", "secondary_hash": "0x1:0x2", "size": 4, "ranks_count": 1, "missing_ranks_count": len(missing),
        "ranks": ranks, "missing_ranks": missing,
    }  # fmt: skip
    head = {"nccl_version": "2.30.7", "cuda_runtime_version": 13020, "timestamp": "2026-11-27 01:20:00"}
    tail = {"ras": {"collection_time_sec": 0.003, "timeouts_count": 0}}
    return msgspec.json.encode({**head, "communicators_count": 1, "communicators": [communicator], **tail})


DEAD = {"unresponsive": True, "considered_dead": True}


@contextlib.asynccontextmanager
async def service(
    answers: dict[str, bytes], asked: list[str] | None = None, keep_open: bool = False
) -> AsyncIterator[str]:
    """A RAS service that answers each command as `answers` says, by its first word; yields its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            while line := await reader.readline():
                command = line.decode().strip()
                if asked is not None:
                    asked.append(command)
                writer.write(answers.get(command.split()[0], b"OK\n"))
                if command == "STATUS" and not keep_open:
                    break
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


HELLO = {"CLIENT": b"SERVER PROTOCOL 2\n"}


async def test_a_query_speaks_the_protocol_of_ncclras() -> None:
    asked: list[str] = []
    async with service({**HELLO, "STATUS": status_of([rank(3, 103, "10.0.0.2", **DEAD)])}, asked) as address:
        status = await query(address)
    assert asked == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"]
    assert status.communicators[0].missing_ranks[0].status.considered_dead


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({"CLIENT": b"HTTP/1.1 400 Bad Request\n"}, CorruptData, "is not NCCL's RAS"),
        ({"CLIENT": b"x" * 10_000}, CorruptData, "did not answer 'CLIENT PROTOCOL 2' with a line"),
        ({**HELLO, "SET": b"ERROR: Unknown command SET FORMAT json\n"}, Unsupported, "NCCL 2.28 or later"),
        ({**HELLO, "TIMEOUT": b"no\n"}, CorruptData, "answers 'no'"),
        ({**HELLO, "STATUS": b'{"nccl_version": "2.30"'}, CorruptData, "no status"),
        ({**HELLO, "STATUS": b""}, CorruptData, "0 bytes"),
        ({**HELLO, "STATUS": b"x" * 70_000}, CorruptData, "more than 65536 bytes"),
    ],
)
async def test_an_answer_that_is_none_is_a_typed_error(
    answers: dict[str, bytes], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "MOST_BYTES", 1 << 16)
    async with service(answers) as address:
        with pytest.raises(error, match=words):
            await query(address)


async def test_a_service_that_never_ends_its_answer_is_left() -> None:
    async with service({**HELLO, "STATUS": b"{"}, keep_open=True) as address:
        with pytest.raises(TimeoutError):
            await query(address, seconds=0.2)


@given(st.binary(max_size=400) | st.integers(0, 700).map(lambda end: status_of([rank(1, 101, "h", **DEAD)])[:end]))
def test_no_bytes_make_the_decoder_raise_another_error(answer: bytes) -> None:
    try:
        status = decode(answer)
    except (CorruptData, Unsupported):
        return
    assert isinstance(status, RasStatus)


def test_the_comma_that_nccl_2_28_9_leaves_out_before_a_missing_ranks_status_is_no_error() -> None:
    """As its service answered on a GPU when one of three ranks had been killed."""
    sound = status_of([rank(1, 101, "h", **DEAD)])
    answer = re.sub(rb',(\s*"status")', rb"\n         \1", sound)
    assert answer != sound
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer)
    assert decode(answer) == decode(sound)


def lost(missing: list[dict[str, Any]], *, unresponsive: bool = False, present: int = 100) -> list[str]:
    status = decode(status_of(missing, present))
    return [found.id for found, _ in lost_members(status, OVER_NCCL, MEMBERS[0], unresponsive=unresponsive)]


def test_a_dead_process_is_found_by_its_number_and_host() -> None:
    assert lost([rank(3, 103, "10.0.0.2", **DEAD)]) == ["m3"]
    assert lost([rank(2, 100, "10.0.0.2", **DEAD)]) == ["m2"], "not m0, which has the same number on another host"
    assert lost([rank(2, 100, "192.168.7.7", **DEAD)]) == [], "two have this number, and no host tells which"
    assert lost([rank(9, 999, "10.0.0.2", **DEAD), rank(8, -1, "unknown", **DEAD)]) == [], "no member of this view"
    assert lost([rank(0, 100, "10.0.0.1", **DEAD)]) == [], "this process lives"
    assert lost([rank(3, 103, "10.0.0.2", **DEAD)], present=555) == [], "the service of another job of the host"


def test_an_unresponsive_process_is_reported_only_once_an_op_has_failed() -> None:
    missing = [rank(1, 101, "10.0.0.1", unresponsive=True, considered_dead=False)]
    assert (lost(missing), lost(missing, unresponsive=True)) == ([], ["m1"])
    assert lost([rank(1, 101, "10.0.0.1", unresponsive=False, considered_dead=False)], unresponsive=True) == []


def detector(
    address: str, suspected: list[tuple[str, str]], loop: asyncio.AbstractEventLoop, me: int = 0
) -> NcclRasDetector:
    suspect = {"suspect": lambda who, why: suspected.append((who, why))}
    found = NcclRasDetector(detector_context(MEMBERS[me], loop, timeouts=Timeouts(), **suspect))
    found.address = address
    return found


async def settled(found: NcclRasDetector) -> None:
    if found._query is not None:
        await found._query


@pytest.mark.parametrize("failure", [None, OpTimeout("all_reduce", 3, 1.0), PeerFailed((), "NCCL reports comm error")])
async def test_what_nccl_considers_dead_is_reported_to_all(failure: Any) -> None:
    """The first member asks now and then; each one does as soon as an op has failed without a culprit."""
    suspected: list[tuple[str, str]] = []
    me = 0 if failure is None else 1
    answer = status_of([rank(3, 103, "10.0.0.2", **DEAD)], present=MEMBERS[me].peer.pid)
    async with service({**HELLO, "STATUS": answer}) as address:
        found = detector(address, suspected, asyncio.get_running_loop(), me)
        found.follow(OVER_NCCL, MEMBERS)
        found.look(1.0)
        if failure is not None:
            assert found._query is None, "the first member asks"
            found.failed(OVER_NCCL, failure, 1.0)
        await settled(found)
        found.close()
    ((who, why),) = suspected
    assert who == "m3" and "considers rank 3" in why and "process 103 of 10.0.0.2, dead" in why


async def test_a_job_over_another_backend_or_with_a_culprit_asks_nothing() -> None:
    asked: list[str] = []
    async with service(HELLO, asked) as address:
        found = detector(address, [], asyncio.get_running_loop())
        found.follow(OVER_GLOO, MEMBERS)
        found.look(1.0)
        found.failed(OVER_GLOO, OpTimeout("all_reduce", 3, 1.0), 1.0)
        found = detector(address, [], asyncio.get_running_loop(), me=1)
        found.follow(OVER_NCCL, MEMBERS)
        found.failed(OVER_NCCL, PeerFailed((2,), "the kernel says"), 1.0)
        assert found._query is None and not asked


async def test_a_service_that_is_off_is_said_once_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with service(HELLO) as address:
        pass  # from here on nothing listens there
    found = detector(address, [], asyncio.get_running_loop())
    found.follow(OVER_NCCL, MEMBERS)
    with caplog.at_level(logging.WARNING):
        for now in (1.0, 100.0):
            found.look(now)
            await settled(found)
    assert caplog.text.count("NCCL's RAS at 127.0.0.1") == 1
