"""Under a real SLURM, sbatch starts one agent a node. The job loses ranks, and outlives a drained node."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.system.keys import create_key
from holdfast.ft.event_lines import read_events, to_record
from holdfast.harness.testbed.etcd import EtcdCluster
from support import slurm
from support.slurm import SlurmCluster
from support.source_tree import ROOT
from support.waiting import becomes_true

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(slurm.missing() is not None, reason=f"SLURM: {slurm.missing()}")]

SECONDS = 180.0
LEFT = "Terminated: SIGTERM asked this process to leave"
STEPS = """
    import time
    from holdfast import ft
    with ft.Session(min_size=1) as session:
        for attempt in session.steps(10**6):
            with attempt:
                attempt.comm.barrier()
                time.sleep(0.05)
"""


class SlurmJob:
    """`examples/cluster/job.sbatch` on two nodes of a cluster: one rank and its agent on each, over etcd."""

    def __init__(self, cluster: SlurmCluster, etcd: EtcdCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.logs = cluster, folder / "logs"
        create_key(folder / "job.key")
        (folder / "train.py").write_text(textwrap.dedent(STEPS))
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        variables = {"ETCD": etcd.url, "HOLDFAST_KEY_FILE": folder / "job.key", "HOLDFAST_INTERFACE": "127.0.0.0/8"}
        for name, value in (variables | {"NPROC": 1, "LOGS": self.logs}).items():
            monkeypatch.setenv(name, str(value))
        script, output = ROOT / "examples" / "cluster" / "job.sbatch", f"--output={folder}/job.out"
        words = ("sbatch", "--parsable", "--nodes=2", output, str(script), str(folder / "train.py"))
        self.number = cluster.call(*words)

    def events(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        if not self.logs.is_dir():
            return []
        return [
            event for event in map(to_record, read_events(self.logs)) if event["kind"] == kind and event["time"] > since
        ]

    def sizes(self, since: float = 0.0) -> list[int]:
        """The sizes of the epochs that were built, in the order of time: a requeued job counts from 1 again."""
        built = {event["epoch"]: event["size"] for event in self.events("rebuilt", since)}
        return list(built.values())

    def nodes(self, since: float = 0.0) -> dict[str, int]:
        """The process that each node runs, of those that joined since then."""
        found = {}
        for event in self.events("joined", since):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{event['pid']}/environ").read_text().split("\0")
                found.update({each.partition("=")[2]: event["pid"] for each in variables if "SLURMD_NODENAME=" in each})
        return found

    def until(self, done: Callable[[], bool], what: str) -> None:
        if not becomes_true(done, SECONDS, interval=0.05):
            pytest.fail(
                f"{what}: sizes {self.sizes()}; {self.cluster.call('squeue')}; {self.cluster.call('sinfo', '-N')}"
            )

    def cancelled(self, since: float = 0.0) -> None:
        """Cancel the job, and wait until both ranks have left in good order and the queue is empty."""
        self.cluster.call("scancel", self.number)
        self.until(lambda: len(self.events("error", since)) == 2, "both leave")
        assert {event["error"] for event in self.events("error", since)} == {LEFT}
        self.until(lambda: not self.cluster.call("squeue", "--noheader"), "the job has ended")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmJob]:
    with SlurmCluster(3, tmp_path / "slurm") as cluster, EtcdCluster(3, tmp_path / "etcd") as etcd:
        started = SlurmJob(cluster, etcd, tmp_path, monkeypatch)
        started.until(lambda: started.sizes()[-1:] == [2], "both nodes work")
        yield started


@pytest.mark.timeout(900)
def test_a_job_of_two_nodes_survives_a_kill_and_leaves_when_it_is_cancelled(job: SlurmJob) -> None:
    os.kill(job.events("joined")[0]["pid"], signal.SIGKILL)
    job.until(lambda: job.sizes()[-2:] == [1, 2], "the agent brought a spare")
    job.cancelled()


@pytest.mark.timeout(900)
def test_a_rank_dies_on_a_draining_node_and_a_requeue_leaves_that_node(job: SlurmJob) -> None:
    before = job.nodes()
    drained = min(before)
    job.cluster.call("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=test")
    assert job.cluster.states(drained) == {"draining"}, "the job goes on there"
    os.kill(before[drained], signal.SIGKILL)
    job.until(lambda: job.sizes()[-2:] == [1, 2], "the agent on the draining node brought a spare")
    assert job.nodes().keys() == before.keys()

    asked = time.monotonic()
    job.cluster.call("scontrol", "requeue", job.number)
    job.until(lambda: len(job.events("error", asked)) == 2, "both leave")
    assert {event["error"] for event in job.events("error", asked)} == {LEFT}
    job.until(lambda: job.cluster.states(drained) == {"drained"}, "nothing runs on that node any more")
    job.until(lambda: job.sizes(asked)[-1:] == [2], "the job works again, in its next run")
    assert drained not in job.nodes(asked) and len(job.nodes(asked)) == 2
    job.cancelled(time.monotonic())
