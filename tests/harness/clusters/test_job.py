"""`LocalCluster.start`: a job of sessions on this machine, and what can be done to it while it runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from holdfast.comms import Unsupported
from holdfast.ft import Session, Timeouts
from holdfast.ft.events import Event
from holdfast.harness import LocalCluster, RankDied, RunTimeout
from holdfast.harness.cluster.spares import standing_by
from support.event_records import an_event

QUICK = {"timeouts": Timeouts(heartbeat=0.1, suspect=1.0, operation=10.0, rebuild=5.0, join=10.0)}


def train(session: Session, steps: int, pause: float = 0.0) -> tuple[int | None, float, int]:
    """Sum the numbers of all shards in each step; (rank, sum over all steps, pid)."""
    total = 0.0
    for attempt in session.steps(steps):
        with attempt:
            time.sleep(pause)
            tensor = torch.tensor([float(sum(attempt.shards))])
            attempt.comm.all_reduce(tensor)
        if attempt.committed:
            total += float(tensor)
    return session.rank, total, os.getpid()


# -- normal use


def test_a_job_tells_its_pids_and_events_and_refuses_a_rank_out_of_range_and_a_cut_without_links() -> None:
    with LocalCluster(2, spares=1) as cluster:
        job = cluster.start(train, 50, 0.02)
        pids = [job.pid(rank) for rank in range(2)]
        assert set(pids) <= {process.pid for process in job.processes}
        assert len(job.processes) == 3
        with pytest.raises(Unsupported, match=r"kill\(rank\)"):
            job.partition([0], [1])
        with pytest.raises(ValueError, match="out of range"):
            job.kill(2)
        assert [(rank, pid) for rank, _, pid in job.results()] == list(enumerate(pids)), "a spare gives no result"
        events = job.events()
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    committed = [(event["pid"], event["step"]) for event in events if event["kind"] == "committed"]
    assert len(committed) == len(set(committed)) == 2 * 50


def test_two_jobs_run_side_by_side() -> None:
    with LocalCluster(2) as cluster:
        first, second = cluster.start(train, 3), cluster.start(train, 5)
        assert [total for _, total, _ in second.results()] == [5.0, 5.0]
        assert [total for _, total, _ in first.results()] == [3.0, 3.0]


def test_output_of_a_job_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def work(session: Session) -> None:
        for attempt in session.steps(1):
            with attempt:
                print("at work")

    with LocalCluster(2) as cluster:
        cluster.start(work).results()
    assert capsys.readouterr().out.count("at work") == 2


# -- breaking it


def test_a_paused_rank_goes_on_when_it_is_resumed() -> None:
    with LocalCluster(2) as cluster:
        job = cluster.start(train, 100, 0.005)
        job.wait_for("committed", step=5)
        pid = job.pause(1)
        assert _state(pid) == "T"
        assert job.resume(1) == pid
        assert [total for _, total, _ in job.results()] == [100.0, 100.0]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- failures


def test_results_that_do_not_come_in_time_say_where_the_ranks_are() -> None:
    def dawdle(session: Session) -> None:
        for attempt in session.steps(1):
            with attempt:
                time.sleep(600)

    with LocalCluster(2) as cluster:
        job = cluster.start(dawdle)
        job.view()
        for _ in range(2):
            with pytest.raises(RunTimeout, match="in dawdle") as caught:
                job.results(timeout=0.5)
            assert caught.value.ranks == (0, 1)


def test_the_death_of_all_processes_is_raised() -> None:
    with LocalCluster(2, session=QUICK) as cluster:
        job = cluster.start(train, 1000, 0.01)
        job.wait_for("committed", step=2)
        for process in job.processes:
            process.kill()
        with pytest.raises(RankDied, match="SIGKILL"):
            job.results()


def test_closing_ends_a_running_job() -> None:
    with LocalCluster(2) as cluster:
        job = cluster.start(train, 100_000)
        pids = [job.pid(rank) for rank in range(2)]
        files = job.directory
        job.close()
        job.close()
        assert not files.exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# -- spares, from the events of a job

TOLD = an_event("spare", "spare", epoch=2, to=["first", "second"])


def welcomed(by: str) -> Event:
    return an_event("welcomed", by, 2.0, spare="spare")


def test_a_spare_stands_by_once_all_members_that_it_told_have_welcomed_it() -> None:
    assert standing_by([]) == set()
    assert standing_by([TOLD]) == set()
    assert standing_by([TOLD, welcomed("first")]) == set()
    assert standing_by([TOLD, welcomed("first"), welcomed("first")]) == set()
    assert standing_by([welcomed("second"), TOLD, welcomed("first")]) == {"spare"}
