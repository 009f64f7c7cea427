"""Under a real SLURM: a job of two nodes loses ranks and a drained node, and a run of RL on three nodes loses one."""

from __future__ import annotations

import contextlib
import importlib.util
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
from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.ft.schedulers import NotUnderSlurm, found_hosts, own_slurm_host, slurm_hosts
from holdfast.harness.testbed.etcd import EtcdCluster
from holdfast.rl.config.toml import load_config
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Event, ProcessLost, ProcessStarted, StepTrained
from support import slurm
from support.slurm import SlurmCluster
from support.source_tree import ROOT
from support.waiting import becomes_true

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(slurm.missing() is not None, reason=f"SLURM: {slurm.missing()}"),
]

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

    def both_leave(self, since: float) -> None:
        """Wait until both ranks have left in good order."""
        self.until(lambda: len(self.events("error", since)) == 2, "both leave")
        assert {event["error"] for event in self.events("error", since)} == {LEFT}


def test_a_rank_dies_on_a_draining_node_a_requeue_leaves_that_node_and_a_cancelled_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SlurmCluster(3, tmp_path / "slurm") as cluster, EtcdCluster(3, tmp_path / "etcd") as etcd:
        job = SlurmJob(cluster, etcd, tmp_path, monkeypatch)
        job.until(lambda: job.sizes()[-1:] == [2], "both nodes work")
        before = job.nodes()
        drained = min(before)
        cluster.call("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=test")
        assert cluster.states(drained) == {"draining"}, "the job goes on there"
        os.kill(before[drained], signal.SIGKILL)
        job.until(lambda: job.sizes()[-2:] == [1, 2], "the agent on the draining node brought a spare")
        assert job.nodes().keys() == before.keys()

        asked = time.monotonic()
        cluster.call("scontrol", "requeue", job.number)
        job.both_leave(asked)
        job.until(lambda: cluster.states(drained) == {"drained"}, "nothing runs on that node any more")
        job.until(lambda: job.sizes(asked)[-1:] == [2], "the job works again, in its next run")
        assert drained not in job.nodes(asked) and len(job.nodes(asked)) == 2

        cancelled = time.monotonic()
        cluster.call("scancel", job.number)
        job.both_leave(cancelled)
        job.until(lambda: not cluster.call("squeue", "--noheader"), "the job has ended")


# A run of reinforcement learning

needs_monarch = pytest.mark.skipif(
    importlib.util.find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'"
)
TRAINED_STEPS = 60
ROLES = {"trainer", "generator", "holder", "environment"}
RUN = f"""
steps = {TRAINED_STEPS}
[model]
warmup_steps = 2
warmup_batch = 64
[algorithm]
groups = 4
[sampling]
group = 4
max_new_tokens = 2
[trainer]
replicas = 3
spares = 0
backend = "gloo"
strategy = "ddp"
[generator]
replicas = 3
[store]
holders = 3
copies = 2
plane = "ucx"
[engine]
hosts = ["slurm"]
register = "etcd://replaced:1/run"
silence = 4.0
[evaluation]
every = 0
[environment]
name = "arithmetic"
arguments = {{ split = "train" }}
share = 0.25
max_turns = 1
servers = 3
sessions = 16
"""


@contextlib.contextmanager
def three_ports() -> Iterator[int]:
    """The first of three ports in a row, which nobody else takes meanwhile: SLURM's nodes are this machine."""
    while True:
        with contextlib.ExitStack() as held:
            first = held.enter_context(ReservedPort("127.0.0.1")).number
            try:
                for number in (first + 1, first + 2):
                    held.enter_context(ReservedPort("127.0.0.1", number))
            except (OSError, OverflowError):
                continue
            yield first
            return


@needs_monarch
def test_a_run_finds_the_nodes_of_its_job_and_outlives_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    directory = RunDirectory(tmp_path / "run")

    def events() -> list[Event]:
        return list(directory.events()) if (directory.path / "events.jsonl").exists() else []

    def trained() -> int:
        return sum(isinstance(each, StepTrained) for each in events())

    with (
        SlurmCluster(3, tmp_path / "slurm", apart=True) as cluster,
        EtcdCluster(1, tmp_path / "etcd") as etcd,
        three_ports() as port,
    ):

        def until(done: Callable[[], bool], what: str) -> None:
            if not becomes_true(done, interval=0.1):
                said = (tmp_path / "job.out").read_text()[-4000:] if (tmp_path / "job.out").exists() else "no output"
                pytest.fail(f"{what}: {trained()} steps; {cluster.call('squeue')}; {said}")

        variables = {"ETCD": etcd.url, "HOSTS": f"slurm:{port}", "HOLDFAST_INTERFACE": "127.0.0.0/8"}
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        script = str(ROOT / "examples" / "cluster" / "rl.sbatch")
        words = [str(tmp_path / "run.toml"), str(directory.path)]
        cluster.call("sbatch", f"--output={tmp_path}/job.out", script, *words)
        until(lambda: trained() >= 3, "steps are trained on three nodes")

        started = [each for each in events() if isinstance(each, ProcessStarted) and each.role != "driver"]
        hosts = sorted({each.host for each in started})
        assert hosts == [f"tcp://127.0.0.1:{port}" for port in range(port, port + 3)]
        for role in ROLES:
            assert {each.host for each in started if each.role == role} == set(hosts), "each role is on every node"
        cluster.lose("n3")
        until(lambda: any(isinstance(each, ProcessLost) and each.role == "trainer" for each in events()), "it is seen")
        at = trained()
        until(lambda: trained() >= at + 3, "steps go on without the node")
        assert cluster.call("squeue", "--noheader", "--format=%T") == "RUNNING", "the job outlives its node"
        lost = [each for each in events() if isinstance(each, ProcessLost)]
        assert {each.host for each in lost} == {hosts[2]} and {each.role for each in lost} >= {"trainer", "generator"}

        def replaced() -> list[ProcessStarted]:
            return [each for each in events() if isinstance(each, ProcessStarted) and each.replaces]

        until(lambda: {each.role for each in replaced()} == ROLES, "others take their place")
        assert {each.host for each in replaced()} <= set(hosts[:2]), "on the nodes that are left"
        assert load_config(directory.config_file).engine.hosts == (f"slurm:{port}",), "a requeued job asks again"
        until(lambda: not cluster.call("squeue", "--noheader"), "the run ends, and the job with it")
        assert sorted({each.step for each in events() if isinstance(each, StepTrained)}) == list(range(TRAINED_STEPS))
        until(lambda: not cluster.processes("n1") + cluster.processes("n2"), "nothing is left on the nodes")


@needs_monarch
def test_without_slurm_the_error_says_where_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    for call in (slurm_hosts, own_slurm_host, lambda word: found_hosts((word,))):
        with pytest.raises(NotUnderSlurm, match=r"SLURM_JOB_NODELIST is not set; start the run within sbatch"):
            call("slurm:4000")
    assert found_hosts(("tcp://10.0.0.1:26600",)) == ("tcp://10.0.0.1:26600",)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3")
    with pytest.raises(NotUnderSlurm, match="scontrol show"):
        slurm_hosts("slurm")
