"""A job on this machine: processes that each run a function under an `ft.Session`, and calls that break them.

Made by `LocalCluster.start`. Ranks are those of the newest view in the job's register, so `kill(2)` hits whichever
process is rank 2 now.
"""

from __future__ import annotations

import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.quantities import integer, seconds
from holdfast.comms.system import forks
from holdfast.ft.console.units import counted
from holdfast.ft.event_lines import to_record
from holdfast.ft.events import Event, SpareWaits, SpareWelcomed
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.launch.launcher import Launch, launch
from holdfast.ft.membership.view import View
from holdfast.ft.node.register import Register
from holdfast.ft.processes.channel import ChannelClosed
from holdfast.ft.processes.zygote_client import ForkedProcess
from holdfast.ft.processes.zygote_start import OPTIMIZERS
from holdfast.ft.registers import RegisterAway
from holdfast.harness.cluster.cluster_ranks import ClusterSettings, Ended, RankResult, RunTimeout, death, values
from holdfast.harness.cluster.rank_processes import Echo, last_stack, zygote_of_ranks
from holdfast.harness.cluster.rank_worker import STACK_SIGNAL, Prepare, pickle_by_value, session_target

if TYPE_CHECKING:
    from holdfast.harness.links.client import Links


class Job:
    """A running job. A context manager; `close` (or that of its cluster) ends the processes that still run.

    `processes` are all started processes, spares included, in the order of their start; `directory` holds their files.
    """

    def __init__(  # noqa: PLR0913  (public)
        self,
        settings: ClusterSettings,
        count: int,
        directory: Path,
        options: Mapping[str, Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        prepare: Sequence[Prepare] = (),
        links: Links | None = None,
    ) -> None:
        """Start the processes. Each makes the calls of `prepare` before its session."""
        forks.refuse_in_children(self, "the job", ("processes", "directory"))
        self._settings, self._count = settings, count
        self.directory = directory
        self._contract = LocalContract(
            directory.name, directory, settings.backend, settings.size, options.get("register")
        ).made()
        self._register = self._contract.open_register()
        self._following = None if self._register.cell.local else ViewCache(self._register)
        self._links = links
        self._cuts: tuple[int, ...] = ()
        self._ended: dict[int, Ended | None] = {}
        self._echo = Echo(settings.echo)
        self.closed = False
        self.processes: tuple[ForkedProcess, ...] = ()
        self._launch: Launch | None = None
        try:
            self._target = session_target(pickle_by_value((fn, args, kwargs)), options, prepare)
            self._launch = launch(settings.launcher, count)
            for _ in range(count):
                self._start_process()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Job {self._contract.name!r} of {len(self.processes)} processes{', closed' * self.closed}>"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- watching it

    def view(self, timeout: float = 30.0) -> View:
        """The newest view of the job, which may have ended; waits for the job to form, and while its register is away.

        Raises after `timeout` seconds without a view `RunTimeout`, or `RegisterAway`; before, the failure of a process.
        """
        deadline = time.monotonic() + seconds(timeout)
        epoch = 0
        while True:
            view = away = None
            try:
                view = self._register.watch(epoch, min(0.1, max(0.0, deadline - time.monotonic())))
            except RegisterAway as error:
                away = error
                time.sleep(AGAIN_SECONDS)
            if view is not None and view.phase != "forming":
                return view
            epoch = view.epoch if view is not None else epoch
            self._collect(0.0)
            if len(self._running()) < self._settings.size:
                self._raise_failures()
            if time.monotonic() >= deadline:
                raise away or RunTimeout(
                    range(self._settings.size), timeout, "the job has not formed\n" + self._where()
                )

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        return self._holder(rank).pid

    def events(self) -> list[dict[str, Any]]:
        """The event logs of all processes so far, by time: dicts with `time`, `process`, `pid`, `kind` and more."""
        return list(map(to_record, self._contract.events()))

    def wait_for(self, kind: str, timeout: float = 30.0, **fields: Any) -> dict[str, Any]:
        """Wait for the first event of this kind with these fields, and return it. Raises `TimeoutError`."""
        deadline = time.monotonic() + seconds(timeout)
        while True:
            for event in self.events():
                if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items()):
                    return event
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no event {kind!r} with {fields} within {timeout:.3g} s")
            self._collect(0.01)

    def wait_for_spares(self, timeout: float = 30.0) -> None:
        """Wait until the spares started with the job stand by: a rank that dies after this is replaced.

        Raises `TimeoutError`.
        """
        wanted = self._count - self._settings.size
        deadline = time.monotonic() + seconds(timeout)
        while (found := len(standing_by(self._contract.events()))) < wanted:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{found} of {wanted} spares stand by after {timeout:.3g} s\n" + self._where())
            self._collect(0.01)

    def results(self, timeout: float = 60.0) -> list[Any]:
        """The results of the function on the ranks of the final view, by rank.

        Raises the first failure of a member of that view, as `LocalCluster.run` does (members that died and were
        replaced or left out are no failure), and `RunTimeout` after `timeout` seconds; the job then goes on.
        """
        deadline = time.monotonic() + seconds(timeout)
        while not self._is_over():
            if time.monotonic() >= deadline:
                raise RunTimeout(self._late(), timeout, self._where())
            self._collect(min(0.1, max(0.0, deadline - time.monotonic())))
        view = self._register.read()
        if view is not None and view.phase == "failed" and not view.members:
            raise HoldfastError(f"job {self._contract.name!r} has ended: {view.reason}")
        if view is None or view.phase in ("forming", "failed"):
            self._raise_failures()
            raise HoldfastError(f"the job did not run: {view.reason if view else 'no process joined it'}")
        return values([self._outcome(rank, self._process(view, rank)) for rank in range(len(view.members))])

    def over(self, timeout: float = 0.0) -> bool:
        """Whether the job is over. Waits up to `timeout` seconds for a process to end, and reads its result."""
        if not self._is_over():
            self._collect(seconds(timeout))
        return self._is_over()

    def newest_view(self) -> View | None:
        """The view in the register, in any phase; None before the first.

        Never waits, not even for an absent register: a thread follows one on another machine.
        """
        return self._register.read() if self._following is None else self._following.newest()

    def ended(self, process: ForkedProcess) -> bool:
        """Whether the process has ended, as of the last call of `over`, `view` or `results`."""
        return process.pid in self._ended

    def process_of(self, member_pid: int) -> ForkedProcess | None:
        """The process of this job with the id `member_pid`."""
        return next((process for process in self.processes if process.pid == member_pid), None)

    @property
    def register_url(self) -> str:
        """The URL of the job's register."""
        return self._contract.register_url

    @property
    def events_directory(self) -> Path:
        """The folder of the processes' event logs."""
        return self._contract.events_directory

    def add(self) -> ForkedProcess:
        """Start one more process: it joins as a spare, or as a member if the job wants more.

        Raises `Unsupported` where a launcher starts all ranks together.
        """
        if self._settings.launcher:
            raise Unsupported(f"a further process under {self._settings.launcher}", "use a backend without a launcher")
        return self._start_process()

    # -- breaking it

    def kill(self, rank: int) -> int:
        """SIGKILL the process that holds `rank` in the newest view; returns its pid."""
        return self._signal(rank, signal.SIGKILL)

    def pause(self, rank: int) -> int:
        """SIGSTOP the process that holds `rank` in the newest view, and wait until it is stopped; returns its pid."""
        process = self._holder(rank)
        process.signal(signal.SIGSTOP)
        process.wait_stopped(5.0)
        return process.pid

    def resume(self, rank: int) -> int:
        """SIGCONT the process that holds `rank` in the newest view; returns its pid."""
        return self._signal(rank, signal.SIGCONT)

    def partition(self, *groups: Iterable[int]) -> None:
        """Cut the network between groups of ranks of the newest view, until `heal`.

        Ranks in no group form one more. No process is told; data sent meanwhile arrives afterwards. Raises
        `Unsupported` unless the cluster has `links=True`, or for a transport without a network.
        """
        from holdfast.harness.links.policy import between, unbreakable

        why = unbreakable(self._settings.backend, self._settings.environ)
        if self._links is None or why is not None:
            raise Unsupported(
                f"cutting the network between processes of one host{f' ({why})' * (why is not None)}",
                "use LocalCluster(..., 'gloo', links=True); or kill(rank) for a death, pause(rank) for silence",
            )

        sides = [frozenset(self.pid(rank) for rank in group) for group in groups]
        self._cuts += self._links.add(between(sides, frozenset(process.pid for process in self.processes)))

    def heal(self) -> None:
        """Undo every `partition`."""
        if self._links is not None:
            self._links.remove(self._cuts)
            self._cuts = ()

    def close(self) -> None:
        """End the processes that still run, and remove the job's files. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()
        if self._launch is not None:
            self._launch.close()
        (self._following or self._register).close()
        self._echo.pump()
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- inside

    def _start_process(self) -> ForkedProcess:
        number = len(self.processes)
        name, output = f"process {number}", self.directory / f"process-{number}.log"
        assert self._launch is not None
        own = {**self._settings.environ, **self._contract.environ(), **self._launch.environ(number)}
        process = zygote_of_ranks("holdfast.harness.cluster.rank_worker", "holdfast.ft.session", OPTIMIZERS).spawn(
            self._target, name=name, output=output, threads=self._settings.threads, environ=own
        )
        self.processes += (process,)
        self._launch.attach(number, process.pidfd)
        self._echo.follow(name, output)
        return process

    def _holder(self, rank: int) -> ForkedProcess:
        view, rank = self.view(), integer(rank, "rank")
        if not 0 <= rank < len(view.members):
            raise ValueError(
                f"rank {rank} is out of range: epoch {view.epoch} has {counted(len(view.members), 'member')}"
            )
        return self._process(view, rank)

    def _process(self, view: View, rank: int) -> ForkedProcess:
        pid = view.members[rank].peer.pid
        return next(process for process in self.processes if process.pid == pid)

    def _signal(self, rank: int, number: int) -> int:
        process = self._holder(rank)
        process.signal(number)
        return process.pid

    def _collect(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for processes to end, and read their results."""
        poller = select.poll()
        waiting = {}
        for process in self.processes:
            if process.pid not in self._ended:
                for fd in (process.channel.fileno(), process.pidfd):
                    waiting[fd] = process
                    poller.register(fd, select.POLLIN)
        for process in {waiting[fd].pid: waiting[fd] for fd, _ in poller.poll(timeout * 1000)}.values():
            self._ended[process.pid] = self._end_of(process)
        self._echo.pump()

    def _end_of(self, process: ForkedProcess) -> Ended | None:
        """The last message of the process; None if it died before sending it."""
        try:
            ended: Ended = process.channel.recv(30.0)
        except (ChannelClosed, TimeoutError):
            return None
        return ended

    def _outcome(self, rank: int, process: ForkedProcess) -> RankResult:
        ended = self._ended[process.pid]
        return death(rank, process) if ended is None else ended.result(rank)

    def _raise_failures(self) -> None:
        """Raise the first failure, if any, with the numbers of processes as ranks."""
        values([self._outcome(n, process) for n, process in enumerate(self.processes) if process.pid in self._ended])

    def _running(self) -> list[ForkedProcess]:
        return [process for process in self.processes if process.pid not in self._ended]

    def _late(self) -> list[int]:
        """The ranks in the newest view with a process that has not ended."""
        view = self._register.read()
        members = () if view is None else view.members
        return [rank for rank, member in enumerate(members) if member.peer.pid not in self._ended]

    def _is_over(self) -> bool:
        """Whether all processes have ended, or the job and all members of its last view have.

        A process that is stopped and was left out of the last view may remain.
        """
        if len(self._ended) == len(self.processes):
            return True
        view = self.newest_view()
        if view is None or view.phase not in ("finished", "failed"):
            return False
        return all(member.peer.pid in self._ended for member in view.members)

    def _where(self) -> str:
        """The stacks of the main threads of the processes that still run; asks each by a signal."""
        running = self._running()
        for process in running:
            process.signal(STACK_SIGNAL)
        time.sleep(0.2)
        return "\n".join(f"[{process.name}, pid {process.pid}] {last_stack(process.output)}" for process in running)


LOOK_SECONDS = 1.0
AGAIN_SECONDS = 0.05
END_SECONDS = 10.0


class ViewCache:
    """Follows `register` until that is closed. While it is away, the newest view is the last known one."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._view: View | None = None
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow-register", daemon=True)
        self._thread.start()

    def newest(self) -> View | None:
        """The newest known view; None before the first. Raises the error if the register holds no view."""
        if self._failure is not None:
            raise self._failure
        return self._view

    def close(self) -> None:
        """Close the register, and end the thread. Idempotent."""
        self._over.set()
        self._register.close()
        self._thread.join(END_SECONDS)

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                epoch = 0 if self._view is None else self._view.epoch
                self._view = self._register.watch(epoch, LOOK_SECONDS) or self._view
            except RegisterAway:
                self._over.wait(AGAIN_SECONDS)
            except Exception as error:
                self._failure = error
                return


# Spares ---------------------------------------------------------------------------------------------------------------


def standing_by(events: Iterable[Event]) -> set[str]:
    """The spares that stand by, from the events of all processes so far."""
    told: dict[str, tuple[str, ...]] = {}
    heard: set[tuple[str, str]] = set()
    for event in events:
        if isinstance(event, SpareWaits):
            told.setdefault(event.process, event.to)
        elif isinstance(event, SpareWelcomed):
            heard.add((event.spare, event.process))
    return {spare for spare, members in told.items() if all((spare, member) in heard for member in members)}
