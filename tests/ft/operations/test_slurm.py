"""Under a real SLURM, sbatch starts one agent a node. The job loses a rank, and leaves when asked to."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.system.keys import create_key
from holdfast.ft.telemetry.event_reader import read_events
from holdfast.harness.testbed import slurm
from holdfast.harness.testbed.etcd import EtcdCluster
from holdfast.harness.testbed.slurm import SlurmCluster
from support.source_tree import ROOT
from support.waiting import becomes_true

pytestmark = pytest.mark.skipif(slurm.missing() is not None, reason=f"SLURM: {slurm.missing()}")

SECONDS = 180.0
STEPS = """
    import time
    from holdfast import ft
    with ft.Session(min_size=1) as session:
        for attempt in session.steps(10**6):
            with attempt:
                attempt.comm.barrier()
                time.sleep(0.05)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    with SlurmCluster(2, tmp_path / "slurm") as started:
        yield started


@pytest.mark.timeout(900)
def test_a_job_of_two_nodes_survives_a_kill_and_leaves_when_it_is_cancelled(
    tmp_path: Path, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_key(tmp_path / "job.key")
    (tmp_path / "train.py").write_text(textwrap.dedent(STEPS))
    logs = tmp_path / "logs"

    def sizes() -> list[int]:
        built = {event["epoch"]: event["size"] for event in read_events(logs) if event["kind"] == "rebuilt"}
        return [size for _, size in sorted(built.items())]

    def of_kind(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(logs) if event["kind"] == kind]

    with EtcdCluster(3, tmp_path / "etcd") as etcd:
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        variables = {"REGISTER": f"{etcd.url}/job", "KEY_FILE": tmp_path / "job.key", "INTERFACE": "127.0.0.0/8"}
        for name, value in variables.items():
            monkeypatch.setenv(f"HOLDFAST_{name}", str(value))
        monkeypatch.setenv("NPROC", "1")
        monkeypatch.setenv("LOGS", str(logs))
        output = f"--output={tmp_path}/job.out"
        script = ROOT / "examples" / "cluster" / "job.sbatch"
        job = cluster.call("sbatch", "--parsable", "--nodes=2", output, str(script), str(tmp_path / "train.py"))
        assert becomes_true(lambda: logs.is_dir() and sizes()[-1:] == [2], SECONDS), cluster.call("squeue")
        os.kill(of_kind("joined")[0]["pid"], signal.SIGKILL)
        assert becomes_true(lambda: sizes()[-2:] == [1, 2], SECONDS), "the agent brought a spare"
        cluster.call("scancel", job)
        assert becomes_true(lambda: len(of_kind("error")) == 2, SECONDS)
        assert {event["error"] for event in of_kind("error")} == {"Terminated: SIGTERM asked this process to leave"}
        assert becomes_true(lambda: not cluster.call("squeue", "--noheader"), SECONDS), "the job has ended"
