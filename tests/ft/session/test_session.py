"""Sessions in real processes that are killed: steps are committed by all ranks or by none, exactly once.

The job adds up numbers: each step the sum over its shards of (step + 1) * (shard + 1), so the final value is known in
advance, and every rank keeps the list of steps that it has committed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.backends.gloo.connecting import shut_down
from holdfast.comms import HoldfastError, Revoked
from holdfast.comms.experts import Switch
from holdfast.ft import Session, Timeouts
from holdfast.ft.faultpoints import POINTS
from holdfast.ft.membership.view import View
from holdfast.ft.node import node
from holdfast.ft.node.register import Register
from holdfast.ft.registers import tcp
from holdfast.harness import LocalCluster, RankDied
from holdfast.harness.cluster.job import Job
from holdfast.harness.testbed.etcd import EtcdCluster
from support.hosts import be_alone_on_host
from support.samples.tally import (
    QUICK,
    SHARDS,
    Tally,
    assert_exact,
    assert_invariants,
    cluster,
    contract_in,
    expected,
    start_with_spares,
    tally_up,
)
from support.waiting import PATIENCE, eventually

BACKENDS = ["ucx", "gloo", "mpi"]


# -- without faults


def test_all_ranks_start_from_the_state_of_the_first_and_know_all_shards_of_the_job_in_every_epoch() -> None:
    def look(session: Session) -> tuple[set[int], set[int]]:
        seen, sizes, first = set(), set(), 0
        tally = Tally(total=torch.full((5,), float(os.getpid()), dtype=torch.float64))
        session.attach("tally", tally)
        for attempt in session.steps(3):
            with attempt:
                first = first or attempt.comm.all_gather_object(os.getpid())[0]
                assert tally.total.tolist() == [float(first)] * 5
                mine = torch.tensor([len(attempt.shards)])
                attempt.comm.all_reduce(mine)
                if (attempt.step, attempt.rank, attempt.comm.size) == (1, 0, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                seen |= {attempt.total_shards, int(mine)}
                sizes.add(attempt.comm.size)
        return seen, sizes

    with cluster(2, shards=5, min_size=1) as ranks:
        assert ranks.start(look).results()[0] == ({5}, {1, 2})
    with cluster(1, shards=None) as ranks:
        assert ranks.start(look).results() == [({1}, {1})], "without `shards`: the size of the job"


# -- deaths


KILLED: list[Any] = [
    *((backend, 3, 0, (1,)) for backend in ("shm", "gloo", "ucx")),
    ("shm", 3, 1, (0,)),
    ("shm", 4, 1, (2, 1)),
    pytest.param("mpi", 3, 0, (1,), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("backend", "size", "spares", "killed"), KILLED)
def test_survivors_continue_and_a_spare_takes_the_place_of_a_killed_rank_and_its_state(
    backend: str, size: int, spares: int, killed: tuple[int, ...]
) -> None:
    """Of two that are killed at once, the first has a spare."""
    before: list[int] = []

    def strike(job: Job) -> None:
        before.extend(job.pid(rank) for rank in range(size))
        for rank in killed:
            job.kill(rank)

    with cluster(size, backend, spares=spares) as ranks:
        job = start_with_spares(ranks, tally_up, strike=strike)
        results = job.results()
        assert_exact(job, results, size + spares - len(killed))
    assert {result["size"] for result in results} == {size + spares - len(killed)}
    pids = [result["pid"] for result in results]
    stayed = [pid for rank, pid in enumerate(before) if rank not in killed]
    assert [pid for pid in pids if pid in before] == stayed
    if len(killed) == spares:
        assert pids.index(before[1]) == 1, "survivors keep their ranks"


def test_survivors_adopt_the_next_view_before_its_message_arrives() -> None:
    """The next view is announced inside their ops; the messages about it arrive later.

    The member that won with its proposal learns of the next death before its own core has heard of the win.
    """

    def written_to_late(session: Session, steps: int, hurry: str) -> dict[str, Any]:
        node.ANNOUNCED_SECONDS = node.WON_SECONDS = 2 * PATIENCE
        return tally_up(session, steps, 0.1, hurry=hurry)

    slow = Timeouts(heartbeat=4.0, suspect=15.0, operation=50.0, rebuild=30.0, join=40.0)
    with cluster(4, timeouts=slow) as ranks:
        hurry = ranks.logs / "hurry"
        job = ranks.start(written_to_late, 150, str(hurry))
        first = job.wait_for("committed", step=5)["epoch"]
        job.kill(3)
        job.wait_for("committed", epoch=first + 1)
        job.kill(1)
        hurry.touch()
        results = job.results()
        assert_exact(job, results, 2, 150)
        events = job.events()
    for epoch, size in ((first + 1, 3), (first + 2, 2)):
        times = [event["time"] for event in events if event["kind"] == "installed" and event["epoch"] == epoch]
        assert len(times) == size
        assert max(times) - min(times) < PATIENCE, "none was told by letter"


@pytest.mark.parametrize(("backend", "pidfds"), [("shm", True), ("gloo", False)])
def test_a_stopped_rank_is_fenced_and_replaced_and_a_dead_one_is_seen(backend: str, pidfds: bool) -> None:
    """Also under a container's profile: the calls fail, /proc and kill(2) take their place, and an event says so."""

    def refused(*_: object) -> Any:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def work(session: Session, steps: int, gate: str, hurry: str) -> dict[str, Any]:
        if not pidfds:
            os.pidfd_open = signal.pidfd_send_signal = refused
        return tally_up(session, steps, 0.1, gate, hurry)

    timeouts = Timeouts(heartbeat=0.1, suspect=0.5, operation=2 * PATIENCE, rebuild=10.0, join=15.0)
    with cluster(3, backend, spares=1, timeouts=timeouts) as ranks:
        gate, hurry = ranks.logs / "gate", ranks.logs / "hurry"
        job = ranks.start(work, 150, str(gate), str(hurry))
        job.wait_for_spares()
        first = job.wait_for("committed", step=2)["epoch"]
        began, stopped = time.monotonic(), job.pause(1)
        gate.touch()
        fenced = job.wait_for("fenced")
        job.wait_for("committed", epoch=first + 1)
        job.kill(2)
        hurry.touch()
        results = job.results()
        assert_exact(job, results, 2, 150)
        lost = [event for event in job.events() if event["kind"] == "detector_lost"]
    assert 0.3 < fenced["time"] - began < PATIENCE, "not when an op times out"
    assert "stopped at each of" in fenced["reason"]
    assert stopped not in [result["pid"] for result in results]
    assert {event["detector"] for event in lost} == (set() if pidfds else {"pidfd"})
    assert all("Operation not permitted" in event["reason"] and "/proc" in event["instead"] for event in lost)


def test_a_rebuild_waits_for_a_survivor_that_is_computing() -> None:
    """Rank 0, which serves the rendezvous table, computes for longer than `rebuild` when rank 1 dies."""

    def busy(session: Session) -> int:
        for attempt in session.steps(8):
            with attempt:
                if attempt.step == 4 and attempt.rank == 1:
                    os.kill(os.getpid(), 9)
                if attempt.step == 4 and attempt.rank == 0 and attempt.comm.size == 3:
                    time.sleep(2.5)
                attempt.comm.barrier()
        return session.step

    timeouts = Timeouts(heartbeat=0.1, suspect=0.4, operation=20.0, rebuild=0.8, join=1.0)
    with cluster(3, timeouts=timeouts) as ranks:
        assert ranks.start(busy).results() == [8], "rank 1 dies in every epoch, until only rank 0 is left"


def test_a_rank_that_holds_its_interpreter_for_long_is_not_dead() -> None:
    def hog(session: Session) -> list[int]:
        import ctypes

        done = []
        for attempt in session.steps(6):
            with attempt:
                if attempt.step == 2 and attempt.rank == 1:
                    ctypes.PyDLL(None).usleep(900_000)  # keeps the GIL
                    ctypes.PyDLL(None).usleep(900_000)
                attempt.comm.barrier()
            done.append(attempt.epoch)
        return done

    timeouts = Timeouts(heartbeat=0.05, suspect=0.3, operation=20.0, rebuild=10.0, join=15.0)
    with cluster(3, timeouts=timeouts) as ranks:
        results = ranks.start(hog).results()
    assert len({epoch for done in results for epoch in done}) == 1, "nobody was left out"


# -- kills at every point of the commit protocol, the rebuild and the transfer

FIRST = "commit.before_prepare:7:2:3"
"""Rank 2 dies in step 7; rank 0, which then proposes the next epoch or the one after it, during the rebuild."""
REBUILD = [
    "rebuild.before_propose:7:0:3",
    "rebuild.after_propose:7:0:3",
    "rebuild.before_connect:7:0:4",
    "rebuild.before_votes:7:0:4",
    "rebuild.after_votes:7:0:4",
    "rebuild.before_connect:-1:1:4",
]
KILLS = [
    *([(f"{point}:7:0:3", 0, 2), (f"{point}:7:2:3", 1, 3)] for point in POINTS if point[:4] in ("step", "comm")),
    *([(f"{FIRST};{second}", 0, 1), (f"{FIRST};{second}", 2, 3)] for second in REBUILD),
    *([(f"{FIRST};sync.before_{second}:4", 2, 3)] for second in ("chunk:7:0", "chunk:-1:2", "load:-1:2")),
    [("sync.before_chunk:0:0:3", 0, 2)],
]
"""For each point, ways to kill there: the fault, the number of spares, and that of the ranks in the end."""


def each_way() -> Iterator[Any]:
    """Each way over shm, and once over a backend that builds connections in another way.

    The first tier has each point once, and each way in turn.
    """
    for number, ways in enumerate(KILLS):
        first = (*ways[number % len(ways)], "shm")
        yield first
        for way in (*((*way, "shm") for way in ways), (*ways[-1], BACKENDS[number % len(BACKENDS)])):
            if way != first:
                yield pytest.param(*way, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("fault", "spares", "left", "backend"), [*each_way()])
def test_the_job_survives_a_kill_at_each_point(fault: str, spares: int, left: int, backend: str) -> None:
    with cluster(3, backend, spares, fault) as ranks:
        job = start_with_spares(ranks, tally_up, 15, 0.002)
        assert_exact(job, job.results(), left, 15)


@pytest.mark.parametrize(
    "fault", ["commit.before_barrier:14:1", "commit.after_barrier:14:1", "finish.before_propose:15:0"]
)
def test_the_job_survives_a_kill_on_either_side_of_the_last_barrier_or_as_its_end_is_declared(fault: str) -> None:
    results: list[dict[str, Any]] = []
    with cluster(3, fault=f"{fault}:3") as ranks:
        job = ranks.start(tally_up, 15, 0.002)
        with suppress(RankDied):  # the job may finish before a member notices the death
            results = job.results()
        events = job.events()
    assert all(result["total"] == expected(15) for result in results)
    done = [event["process"] for event in events if event["kind"] == "finished"]
    assert len(done) == 2
    for process in done:
        committed = [e["step"] for e in events if e["kind"] == "committed" and e["process"] == process]
        assert committed == list(range(15))
    assert_invariants(events)


def test_a_broken_connection_costs_an_epoch_and_no_rank() -> None:
    def lose_connections(session: Session) -> int:
        """Rank 1 loses its data connections once, in step 2."""
        lost = False
        for attempt in session.steps(5):
            with attempt:
                if attempt.step == 2 and attempt.rank == 1 and not lost:
                    lost = True
                    for each in attempt.comm.transport._sockets:  # type: ignore[attr-defined]
                        shut_down(each)
                attempt.comm.barrier()
        return session.step

    with cluster(3, "gloo") as ranks:
        job = ranks.start(lose_connections)
        assert job.results() == [5] * 3
        assert {e["size"] for e in job.events() if e["kind"] == "rebuilt"} == {3}


class SlowTally(Tally):
    """A state that takes a while to send."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(1.0)
        return super().state_dict()


def tally_up_and_save(session: Session, busy: Sequence[int], gate: str) -> tuple[int | None, int, list[int]]:
    """Some ranks are busy after the last step until the epoch of that step is over."""
    saved, epochs = SlowTally(), list[int]()
    session.attach("tally", saved)
    session.subscribe(lambda event: epochs.append(event["epoch"]) if event["kind"] == "installed" else None)
    for attempt in session.steps(15):
        with attempt:
            while attempt.step == 3 and not Path(gate).exists():
                time.sleep(0.005)
            attempt.comm.barrier()
            epoch = session.epoch or 0
        if attempt.committed:
            saved.steps.append(attempt.step)
            if attempt.step == 14 and attempt.rank in busy:
                eventually(lambda epoch=epoch: max(epochs, default=0) > epoch)  # type: ignore[misc]
    return session.rank, session.step, saved.steps


@pytest.mark.parametrize(
    ("backend", "prepare", "busy", "timeouts"),
    [("shm", None, [0], replace(QUICK, heartbeat=2.0, suspect=4.0)), ("gloo", be_alone_on_host, [0, 2], QUICK)],
    ids=["shm", "gloo, alone on its host"],
)
def test_a_spare_that_is_promoted_after_the_last_step_gets_the_state_before_the_job_is_over(
    backend: str, prepare: Callable[[], None] | None, busy: Sequence[int], timeouts: Timeouts
) -> None:
    """Rank 2 ends the job after two heartbeats, unless the death of rank 1 is known by then, or it is busy, too."""
    fault = {"HOLDFAST_FAULT": "commit.after_barrier:14:1:3"}
    options: dict[str, Any] = {"timeouts": timeouts, "shards": SHARDS}
    with LocalCluster(3, backend, spares=1, environ=fault, session=options, prepare=prepare) as ranks:
        job = start_with_spares(ranks, tally_up_and_save, busy)
        assert job.results() == [(rank, 15, list(range(15))) for rank in range(3)]


def test_a_connection_that_is_reset_in_a_rebuild_costs_no_member() -> None:
    """Rank 2 sends its address to the first member; that connection is reset, and a new one takes it again."""

    def cut_off_once(session: Session) -> tuple[int | None, int]:
        cut: list[str] = []
        for attempt in session.steps(8):
            with attempt:
                if (attempt.step, attempt.rank) == (0, 2):
                    reset_once_posted(session, cut)
                if (attempt.step, attempt.rank, attempt.comm.size) == (4, 1, 3):
                    os.kill(os.getpid(), 9)
                attempt.comm.barrier()
        return session.size, len(cut)

    def reset_once_posted(session: Session, cut: list[str]) -> None:
        assert session._runtime is not None
        links = session._runtime.links
        notify = links.notify

        def reset(member_id: str, method: str, body: bytes) -> bool:
            if method == "share":
                if not cut:
                    asyncio.get_running_loop().call_soon(links._links[member_id].abort)
                cut.append(method)
            return notify(member_id, method, body)

        links.notify = reset  # type: ignore[method-assign]

    with cluster(3, "gloo") as ranks:
        (first, nothing), (second, asked) = ranks.start(cut_off_once).results()
    assert (first, second, nothing) == (2, 2, 0)
    assert asked > 1


# -- too few members


def test_a_spare_without_members_ends_with_the_reason() -> None:
    def strike(job: Job) -> None:
        pids = {job.pid(0), job.pid(1)}
        spare = next(process for process in job.processes if process.pid not in pids)
        os.kill(spare.pid, 19)  # it must not be promoted
        job.kill(0)
        job.kill(1)
        os.kill(spare.pid, 18)

    with cluster(2, spares=1) as ranks:
        job = start_with_spares(ranks, tally_up, strike=strike)
        with pytest.raises(HoldfastError, match=r"every member died|no process that is left holds the state"):
            job.results()


# -- errors without a death


def test_a_rank_that_holds_up_an_op_past_its_timeout_is_ended_and_the_others_continue() -> None:
    def late(session: Session) -> str:
        for attempt in session.steps(3):
            with attempt:
                if attempt.rank == 1 and attempt.comm.size == 2:
                    time.sleep(2.0)
                attempt.comm.barrier(timeout=0.3)
        return "finished"

    with cluster(2) as ranks:
        job = ranks.start(late)
        assert job.results() == ["finished"]
        (fenced,) = [event["reason"] for event in job.events() if event["kind"] == "fenced"]
    assert fenced.startswith("it held up barrier until its time was up")


# -- the register is away for a while


def test_a_register_that_is_away_delays_a_rebuild_and_breaks_no_running_epoch() -> None:
    with cluster(3) as ranks:
        hurry = ranks.logs / "hurry"
        job = ranks.start(tally_up, 120, 0.1, hurry=str(hurry))
        job.wait_for("committed", step=5)
        path = next(ranks.logs.glob("**/register.sqlite"))
        victim = job.processes[0]
        path.rename(path.with_suffix(".away"))
        goes_on(job)
        victim.signal(9)
        away = job.wait_for("register_away")
        time.sleep(0.3)
        path.with_suffix(".away").rename(path)
        hurry.touch()
        results = job.results()
        assert_exact(job, results, 2, 120)
        installed = max(e["time"] for e in job.events() if e["kind"] == "installed")
    assert installed > away["time"] + 0.25


def test_an_evicted_session_refuses_every_step() -> None:
    """The register decides which processes belong to the job, not the session's own view."""

    def linger(session: Session) -> None:
        for attempt in session.steps(10_000):
            with attempt:
                time.sleep(0.002)
                attempt.comm.barrier()

    with cluster(2) as ranks:
        job = ranks.start(linger)
        job.wait_for("committed", step=5)
        view = job.view()
        path = next(ranks.logs.glob("**/register.sqlite"))
        with Register.open(f"sqlite://{path}") as register:
            without = View(view.epoch + 1, "running", view.members[:1], view.job, "somebody decided so")
            assert register.compare_and_set(view.epoch, without)
        event = job.wait_for("error")
    assert event["error"] == "StaleEpoch: evicted in epoch 3: somebody decided so"


# -- registers on other hosts


TIMES = Timeouts(heartbeat=0.1, suspect=0.5, operation=30.0, rebuild=20.0, join=20.0)


def committed(job: Job) -> int:
    """The number of steps that any rank has committed."""
    return max((event["step"] for event in job.events() if event["kind"] == "committed"), default=-1) + 1


def goes_on(job: Job) -> None:
    """Wait for more steps."""
    done = committed(job)
    eventually(lambda: committed(job) >= done + 5)


def test_a_job_over_tcp_survives_a_death_and_ends_well() -> None:
    with tcp.serving() as server, cluster(3, register=f"{server}/job", timeouts=TIMES) as ranks:
        job = start_with_spares(ranks, tally_up, strike=lambda job: job.kill(1))
        assert_exact(job, job.results(), 2)


def test_etcd_loses_its_leader_twice_while_a_job_runs(tmp_path: Path) -> None:
    """Three etcd nodes. The epoch survives a dead or stopped leader, and the others handle a death."""
    with EtcdCluster(3, tmp_path / "etcd") as etcd, cluster(3, register=f"{etcd.url}/job", timeouts=TIMES) as ranks:
        hurry = tmp_path / "hurry"
        job = ranks.start(tally_up, 250, 0.1, hurry=str(hurry))
        job.wait_for("committed", step=5)
        first = etcd.leader()
        etcd.kill(first)
        goes_on(job)
        epoch = max(event["epoch"] for event in job.events() if event["kind"] == "rebuilt")
        job.kill(2)
        job.wait_for("rebuilt", epoch=epoch + 1)
        etcd.start(first)
        second = etcd.leader()
        etcd.pause(second)
        goes_on(job)
        job.kill(1)
        job.wait_for("rebuilt", size=1)
        hurry.touch()
        etcd.resume(second)
        assert_exact(job, job.results(), 1, 250)


def test_a_memory_or_tcp_register_lives_from_the_making_of_a_session_on(tmp_path: Path, port: int) -> None:
    options = contract_in(tmp_path, register=f"tcp://127.0.0.1:{port}/job", shards=SHARDS)
    with Session(size=1, **options) as session, pytest.raises(HoldfastError, match="size=1, not 2"):
        for _ in session.steps(1):
            Session(size=2, **options)


# -- large jobs


def test_the_first_of_many_ranks_dies_and_the_others_and_a_spare_learn_of_the_next_view() -> None:
    """With HOLDFAST_MESH=2 five ranks are many: each reports to its neighbours only."""
    environ = {"HOLDFAST_MESH": "2", "HOLDFAST_FAULT": "commit.before_barrier:9:0:5"}
    options = {"timeouts": QUICK, "shards": SHARDS}
    with LocalCluster(5, spares=1, environ=environ, session=options) as ranks:
        job = start_with_spares(ranks, tally_up)
        assert_exact(job, job.results(), 5)
        installed = [event["epoch"] for event in job.events() if event["kind"] == "installed"]
    assert installed.count(max(installed)) == 5


# -- a rank dies between dispatch and combine: the living commit the step in its epoch, go on, and rebuild when asked


EXCHANGES, KILL_STEP, REBUILD_STEP, VICTIM = 8, 2, 5, 1


@dataclass(frozen=True)
class Seen:
    """One attempt, as a rank has seen it."""

    step: int
    epoch: int
    committed: bool
    before: tuple[bool, ...]
    """`Attempt.alive`."""
    after: tuple[bool, ...]
    """`Switch.alive`."""


def exchange(switch: Switch, dies: bool) -> None:
    rows = switch.dispatch(torch.ones(6, 4), torch.arange(6).view(6, 1), torch.ones(6, 1))
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    combined = switch.combine(rows.tokens)
    living = torch.tensor([switch.alive[expert * switch.size // 6] for expert in range(6)])
    assert torch.equal(combined, torch.ones(6, 4) * living[:, None])


def exchange_rows(session: Session, gate: str = "", *, barrier: bool = False) -> tuple[list[Seen], list[int]]:
    """Run the steps, in which a rank dies; not before `gate` is there. A `barrier` in the next step needs the dead."""
    counter, seen = Tally(), []
    session.attach("counter", counter)
    switch: Switch | None = None
    for attempt in session.steps(EXCHANGES):
        with attempt:
            if switch is None or switch.epoch != attempt.epoch:
                switch = Switch(attempt.lasting, 6, top_k=1, hidden=4, max_tokens=6)
            if gate and attempt.step == KILL_STEP:
                eventually(Path(gate).exists)
            dies = (attempt.step, attempt.rank, attempt.comm.size) == (KILL_STEP, VICTIM, 3)
            exchange(switch, dies)
            if barrier and attempt.degraded:
                with pytest.raises(Revoked):
                    attempt.comm.barrier()
            if barrier and attempt.step == KILL_STEP + 1:
                attempt.comm.barrier()
        assert switch is not None
        if attempt.committed:
            counter.steps.append(attempt.step)
        seen.append(Seen(attempt.step, attempt.epoch, attempt.committed, attempt.alive, switch.alive))
        if attempt.step == REBUILD_STEP:
            session.rebuild()
    return seen, counter.steps


ALL, MASKED = (True, True, True), (True, False, True)


def test_the_living_commit_in_the_same_epoch_go_on_and_rebuild_when_asked() -> None:
    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as ranks:
        outcomes = ranks.start(exchange_rows).results(timeout=PATIENCE)
    assert len(outcomes) == 2
    for seen, steps in outcomes:
        assert steps == list(range(EXCHANGES)), "no step is lost"
        assert [each.step for each in seen if each.committed] == [each.step for each in seen], "nor done twice"
        first = seen[0].epoch
        assert [each.epoch == first for each in seen] == [step <= REBUILD_STEP for step in range(EXCHANGES)]
        assert [each.before for each in seen] == [ALL] * 3 + [MASKED] * 3 + [(True, True)] * 2
        assert [each.after for each in seen] == [ALL] * 2 + [MASKED] * 4 + [(True, True)] * 2


def test_the_step_is_finished_and_then_a_spare_takes_the_place() -> None:
    with LocalCluster(3, "shm", spares=1, session={"on_death": "finish_step"}) as ranks:
        outcomes = start_with_spares(ranks, exchange_rows).results(timeout=PATIENCE)
    assert [steps for _, steps in outcomes] == [list(range(EXCHANGES))] * 3, "the spare has the state of all steps"
    for seen, _ in outcomes:
        assert all(each.committed and each.before == ALL for each in seen)
    longest = max((seen for seen, _ in outcomes), key=len)
    assert [each.after for each in longest] == [MASKED if step == KILL_STEP else ALL for step in range(EXCHANGES)]


def test_an_op_that_needs_the_dead_ends_the_degraded_epoch_and_harms_nobody() -> None:
    def body(session: Session) -> list[tuple[int, bool, int]]:
        seen, steps = exchange_rows(session, barrier=True)
        assert steps == list(range(EXCHANGES))
        return [(each.step, each.committed, len(each.before)) for each in seen[: KILL_STEP + 4]]

    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as ranks:
        for seen in ranks.start(body).results(timeout=PATIENCE):
            assert seen == [(0, True, 3), (1, True, 3), (2, True, 3), (3, False, 3), (3, True, 2), (4, True, 2)]


def test_a_degraded_epoch_ends_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    """The rank dies in step 2; the checkpoints after 4 steps and after the last one are written by all that live."""

    def body(session: Session) -> list[int]:
        session.checkpoints(tmp_path, every=4, last=EXCHANGES)
        return [each.epoch for each in exchange_rows(session)[0]]

    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as ranks:
        outcomes = ranks.start(body).results(timeout=PATIENCE)
    assert len(outcomes) == 2
    for epochs in outcomes:
        first = epochs[0]
        assert [epoch == first for epoch in epochs] == [step < 4 for step in range(EXCHANGES)]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000000004", f"step-{EXCHANGES:09d}"]


def test_what_a_degraded_epoch_cannot_keep_is_refused_before_anything_begins(tmp_path: Path) -> None:
    session = Session(**contract_in(tmp_path, size=1, on_death="finish_step"))
    with pytest.raises(ValueError, match=r"on_death='finish_step' with attach_sharded\(\).* use on_death=\"rebuild\""):
        session.attach_sharded(lambda mesh: {})


# -- over nccl


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("size", "spares"), [(3, 0), (2, 1)])
def test_gpu_the_others_go_on_after_a_kill_and_a_spare_gets_the_state_that_is_on_the_gpu(
    size: int, spares: int
) -> None:
    """All ranks share a GPU. NCCL refuses that unless each says that it is on another host, and uses sockets then."""
    times = Timeouts(heartbeat=0.1, suspect=1.0, operation=30.0, rebuild=30.0, join=60.0)
    options = {"timeouts": times, "shards": SHARDS, "device": "cuda:0"}
    with LocalCluster(size, "nccl", spares=spares, timeout=120.0, device="cuda:0", session=options) as ranks:
        job = ranks.start(tally_up, 60, device="cuda:0")
        job.wait_for_spares()
        job.wait_for("committed", step=5)
        job.kill(1)
        results = job.results()
        assert_exact(job, results, 2, 60)
    assert {result["size"] for result in results} == {2}
