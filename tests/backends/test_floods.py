"""Idle connections of strangers, however many, take no descriptors that recovery needs."""

from __future__ import annotations

import errno
import resource
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from holdfast.ft import Session
from holdfast.ft.telemetry import metrics
from holdfast.harness import LocalCluster
from support.rpc_servers import RpcThread, rpc_server_thread
from support.waiting import PROGRAM_SECONDS, eventually

KNOWN = {"key": b"k" * 32, "job": "job"}


def ports_of(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp4")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


@contextmanager
def flood(ports: list[int], count: int) -> Iterator[None]:
    """Hold `count` idle connections to each port."""
    with ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(count):
            for port in ports:
                each = stack.enter_context(socket.socket())
                each.setblocking(False)
                assert each.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS, errno.EAGAIN)
        yield


def is_scraped(port: int) -> bool:
    """Whether a scrape gets its page. A connection of the flood that the kernel lets in after it may turn it away."""
    with suppress(ConnectionError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0).read() == b"a page"
    return False


def test_a_flood_of_the_metrics_port_leaves_room_and_time_for_a_scrape() -> None:
    """One thread serves all connections, and gives strangers a share of the descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = metrics.MetricsServer("127.0.0.1", 0, lambda: ("text/plain", b"a page"))
    try:
        threads = set(threading.enumerate())
        with flood([server.port], 300):
            time.sleep(0.2)
            eventually(lambda: is_scraped(server.port))
            assert set(threading.enumerate()) <= threads
            assert len(server._listener._strangers) <= metrics.MOST
        for limit, most in ((64, 8), (soft, metrics.MOST)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert server._listener.most == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.close()


def test_a_listener_without_descriptors_serves_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """An asyncio server would log a traceback and not listen for a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with rpc_server_thread(identity="server", handlers={"echo": lambda peer, body: body}, **KNOWN) as server:
        host, _, port = server.address.rpartition(":")
        with ExitStack() as stack:
            strangers = [stack.enter_context(socket.socket()) for _ in range(150)]
            highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
            try:
                for each in strangers:
                    each.connect((host, int(port)))
                eventually(lambda: caplog.records)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            client = RpcThread(server.address, identity="client", **KNOWN)
            assert client.call("echo", b"here") == b"here"
            client.close()
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "a listener turns connections away" in said.message
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_job_recovers_from_a_kill_while_every_port_of_it_is_flooded(backend: str, tmp_path: Path) -> None:
    started = tmp_path / "started"

    def train(session: Session) -> object:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        for attempt in session.steps(60):
            with attempt:
                attempt.comm.all_reduce(torch.ones(64))
                time.sleep(0.05)
            if attempt.step == 3:
                started.touch()
        return session.step, session.size

    options = {"min_size": 2, "shards": 6, "metrics": 0}
    with LocalCluster(3, backend, timeout=90.0, session=options) as cluster:
        job = cluster.start(train)
        eventually(started.exists)
        ports = [port for process in job.processes for port in ports_of(process.pid)]
        assert len(ports) >= 6, "each member has a control port, and one for metrics"
        with flood(ports, 400):
            job.kill(1)
            assert job.results(timeout=PROGRAM_SECONDS) == [(60, 2)] * 2
