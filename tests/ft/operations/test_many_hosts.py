"""`holdfast run` on several hosts and under SLURM: a misfit is refused, the dead come back, the unwanted leave."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.system.keys import create_key, load_key
from holdfast.ft import settings
from holdfast.ft.control.errors import WrongKey
from holdfast.ft.event_lines import read_events, to_record
from holdfast.ft.launch.host_agent import HostNameTaken, HostPlan, HostRanks, HostRegistry, check_view, host_name
from holdfast.ft.launch.job_contract import LocalContract, ReservedPort, TorchEnvironment
from holdfast.ft.launch.local_launcher import (
    MOST_RESTART_SECONDS,
    GuardedProcess,
    LaunchPlan,
    RestartBudget,
    launch,
    python_command,
)
from holdfast.ft.listen_address import local_addresses
from holdfast.ft.membership.view import Job, View
from holdfast.ft.processes.zygote_client import ForkedProcess
from holdfast.ft.registers import open_cell, tcp
from holdfast.ft.schedulers import NotUnderSlurm, Placement, found_hosts, own_slurm_host, slurm_hosts
from holdfast.ft.settings import identity_of, listen_address
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.etcd import EtcdCluster
from holdfast.harness.testbed.netns import Network
from holdfast.rl.config.toml import load_config
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Event, ProcessLost, ProcessStarted, StepTrained
from support import slurm
from support.hosts import start_holdfast, start_program
from support.programs.forked_programs import HOLDFAST, said, script
from support.slurm import SlurmCluster
from support.source_tree import ROOT
from support.waiting import PROGRAM_SECONDS, becomes_true

CLUSTER = ROOT / "examples" / "cluster"
SECONDS = 180.0
LEFT = "Terminated: SIGTERM asked this process to leave"

STEPS = """
    import pathlib, sys, time
    import torch
    from holdfast import ft
    gate = pathlib.Path(sys.argv[1])
    with ft.Session(timeouts=ft.Timeouts(join=60.0)) as session:
        for attempt in session.steps(10**6):
            with attempt:
                is_open = torch.tensor([float(gate.exists())])
                attempt.comm.all_reduce(is_open)
                time.sleep(0.02)
            if attempt.committed and is_open.item() == attempt.comm.size:
                break
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    create_key(tmp_path / "job.key")
    return tmp_path / "job.key"


def events(logs: Path, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
    """The events of a kind after that time, in order."""
    found = map(to_record, read_events(logs)) if logs.is_dir() else ()
    return [event for event in found if event["kind"] == kind and event["time"] > since]


def sizes(logs: Path, since: float = 0.0) -> list[int]:
    """The sizes of the epochs that were built since then, in the order of time: a requeued job counts from 1 again."""
    return list({event["epoch"]: event["size"] for event in events(logs, "rebuilt", since)}.values())


def until(done: Callable[[], bool], what: str, shown: Callable[[], str] = str) -> None:
    """Wait for a condition; a failure says what `shown` returns then."""
    if not becomes_true(done, SECONDS, interval=0.02):
        pytest.fail(f"{what}: not within {SECONDS:g} s\n{shown()}")


# -- what does not fit


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "2"], "a job on 2 hosts needs a register that all of them reach, and one key"),
        (["--nnodes", "2", "--register", "sqlite:///tmp/x", "--key-file", "KEY"], "is on one host, and the job on 2"),
        (["--nnodes", "2", "--register", "ETCD", "--key-file", "KEY"], "the job is on 2 hosts, so an address"),
        (
            ["--nnodes", "2", "--register", "ETCD", "--key-file", "KEY", "--interface", "nope0"],
            "interface 'nope0' is not there, or is not up; this host has",
        ),
        (["--nnodes", "2", "--register", "ETCD", "--key-file", "KEY", "--interface", "lo"], "is away"),
        (["--register", "ETCD", "--key-file", "/none"], "key file /none: cannot be read"),
        (["--detach"], "detached processes outlive this command: give --logs"),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_starts(
    tmp_path: Path, key: Path, port: int, options: list[str], words: str
) -> None:
    meant = {"KEY": str(key), "ETCD": f"etcd://127.0.0.1:{port}/job"}
    path = script(tmp_path, "raise SystemExit('it was started')")
    done = said("run", *(meant.get(each, each) for each in options), path)
    assert done.exit_code == 2, done.output
    assert words in done.output


def registry(job: str, key: bytes = b"k" * 32, node: str = "a") -> HostRegistry:
    return HostRegistry("memory://hosts", job, key, node, "127.0.0.1")


def test_a_name_belongs_to_the_host_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key, a job and a version that differ are found before that."""
    with closing(registry("hosts")):
        with pytest.raises(HostNameTaken, match=r"host name 'a' is taken: the agent at 127.0.0.1:\d+ has it"):
            registry("hosts")
        with pytest.raises(WrongKey):
            registry("hosts", b"l" * 32, "b")
        with pytest.raises(Mismatch, match="belongs to job 'hosts', not to 'other'"):
            registry("other", node="b")
        monkeypatch.setattr(settings, "installed_version", lambda: "99.0")
        with pytest.raises(Mismatch, match=r"runs on holdfast .*, this process has 99.0; install the same"):
            registry("hosts", node="b")
        monkeypatch.undo()
        with closing(registry("hosts", node="b")):
            pass
    lost = registry("hosts")
    lost._undo.pop_all()
    lost._thread.run(lost._server.close(), 5.0)  # its agent is gone, its entry is not
    with closing(registry("hosts")):
        pass
    lost._thread.close()
    lost._cell.close()


def test_a_job_that_has_ended_takes_no_host() -> None:
    job = Job("job", 2, 1, 2, ("gloo",), key_check=identity_of(b"k" * 32, "job").key_check)
    check_view("u", View(3, "running", (), job, ""), "job", b"k" * 32)
    with pytest.raises(HoldfastError, match=r"job 'job' has ended \(done\)"):
        check_view("u", View(4, "finished", (), job, "done"), "job", b"k" * 32)


def test_a_host_is_named_by_its_scheduler_or_its_user() -> None:
    assert host_name({"HOLDFAST_NODE": "mine", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1"}) == "mine"
    assert host_name({"SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1"}) == "n1"
    assert host_name({}) == os.uname().nodename


def test_the_address_that_an_agent_chose_overrides_the_variables_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOST", "127.0.0.3")
    monkeypatch.setenv("HOLDFAST_INTERFACE", "127.0.0.0/8")
    contract = LocalContract("job", tmp_path, "gloo", 2, host="127.0.0.1").made()
    for name, value in contract.environ().items():
        monkeypatch.setenv(name, value)
    assert listen_address(None, None, Placement()) == "127.0.0.1"


# -- what dies


@given(st.integers(0, 20), st.lists(st.floats(0, 59), max_size=30))
def test_restarts_are_bounded_and_each_waits_longer(limit: int, lives: list[float]) -> None:
    budget = RestartBudget(limit)
    delays = [budget.take(lived) for lived in lives]
    taken = [delay for delay in delays if delay is not None]
    assert len(taken) == min(limit, len(lives))
    assert all(0 < delay <= MOST_RESTART_SECONDS for delay in taken)
    assert taken == sorted(taken)
    assert RestartBudget(1).take(3600.0) == RestartBudget(1).take(0.0), "one that was stable is started at once"


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_process_that_died_comes_back_as_a_spare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        import os, signal
        from holdfast import ft
        with ft.Session() as session:
            for attempt in session.steps(10**6):
                with attempt:
                    attempt.comm.barrier()
                    if attempt.step == 3 and attempt.epoch == session.view.epoch and attempt.comm.size == 2:
                        if attempt.rank == 1 and not os.path.exists("died"):
                            open("died", "w").close()
                            os.kill(os.getpid(), signal.SIGKILL)
                if attempt.committed and attempt.step > 3 and attempt.comm.size == 2:
                    break
    """
    path = script(tmp_path, text.replace('"died"', repr(str(tmp_path / "died"))))
    assert launch(LaunchPlan(python_command(path, ()), 2, min_size=1, restarts=1), tmp_path / "logs") == 0
    output = capsys.readouterr().out
    assert "[1] was ended by SIGKILL" in output or "[0] was ended by SIGKILL" in output
    assert "another process takes its place in 0.5 s, as a spare; 0 restarts left" in output
    assert len(list((tmp_path / "logs").glob("output-*-[012].log"))) == 3


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_detached_processes_outlive_a_killed_agent(tmp_path: Path, key: Path) -> None:
    logs, gate = tmp_path / "logs", tmp_path / "gate"
    register = f"sqlite://{tmp_path}/job.sqlite"
    options = ["--register", register, "--key-file", str(key), "--logs", str(logs), "--detach", "-n", "2", "--job", "d"]
    agent = subprocess.Popen([HOLDFAST, "run", *options, "--backend", "shm", script(tmp_path, STEPS), str(gate)])
    try:
        until(lambda: len(events(logs, "committed")) > 4, "steps are done")
        agent.kill()
        agent.wait(PROGRAM_SECONDS)
        since = len(events(logs, "committed"))
        until(lambda: len(events(logs, "committed")) > since + 4, "steps go on")
    finally:
        gate.touch()
    pids = {event["pid"] for event in events(logs, "joined")}
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "both end when their work is done")


# -- three hosts

needs_hosts = pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}")


RANKS = (1, 1, 2)
"""How many ranks each host has."""


class HostProcesses:
    """`holdfast run` on the hosts of a network, over an etcd of three nodes on a host of its own."""

    def __init__(self, network: Network, etcd: EtcdCluster, folder: Path, key: Path) -> None:
        self.network, self.folder, self.gate = network, folder, folder / "gate"
        self.agents: dict[int, ForkedProcess] = {}
        self.until = partial(until, shown=self._outputs)
        self._started: list[ForkedProcess] = []
        self._options = ["run", "--nnodes", "3", "-n", str(sum(RANKS)), "--register", f"{etcd.url}/job"]
        self._options += ["--key-file", str(key), "--job", "hosts", "--backend", "gloo", "--min-size", "1"]
        self._options += ["--interface", "10.77.0.0/24"]
        self._script = script(folder, STEPS)

    def logs(self, host: int) -> Path:
        return self.folder / f"logs-{host}"

    def start(self, host: int, *more: str) -> ForkedProcess:
        """Start the agent of a host, which brings its ranks."""
        ranks = RANKS[host % len(RANKS)]
        options = ["--nproc", str(ranks), "--node", f"n{host}", "--logs", str(self.logs(host)), *more]
        arguments = [*self._options, *options, self._script, str(self.gate)]
        agent = start_holdfast(self.network, host, arguments, self.folder / f"agent-{len(self._started)}.log")
        self._started.append(agent)
        self.agents[host] = agent
        return agent

    def _outputs(self) -> str:
        return "\n".join(f"{each.name}: {each.output.read_text()[-2000:]}" for each in self._started if each.output)

    def ends(self, host: int, status: int) -> str:
        """Wait for the end of an agent, and check its exit status; returns its output."""
        ended = self.agents[host].wait(SECONDS)
        output = self.agents[host].output.read_text()
        assert ended.status is not None and os.waitstatus_to_exitcode(ended.status) == status, output
        return output

    def committed(self, since: float) -> int:
        """How many steps the first host committed since then."""
        return len(events(self.logs(0), "committed", since))

    def sizes(self, since: float = 0.0) -> list[int]:
        """Those of the epochs that the first host built since then."""
        return sizes(self.logs(0), since)

    def close(self) -> None:
        for agent in self._started:
            agent.kill()
            agent.close()


@pytest.mark.thorough
@needs_hosts
@pytest.mark.timeout(900)
def test_a_host_is_lost_comes_back_and_another_leaves_in_good_order(tmp_path: Path, key: Path) -> None:
    with (
        Network(4) as network,
        EtcdCluster(3, tmp_path / "etcd", host=network.addresses[3], enter=network.entry(3)) as etcd,
        closing(HostProcesses(network, etcd, tmp_path, key)) as hosts,
    ):
        for host in range(3):
            hosts.start(host)
        hosts.until(lambda: hosts.sizes()[-1:] == [sum(RANKS)], "all work together")
        create_key(tmp_path / "other.key")
        hosts.start(3, "--key-file", str(tmp_path / "other.key"))
        assert "belongs to job 'hosts' with another key" in " ".join(hosts.ends(3, 2).split())
        refused = time.monotonic()
        hosts.until(lambda: hosts.committed(refused) > 2, "none of that disturbs the others")
        assert hosts.sizes()[-1:] == [sum(RANKS)]

        network.cut(2)
        lost = time.monotonic()
        hosts.until(lambda: hosts.committed(lost + 0.1) > 2 and hosts.sizes(lost)[-1:] == [2], "the others go on")
        assert hosts.sizes(lost) == [2], "both of its members are gone in one epoch"
        hosts.agents[2].kill()
        network.heal(2)
        hosts.start(2)
        hosts.until(lambda: hosts.sizes()[-1:] == [sum(RANKS)], "the host is back")

        asked = time.monotonic()
        hosts.agents[1].signal(signal.SIGTERM)
        hosts.ends(1, 128 + signal.SIGTERM)
        assert [event["error"] for event in events(hosts.logs(1), "error")] == [LEFT]
        hosts.until(lambda: hosts.sizes(asked)[-1:] == [3] and hosts.committed(asked) > 4, "the others go on")
        hosts.gate.touch()
        for host in (0, 2):
            hosts.ends(host, 0)


# -- the examples


@pytest.mark.parametrize("path", sorted(path.name for path in CLUSTER.iterdir() if path.is_file()))
def test_the_scripts_for_clusters_are_shell_and_hold_no_key(path: str) -> None:
    assert subprocess.run(["bash", "-n", CLUSTER / path], check=False).returncode == 0
    assert not re.search(r"\b[0-9a-f]{64}\b", (CLUSTER / path).read_text())


def test_a_key_that_is_made_is_one(tmp_path: Path) -> None:
    made = [subprocess.run([CLUSTER / "make-key.sh", "k"], cwd=tmp_path, check=False).returncode for _ in range(2)]
    assert made[0] == 0 != made[1], "an existing key stays"
    assert len(load_key(tmp_path / "k")) == 32


@pytest.mark.parametrize("path", sorted(path.name for path in (CLUSTER / "kubernetes").iterdir()))
def test_the_manifests_set_variables_of_the_contract(path: str) -> None:
    yaml = pytest.importorskip("yaml")
    text = (CLUSTER / "kubernetes" / path).read_text()
    assert all({"apiVersion", "kind", "metadata", "spec"} <= each.keys() for each in yaml.safe_load_all(text))
    contract = set(re.findall(r"`(HOLDFAST_\w+)`", (ROOT / "docs/reference/environment.md").read_text()))
    assert set(re.findall(r"HOLDFAST_\w+", text)) <= contract


# -- IPv6 wherever a host is named


LOOPBACK = "::1"


def exchange(url: str) -> None:
    """Two handles of one cell: what one writes the other reads."""
    assert f"//[{LOOPBACK}]:" in url
    with closing(open_cell(url, "view")) as one, closing(open_cell(url, "view")) as other:
        assert one.compare_and_set(0, b"first")
        assert other.wait(0, 10.0) == (1, b"first")
        assert not other.compare_and_set(0, b"late")


@pytest.mark.thorough
@pytest.mark.skipif(LOOPBACK not in {str(each.address) for each in local_addresses()}, reason="this host has no ::1")
def test_registers_and_a_job_of_a_host_over_ipv6(tmp_path: Path, key: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with tcp.serving(LOOPBACK) as url:
        exchange(f"{url}/job")
    named = pytest.raises(HostNameTaken, match=r"taken: the agent at \[::1\]:\d+ has it")
    with closing(HostRegistry("memory://ipv6", "job", b"k" * 32, "a", LOOPBACK)), named:
        HostRegistry("memory://ipv6", "job", b"k" * 32, "a", LOOPBACK)
    text = """
        from holdfast import ft
        with ft.Session() as session:
            for attempt in session.steps(3):
                with attempt:
                    attempt.comm.barrier()
    """
    with EtcdCluster(1, tmp_path / "etcd", host=LOOPBACK) as etcd:
        exchange(f"{etcd.url}/cell")
        plan = LaunchPlan(python_command(script(tmp_path, text), ()), 2, backend="gloo", here=2)
        host = HostPlan(1, f"{etcd.url}/job", key, "n0", LOOPBACK)
        assert launch(plan, tmp_path / "logs", host) == 0, capfd.readouterr().out
    joined = [event["address"] for event in map(to_record, read_events(tmp_path / "logs")) if event["kind"] == "joined"]
    assert len(joined) == 2 and all(address.startswith(f"[{LOOPBACK}]:") for address in joined)


# -- torch.distributed and torchrun on two hosts


def etcd_on(network: Network, folder: Path) -> EtcdCluster:
    """One node on the third host."""
    return EtcdCluster(1, folder / "etcd", host=network.addresses[2], enter=network.entry(2))


def torch_registry(node: str, ranks: HostRanks = HostRanks(2, 4, 99)) -> HostRegistry:  # noqa: B008  (frozen)
    return HostRegistry("memory://torch-ranks", "job", b"k" * 32, node, "127.0.0.1", ranks)


@pytest.mark.thorough
def test_each_host_has_ranks_of_its_own_and_gets_them_again() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(torch_registry("a")))
        assert first.torch == TorchEnvironment(4, 2, 0, "127.0.0.1", 99)
        second = stack.enter_context(closing(torch_registry("b", HostRanks(1, 4, 98))))
        assert second.torch == TorchEnvironment(4, 1, 2, "127.0.0.1", 99)
        with closing(torch_registry("c")) as last:
            assert last.torch == TorchEnvironment(4, 1, 3, "127.0.0.1", 99), "one rank is left"
            with closing(torch_registry("d")) as spares:
                assert spares.torch == TorchEnvironment(4, 0, 0, "127.0.0.1", 99)
                assert spares.torch.of(0) == {}
        second.close()
        again = stack.enter_context(closing(torch_registry("e", HostRanks(1, 4, 97))))
        ranks = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}
        assert again.torch.of(0) == ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99"}
        assert again.torch.of(1) == {}, "a spare"


TORCH = """
    import json, os
    import torch
    import torch.distributed as dist
    import holdfast.comms.torchdist

    dist.init_process_group("holdfast")
    total = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    print("found", json.dumps([total.item(), *(os.environ[name] for name in names)]), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.thorough
@needs_hosts
@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_a_program_of_torch_distributed_runs_on_two_hosts(tmp_path: Path, key: Path, ipv6: bool) -> None:
    with Network(3, ipv6=ipv6) as network, ExitStack() as stack:
        etcd = stack.enter_context(etcd_on(network, tmp_path))
        options = ["run", "--nnodes", "2", "-n", "3", "--register", f"{etcd.url}/job", "--key-file", str(key)]
        options += ["--interface", "fd77::/64" if ipv6 else "10.77.0.0/24"]
        path = script(tmp_path, TORCH)
        agents: list[ForkedProcess] = []
        for host, ranks in enumerate((2, 1)):
            arguments = [*options, "--nproc", str(ranks), "--node", f"n{host}", path]
            agents.append(start_holdfast(network, host, arguments, tmp_path / f"agent-{host}.log"))
            stack.callback(agents[-1].close)
        outputs = []
        for agent in agents:
            ended = agent.wait(SECONDS)
            outputs.append(agent.output.read_text())
            assert ended.status == 0, outputs[-1]
    found = [json.loads(line.split("found ")[1]) for text in outputs for line in text.splitlines() if "found " in line]
    first = 0 if any(line[1] == "0" for line in found[:2]) else 1
    places = [[("0", "2"), ("1", "2"), ("0", "1")], [("0", "1"), ("0", "2"), ("1", "2")]][first]
    expected = [[111.0, str(rank), local, "3", count] for rank, (local, count) in enumerate(places)]
    assert sorted(found) == [[*line, network.addresses[first]] for line in expected]


@pytest.mark.thorough
@needs_hosts
def test_a_rank_under_torchrun_on_two_hosts_dies_and_the_other_goes_on(tmp_path: Path, key: Path) -> None:
    """The one that dies is on the host of the agent that serves torchrun's own store."""
    path, gate, logs = script(tmp_path, STEPS), tmp_path / "gate", [tmp_path / "logs-0", tmp_path / "logs-1"]

    def works(host: int, size: int) -> bool:
        """Whether the worker of a host has committed steps in an epoch of this size."""
        built = events(logs[host], "rebuilt")[-1:]
        return [each["size"] for each in built] == [size] and len(events(logs[host], "committed", built[0]["time"])) > 2

    def ended(agent: GuardedProcess) -> bool:
        return not Path(f"/proc/{agent.pid}").exists()

    with Network(3) as network, etcd_on(network, tmp_path) as etcd, ExitStack() as stack:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--max-restarts", "0", "--master-addr", network.addresses[0], "--master-port", "29500"]
        contract = {"JOB": "job", "REGISTER": f"{etcd.url}/job", "KEY_FILE": str(key), "INTERFACE": "eth0"}
        agents = []
        for host in range(2):
            logs[host].mkdir()
            values = contract | {"BACKEND": "gloo", "LOG_DIR": str(logs[host])}
            environ = {"OMP_NUM_THREADS": "1"} | {f"HOLDFAST_{name}": value for name, value in values.items()}
            agent = start_program(network, host, [*command, "--node-rank", str(host), path, str(gate)], environ)
            stack.callback(os.close, agent.pidfd)
            stack.enter_context(agent.output)
            stack.callback(agent.reap)
            agents.append(agent)
        until(lambda: works(0, 2), "both work")
        os.kill(events(logs[0], "joined")[0]["pid"], signal.SIGKILL)
        until(lambda: works(1, 1), "the other goes on")
        until(lambda: ended(agents[0]), "the agent of the one that died ends")
        until(lambda: works(1, 1), "the other goes on without it")
        gate.touch()
        until(lambda: ended(agents[1]), "the other agent ends")
        first, second = ((agent.reap(), agent.output.read().decode()) for agent in agents)
    assert (first[0], second[0]) == (1, 0), first[1]
    assert [event["size"] for event in events(logs[1], "rebuilt")] == [2, 1]
    assert "torchrun ends or restarts all workers" not in first[1], "there is nothing to warn of"


# -- SLURM: a job of two nodes loses ranks and a drained node, and a run of RL on three nodes loses one

under_slurm = pytest.mark.skipif(slurm.missing() is not None, reason=f"SLURM: {slurm.missing()}")


class SlurmJob:
    """`examples/cluster/job.sbatch` on two nodes of a cluster: one rank and its agent on each, over etcd."""

    def __init__(self, cluster: SlurmCluster, etcd: EtcdCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.logs = cluster, folder / "logs"
        create_key(folder / "job.key")
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        variables = {"ETCD": etcd.url, "HOLDFAST_KEY_FILE": folder / "job.key", "HOLDFAST_INTERFACE": "127.0.0.0/8"}
        for name, value in (variables | {"NPROC": 1, "LOGS": self.logs}).items():
            monkeypatch.setenv(name, str(value))
        program = ("--min-size", "1", script(folder, STEPS), str(folder / "gate"))
        output = f"--output={folder}/job.out"
        self.until = partial(until, shown=self._state)
        self.number = cluster.call("sbatch", "--parsable", "--nodes=2", output, str(CLUSTER / "job.sbatch"), *program)

    def sizes(self, since: float = 0.0) -> list[int]:
        return sizes(self.logs, since)

    def nodes(self, since: float = 0.0) -> dict[str, int]:
        """The process that each node runs, of those that joined since then."""
        found = {}
        for event in events(self.logs, "joined", since):
            with suppress(OSError):
                variables = Path(f"/proc/{event['pid']}/environ").read_text().split("\0")
                found.update({each.partition("=")[2]: event["pid"] for each in variables if "SLURMD_NODENAME=" in each})
        return found

    def _state(self) -> str:
        return f"sizes {self.sizes()}; {self.cluster.call('squeue')}; {self.cluster.call('sinfo', '-N')}"

    def both_leave(self, since: float) -> None:
        """Wait until both ranks have left in good order."""
        self.until(lambda: len(events(self.logs, "error", since)) == 2, "both leave")
        assert {event["error"] for event in events(self.logs, "error", since)} == {LEFT}


@pytest.mark.thorough
@pytest.mark.timeout(900)
@under_slurm
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


@contextmanager
def three_ports() -> Iterator[int]:
    """The first of three ports in a row, which nobody else takes meanwhile: SLURM's nodes are this machine."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(ReservedPort("127.0.0.1")).number
            try:
                for number in (first + 1, first + 2):
                    held.enter_context(ReservedPort("127.0.0.1", number))
            except (OSError, OverflowError):
                continue
            yield first
            return


@pytest.mark.thorough
@pytest.mark.timeout(900)
@under_slurm
@pytest.mark.skipif(importlib.util.find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")
def test_a_run_finds_the_nodes_of_its_job_and_outlives_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    directory = RunDirectory(tmp_path / "run")

    def happened() -> list[Event]:
        return list(directory.events()) if (directory.path / "events.jsonl").exists() else []

    def trained() -> int:
        return sum(isinstance(each, StepTrained) for each in happened())

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
        words = [str(CLUSTER / "rl.sbatch"), str(tmp_path / "run.toml"), str(directory.path)]
        cluster.call("sbatch", f"--output={tmp_path}/job.out", *words)
        until(lambda: trained() >= 3, "steps are trained on three nodes")

        started = [each for each in happened() if isinstance(each, ProcessStarted) and each.role != "driver"]
        hosts = sorted({each.host for each in started})
        assert hosts == [f"tcp://127.0.0.1:{port}" for port in range(port, port + 3)]
        for role in ROLES:
            assert {each.host for each in started if each.role == role} == set(hosts), "each role is on every node"
        cluster.lose("n3")
        until(
            lambda: any(isinstance(each, ProcessLost) and each.role == "trainer" for each in happened()), "it is seen"
        )
        at = trained()
        until(lambda: trained() >= at + 3, "steps go on without the node")
        assert cluster.call("squeue", "--noheader", "--format=%T") == "RUNNING", "the job outlives its node"
        lost = [each for each in happened() if isinstance(each, ProcessLost)]
        assert {each.host for each in lost} == {hosts[2]} and {each.role for each in lost} >= {"trainer", "generator"}

        def replaced() -> list[ProcessStarted]:
            return [each for each in happened() if isinstance(each, ProcessStarted) and each.replaces]

        until(lambda: {each.role for each in replaced()} == ROLES, "others take their place")
        assert {each.host for each in replaced()} <= set(hosts[:2]), "on the nodes that are left"
        assert load_config(directory.config_file).engine.hosts == (f"slurm:{port}",), "a requeued job asks again"
        until(lambda: not cluster.call("squeue", "--noheader"), "the run ends, and the job with it")
        assert sorted({each.step for each in happened() if isinstance(each, StepTrained)}) == list(range(TRAINED_STEPS))
        until(lambda: not cluster.processes("n1") + cluster.processes("n2"), "nothing is left on the nodes")


@pytest.mark.thorough
@under_slurm
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
