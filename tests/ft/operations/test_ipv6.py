"""IPv6 wherever a host is named: registers, the agents of hosts, and the processes of a job."""

from __future__ import annotations

import socket
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.comms.system.keys import create_key
from holdfast.ft.event_lines import to_record
from holdfast.ft.launch.hosts.host_agent import HostPlan
from holdfast.ft.launch.hosts.host_registry import HostNameTaken, HostRegistry
from holdfast.ft.launch.local_launcher import LaunchPlan, launch, python_command
from holdfast.ft.registers import open_cell, tcp
from holdfast.ft.telemetry.event_reader import read_events
from holdfast.harness.testbed.etcd import EtcdCluster

LOOPBACK = "::1"


def missing() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((LOOPBACK, 0))
    except OSError:
        return True
    return False


pytestmark = [pytest.mark.thorough, pytest.mark.skipif(missing(), reason="this host has no ::1")]


def exchange(url: str) -> None:
    """Two handles of one cell: what one writes the other reads."""
    assert f"//[{LOOPBACK}]:" in url
    with closing(open_cell(url, "view")) as one, closing(open_cell(url, "view")) as other:
        assert one.compare_and_set(0, b"first")
        assert other.wait(0, 10.0) == (1, b"first")
        assert not other.compare_and_set(0, b"late")


def test_a_tcp_register() -> None:
    with tcp.serving(LOOPBACK) as url:
        exchange(f"{url}/job")


def test_an_etcd_register_and_a_job_of_a_host(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    create_key(tmp_path / "key")
    text = """
        from holdfast import ft
        with ft.Session() as session:
            for attempt in session.steps(3):
                with attempt:
                    attempt.comm.barrier()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    with EtcdCluster(1, tmp_path / "etcd", host=LOOPBACK) as etcd:
        exchange(f"{etcd.url}/cell")
        plan = LaunchPlan(python_command(str(tmp_path / "script.py"), ()), 2, backend="gloo", here=2)
        host = HostPlan(1, f"{etcd.url}/job", tmp_path / "key", "n0", LOOPBACK)
        assert launch(plan, tmp_path / "logs", host) == 0, capfd.readouterr().out
    joined = [event["address"] for event in map(to_record, read_events(tmp_path / "logs")) if event["kind"] == "joined"]
    assert len(joined) == 2 and all(address.startswith(f"[{LOOPBACK}]:") for address in joined)


def test_the_address_of_an_agent_is_named_as_others_dial_it() -> None:
    with (
        closing(HostRegistry("memory://ipv6", "job", b"k" * 32, "a", LOOPBACK)),
        pytest.raises(HostNameTaken, match=r"taken: the agent at \[::1\]:\d+ has it"),
    ):
        HostRegistry("memory://ipv6", "job", b"k" * 32, "a", LOOPBACK)
