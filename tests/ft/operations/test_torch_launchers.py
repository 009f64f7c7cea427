"""torchrun on two hosts, and programs of torch.distributed that `holdfast run` starts on two hosts."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.system.keys import create_key
from holdfast.ft.event_lines import to_record
from holdfast.ft.launch.guarded_process import GuardedProcess
from holdfast.ft.launch.hosts.host_registry import HostRanks, HostRegistry
from holdfast.ft.launch.torch_environment import TorchEnvironment
from holdfast.ft.processes.zygote_client import ForkedProcess
from holdfast.ft.telemetry.event_reader import read_events
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.etcd import EtcdCluster
from holdfast.harness.testbed.netns import Network
from support.hosts import start_holdfast, start_program
from support.waiting import becomes_true

pytestmark = pytest.mark.thorough

needs_hosts = pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}")
SECONDS = 120.0
HERE = HostRanks(2, 4, 99)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    create_key(tmp_path / "job.key")
    return tmp_path / "job.key"


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def etcd_on(network: Network, folder: Path) -> EtcdCluster:
    """One node on the third host."""
    return EtcdCluster(1, folder / "etcd", host=network.addresses[2], enter=network.entry(2))


# -- the ranks of torch.distributed on each host


def registry(node: str, ranks: HostRanks = HERE) -> HostRegistry:
    return HostRegistry("memory://torch-ranks", "job", b"k" * 32, node, "127.0.0.1", ranks)


def test_each_host_has_ranks_of_its_own_and_gets_them_again() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(registry("a")))
        assert first.torch == TorchEnvironment(4, 2, 0, "127.0.0.1", 99)
        second = stack.enter_context(closing(registry("b", HostRanks(1, 4, 98))))
        assert second.torch == TorchEnvironment(4, 1, 2, "127.0.0.1", 99)
        with closing(registry("c")) as last:
            assert last.torch == TorchEnvironment(4, 1, 3, "127.0.0.1", 99), "one rank is left"
            with closing(registry("d")) as spares:
                assert spares.torch == TorchEnvironment(4, 0, 0, "127.0.0.1", 99)
                assert spares.torch.of(0) == {}
        second.close()
        again = stack.enter_context(closing(registry("e", HostRanks(1, 4, 97))))
        assert again.torch.of(0) == {
            "RANK": "2",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "99",
        }
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


@needs_hosts
@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
@pytest.mark.timeout(300)
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
    found = [
        [json.loads(line.split("found ")[1]) for line in text.splitlines() if "found " in line] for text in outputs
    ]
    first = next(host for host in range(2) if any(line[1] == "0" for line in found[host]))
    master = network.addresses[first]
    expected: list[list[list[Any]]] = [[], []]
    rank = 0
    for host in (first, 1 - first):
        count = (2, 1)[host]
        for local in range(count):
            expected[host].append([111.0, str(rank), str(local), "3", str(count), master])
            rank += 1
    assert [sorted(lines) for lines in found] == expected


# -- torchrun

STEPS = """
    import pathlib, sys, time
    import torch
    from holdfast import ft
    gate = pathlib.Path(sys.argv[1])
    with ft.Session() as session:
        for attempt in session.steps(10**6):
            with attempt:
                is_open = torch.tensor([float(gate.exists())])
                attempt.comm.all_reduce(is_open)
                time.sleep(0.02)
            if attempt.committed and is_open.item() == attempt.comm.size:
                break
"""


class TorchrunAgents:
    """torchrun with one worker on each of two hosts, over an etcd on a third one."""

    def __init__(self, network: Network, etcd: EtcdCluster, folder: Path, key: Path) -> None:
        self.folder, self.gate = folder, folder / "gate"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--max-restarts", "0", "--master-addr", network.addresses[0], "--master-port", "29500"]
        environ = {
            "HOLDFAST_JOB": "job",
            "HOLDFAST_REGISTER": f"{etcd.url}/job",
            "HOLDFAST_KEY_FILE": str(key),
            "HOLDFAST_INTERFACE": "eth0",
            "HOLDFAST_BACKEND": "gloo",
            "OMP_NUM_THREADS": "1",
        }
        path = script(folder, STEPS)
        self.agents: list[GuardedProcess] = []
        for host in range(2):
            self._logs(host).mkdir()
            own = environ | {"HOLDFAST_LOG_DIR": str(self._logs(host))}
            words = [*command, "--node-rank", str(host), path, str(self.gate)]
            self.agents.append(start_program(network, host, words, own))

    def _logs(self, host: int) -> Path:
        return self.folder / f"logs-{host}"

    def events(self, host: int, kind: str) -> list[dict[str, Any]]:
        return [event for event in map(to_record, read_events(self._logs(host))) if event["kind"] == kind]

    def sizes(self, host: int) -> list[int]:
        """The sizes of the epochs that the host's worker built."""
        return [event["size"] for event in self.events(host, "rebuilt")]

    def until_size(self, host: int, size: int) -> None:
        """Wait until the worker of a host has committed steps in an epoch of this size."""

        def works() -> bool:
            built = self.events(host, "rebuilt")
            if not built or built[-1]["size"] != size:
                return False
            return sum(event["time"] > built[-1]["time"] for event in self.events(host, "committed")) > 2

        if not becomes_true(works, SECONDS, interval=0.05):
            pytest.fail(f"host {host} built {self.sizes(host)}: {self.end()}")

    def end(self) -> list[tuple[int, str]]:
        """End all that still runs; returns each agent's return code and output."""
        ends = []
        for agent in self.agents:
            code = agent.reap()
            assert agent.output is not None
            ends.append((code, "" if agent.output.closed else agent.output.read().decode()))
        return ends

    def close(self) -> None:
        self.end()
        for agent in self.agents:
            assert agent.output is not None
            agent.output.close()
            os.close(agent.pidfd)


@pytest.fixture
def torchrun(tmp_path: Path, key: Path) -> Iterator[TorchrunAgents]:
    with (
        Network(3) as network,
        etcd_on(network, tmp_path) as etcd,
        closing(TorchrunAgents(network, etcd, tmp_path, key)) as agents,
    ):
        agents.until_size(0, 2)
        yield agents


@needs_hosts
@pytest.mark.timeout(300)
def test_a_rank_under_torchrun_on_two_hosts_dies_and_the_other_goes_on(torchrun: TorchrunAgents) -> None:
    """The one that dies is on the host of the agent that serves torchrun's own store."""
    victim = torchrun.events(0, "joined")[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    torchrun.until_size(1, 1)
    assert becomes_true(lambda: not Path(f"/proc/{torchrun.agents[0].pid}").exists(), SECONDS), "its agent has ended"
    torchrun.until_size(1, 1)
    torchrun.gate.touch()
    agent = torchrun.agents[1]
    assert becomes_true(lambda: not Path(f"/proc/{agent.pid}").exists(), SECONDS)
    (first, words), (second, _) = torchrun.end()
    assert (first, second) == (1, 0), words
    assert torchrun.sizes(1) == [2, 1]
    assert "torchrun ends or restarts all workers" not in words, "there is nothing to warn of"
