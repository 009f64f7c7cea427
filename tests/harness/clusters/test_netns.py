"""Three hosts of two ranks, as network namespaces: cables are pulled while a job runs. Needs root.

The healthy side goes on; the other stops by itself, has committed nothing that the job does not have, and comes back
when its cable is plugged in again, in a new session of the same process.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms import OpTimeout, StaleEpoch
from holdfast.ft import Session, Timeouts
from holdfast.ft.event_lines import to_record
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.ft.registers import RegisterAway
from holdfast.harness.invariants import check
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.etcd import EtcdCluster
from holdfast.harness.testbed.netns import EnterNamespace, Network
from support.samples.tally import SHARDS, expected, tally_up
from support.waiting import PATIENCE, becomes_true

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}"),
]

TIMES = Timeouts(heartbeat=0.1, suspect=0.6, operation=12.0, rebuild=12.0, join=20.0)
SLOW_TO_SUSPECT = replace(TIMES, suspect=4.0)
LAST = 15
"""The step in which all ranks wait for the gate."""


def live(entry: EnterNamespace, options: dict[str, Any], gate: Path) -> Callable[[ProcessChannel], None]:
    """The body of a process on a host: joins the job, and joins again whenever it was left out."""

    def target(channel: ProcessChannel) -> None:
        entry()
        sessions = 0
        while True:
            sessions += 1
            try:
                with Session(**options) as session:
                    result = tally_up(session, LAST + 2, gate=str(gate), gated=LAST)
            except (StaleEpoch, RegisterAway, OpTimeout):  # a loaded machine may be too slow to connect in time
                time.sleep(0.1)
                continue
            channel.send((sessions, result), timeout=30.0)
            return

    return target


class Hosts:
    """A job of two processes on each host of a network."""

    def __init__(self, network: Network, folder: Path, backend: str, register: str | None, times: Timeouts) -> None:
        self.network, self.gate = network, folder / "gate"
        contract = folder / "job"
        contract.mkdir(mode=0o700)
        self._contract = LocalContract("job", contract, backend, 6, register).made()
        self.processes: list[ForkedProcess] = []
        for number in range(6):
            address = network.addresses[number // 2]
            options = {"host": address, "timeouts": times, "shards": SHARDS, "min_size": 1}
            self.processes.append(
                zygote().spawn(
                    live(network.entry(number // 2), options, self.gate),
                    name=f"process {number}",
                    output=folder / f"{number}.log",
                    environ={**self._contract.environ(), "GLOO_SOCKET_IFNAME": "eth0"},
                )
            )

    def events(self, kind: str, host: int | None = None) -> list[dict[str, Any]]:
        """The events of a kind so far, of all processes or of those on one host."""
        pids = {process.pid for process in self.processes[2 * host : 2 * host + 2]} if host is not None else None
        return [
            e
            for e in map(to_record, self._contract.events())
            if e["kind"] == kind and (pids is None or e["pid"] in pids)
        ]

    def until(self, done: Callable[[], bool], what: str) -> None:
        in_time = becomes_true(done, 3 * PATIENCE, interval=0.02)
        assert in_time, f"{what}: not within {3 * PATIENCE:g} s\n{self.story()}"

    def until_size(self, size: int, since: float = 0.0) -> None:
        """Wait until the job works with this many ranks."""
        self.until(
            lambda: len([e for e in self.events("rebuilt") if e["size"] == size and e["time"] > since]) >= size,
            f"all {size} work together",
        )

    def story(self) -> str:
        quiet = ("attempt", "prepared", "committed")
        return "\n".join(json.dumps(e) for e in map(to_record, self._contract.events()) if e["kind"] not in quiet)[
            -20_000:
        ]

    def left_out(self, *hosts: int) -> list[dict[str, Any]]:
        """The sessions on these hosts that ended because the others went on without them."""
        errors = [event for host in hosts for event in self.events("error", host)]
        return [event for event in errors if event["error"].startswith("StaleEpoch")]

    def finish(self) -> list[int]:
        """Open the gate, and check that all end with the right sum; returns how many sessions each process needed."""
        self.gate.touch()
        ends: list[tuple[int, dict[str, Any]]] = [process.channel.recv(3 * PATIENCE) for process in self.processes]
        for _, result in ends:
            assert (result["total"], result["steps"]) == (expected(LAST + 2), list(range(LAST + 2))), self.story()
        broken = check(self._contract.events())
        # the checker of evictions knows nothing of cables
        assert [each for each in broken if each.invariant != "nobody healthy is evicted"] == []
        return [sessions for sessions, _ in ends]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()


@contextlib.contextmanager
def hosts(folder: Path, backend: str = "gloo", etcd_on: int | None = None, times: Timeouts = TIMES) -> Iterator[Hosts]:
    """A job on three hosts; its register is a file that all hosts reach, or etcd on host `etcd_on`."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(3))
        register = None
        if etcd_on is not None:
            address, entry = network.addresses[etcd_on], network.entry(etcd_on)
            etcd = stack.enter_context(EtcdCluster(1, folder / "etcd", host=address, enter=entry))
            register = f"{etcd.url}/job"
        job = stack.enter_context(contextlib.closing(Hosts(network, folder, backend, register, times)))
        job.until_size(6)
        yield job


def test_a_host_whose_cable_is_pulled_stops_and_comes_back(tmp_path: Path) -> None:
    with hosts(tmp_path, "ucx", etcd_on=0) as job:
        job.network.cut(2)
        cut = time.monotonic()
        job.until_size(4, cut)
        revoked = job.events("revoked", 2)
        job.until(lambda: len(job.events("revoked", 2)) >= 2, "the cut-off side stops")
        assert not [e for e in job.events("committed", 2) if e["time"] > cut + 1.0], revoked
        job.network.heal(2)
        job.until_size(6, cut)
        sessions = job.finish()
        assert job.left_out(0, 1) == [], "no process of the healthy side was left out"
        assert len(job.left_out(2)) == 2 and min(sessions[4:]) >= 2


@pytest.mark.parametrize("fault", ["mute", "deafen"])
def test_a_host_whose_cable_works_one_way_is_left_out(tmp_path: Path, fault: str) -> None:
    """Both sides reach the register, a file: the detectors alone decide that the healthy side stays."""
    with hosts(tmp_path) as job:
        getattr(job.network, fault)(2)
        broken = time.monotonic()
        job.until_size(4, broken)
        job.network.heal(2)
        job.until_size(6, broken)
        job.finish()
        assert job.left_out(0, 1) == []


def test_the_job_goes_on_at_the_side_of_the_register(tmp_path: Path) -> None:
    """The two hosts without etcd stop; the host with etcd goes on alone, and the others rejoin it."""
    with hosts(tmp_path, etcd_on=2) as job:
        job.network.cut(2)
        cut = time.monotonic()
        job.until_size(2, cut)
        assert {e["pid"] for e in job.events("rebuilt") if e["time"] > cut} == {p.pid for p in job.processes[4:]}
        job.network.heal(2)
        job.until_size(6, cut)
        job.finish()


def test_a_flapping_or_slow_cable_evicts_no_member(tmp_path: Path) -> None:
    """The cable is pulled for a quarter of the suspect time, three times, and then limited to 50 Mbit/s."""
    with hosts(tmp_path, times=SLOW_TO_SUSPECT) as job:
        for _ in range(3):
            job.network.cut(2)
            time.sleep(SLOW_TO_SUSPECT.suspect / 4)
            job.network.heal(2)
            time.sleep(SLOW_TO_SUSPECT.suspect / 2)
        job.network.throttle(2, 50_000_000)
        job.finish()
        assert job.left_out(0, 1, 2) == []


def test_a_closed_network_leaves_no_descriptor() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with Network(2) as network:
        assert network.addresses == ("10.77.0.1", "10.77.0.2")
    assert len(set(Path("/proc/self/fd").iterdir())) <= len(before)
