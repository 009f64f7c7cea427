"""Sessions with registers on other hosts: one that is away delays a rebuild, and never breaks a running epoch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.comms import HoldfastError
from holdfast.ft import Session, Timeouts
from holdfast.ft.registers import tcp
from holdfast.harness.cluster.job import Job
from holdfast.harness.testbed.etcd import EtcdCluster
from support.samples.tally import SHARDS, assert_exact, cluster, tally_up

TIMES = Timeouts(heartbeat=0.1, suspect=0.5, operation=30.0, rebuild=20.0, join=20.0)


def committed(job: Job) -> int:
    """The number of steps that any rank has committed."""
    return max((event["step"] for event in job.events() if event["kind"] == "committed"), default=-1) + 1


def goes_on(job: Job, steps: int = 5, seconds: float = 10.0) -> float:
    """Wait for `count` more steps; the seconds that it took."""
    began, done = time.monotonic(), committed(job)
    while committed(job) < done + steps:
        assert time.monotonic() < began + seconds, "the job stands still"
        time.sleep(0.01)
    return time.monotonic() - began


def test_a_job_over_tcp_survives_a_death_and_ends_well(tmp_path: Path) -> None:
    with tcp.serving() as server, cluster(3, register=f"{server}/job", timeouts=TIMES) as ranks:
        job = ranks.start(tally_up)
        job.wait_for("committed", step=5)
        job.kill(1)
        assert_exact(job, job.results(), 2)


def test_etcd_loses_its_leader_twice_while_a_job_runs(tmp_path: Path) -> None:
    """Three etcd nodes. The epoch survives a dead or stopped leader, and the others handle a death."""
    with (
        EtcdCluster(3, tmp_path / "etcd") as etcd,
        cluster(3, register=f"{etcd.url}/job", timeouts=TIMES) as ranks,
    ):
        hurry = tmp_path / "hurry"
        job = ranks.start(tally_up, 250, 0.1, hurry=str(hurry))
        job.wait_for("committed", step=5)
        first = etcd.leader()
        etcd.kill(first)
        goes_on(job)
        epoch = job_epoch(job)
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


def job_epoch(job: Job) -> int:
    """The newest epoch that any rank has built."""
    return max(event["epoch"] for event in job.events() if event["kind"] == "rebuilt")


def test_a_register_that_is_away_delays_a_rebuild_and_breaks_nothing(tmp_path: Path) -> None:
    with EtcdCluster(1, tmp_path / "etcd") as etcd, cluster(3, register=f"{etcd.url}/job", timeouts=TIMES) as ranks:
        job = ranks.start(tally_up, 150, 0.01)
        job.wait_for("committed", step=5)
        pid, epoch = job.pid(2), job_epoch(job)
        etcd.pause(0)
        goes_on(job, 30)
        os.kill(pid, signal.SIGKILL)
        job.wait_for("revoked", epoch=epoch)
        time.sleep(0.5)
        assert job_epoch(job) == epoch
        etcd.resume(0)
        job.wait_for("rebuilt", epoch=epoch + 1)
        assert_exact(job, job.results(), 2, 150)


def test_a_memory_or_tcp_register_lives_from_the_making_of_a_session_on(tmp_path: Path) -> None:
    from holdfast.comms.system.keys import create_key
    from holdfast.harness.testbed.etcd import free_ports

    create_key(tmp_path / "key")
    url = f"tcp://127.0.0.1:{free_ports(1)[0]}/job"
    options = {"backend": "gloo", "job": "j", "key_file": tmp_path / "key", "register": url, "shards": SHARDS}
    session = Session(size=1, **options)  # type: ignore[arg-type]
    with session, pytest.raises(HoldfastError, match="size=1, not 2"):
        for _ in session.steps(1):
            Session(size=2, **options)  # type: ignore[arg-type]
