"""Starts and ends the processes of a run: those of a job of sessions, and those around a weight store."""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.ft import Timeouts
from holdfast.ft.console.output import tail
from holdfast.ft.console.units import counted
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.membership.view import View
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.ft.registers import RegisterAway
from holdfast.ft.telemetry.event_reader import EventTail, refuse
from holdfast.harness.chaos.run.fault_context import NoTargetProcess, ProcessSet, Victim
from holdfast.harness.chaos.run.foreign_process import ForeignProcess
from holdfast.harness.chaos.run.hosts import Hosts
from holdfast.harness.chaos.scenario.scenario import Scenario
from holdfast.harness.chaos.scenario.workload import StoreWorkload
from holdfast.harness.chaos.workloads.orders import Stop
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.invariants import Event, read_directory
from holdfast.harness.report.model import Fate, ProcessRecord
from holdfast.harness.testbed.small_disk import small_disk

END_SECONDS = 10.0

EXITED_WELL = "exited with status 0"
ENDED_WITH_DRIVER = "ended with its driver"


@dataclass(slots=True)
class RunProcess:
    """A process of a run while that lasts, with times on `time.monotonic()`; `record` is what remains of it.

    `ended` is 0 while it lives.
    """

    name: str
    role: str
    process: ForkedProcess | ForeignProcess
    born: float
    ended: float = 0.0
    how: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended_well(self) -> bool:
        """Whether it still lives, or has ended as it should."""
        return not self.ended or self.how == EXITED_WELL

    def record(self, began: float, ended: float, role: str, struck: bool) -> ProcessRecord:
        """The process in seconds since the run `began`; it ended at `ended`, by a fault if it was `struck`."""
        fate: Fate = "finished" if self.ended_well else "killed" if struck else "lost"
        note = "" if self.ended_well else self.how
        return ProcessRecord(self.name, role, self.pid, max(0.0, self.born - began), ended - began, fate, note)

    @property
    def forked(self) -> ForkedProcess:
        """The process, for those that the zygote of this process forked."""
        assert isinstance(self.process, ForkedProcess)
        return self.process


@dataclass(slots=True)
class Results:
    """The results of processes by name, and the errors of others."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    ranks: int = 0


class DrivenProcessSet(ProcessSet):
    """A set of processes that the loop of a run drives."""

    def __init__(self) -> None:
        self.begun: list[RunProcess] = []
        self._log_tail: EventTail | None = None

    @abstractmethod
    def over(self, timeout: float) -> bool:
        """Whether the run is over; waits for up to `timeout` seconds for something to happen."""

    @abstractmethod
    def results(self) -> Results:
        """The results, once the run is over."""

    @abstractmethod
    def close(self) -> None:
        """End everything, and remove the files. Idempotent."""

    def new_events(self) -> list[Event]:
        """The events that the processes have logged since the last call, in the order of time."""
        if self._log_tail is None:
            self._log_tail = EventTail(self.events_directory, refuse)
        return self._log_tail.new()

    def jobs(self) -> list[list[Event]]:
        """All events, of each job for itself if the processes are those of several, one after the other."""
        return [read_directory(self.events_directory)]

    def everybody(self) -> list[Victim]:
        return [self._victim(each) for each in self.begun if each.process.alive()]

    def of_pid(self, pid: int) -> Victim | None:
        return next((self._victim(each) for each in self.begun if each.process.pid == pid), None)

    def outputs(self) -> str:
        """The end of the output of each process."""
        forked = [(each.name, each.process) for each in self.begun if isinstance(each.process, ForkedProcess)]
        found = ((name, tail(process.output, 2000)) for name, process in forked)
        return "\n".join(f"[{name}] {text}" for name, text in found if text)

    def _victim(self, begun: RunProcess) -> Victim:
        return Victim(begun.name, begun.process)

    def _note_ends(self) -> list[RunProcess]:
        """The processes that have ended since the last call."""
        new = [each for each in self.begun if not each.ended and not each.process.alive()]
        for each in new:
            each.ended = time.monotonic()
            if isinstance(each.process, ForkedProcess):
                each.how = str(each.process.wait(5.0))
        return new


Step = Callable[[], Mapping[str, Any] | None]
"""A call that a process makes before its session; it may return options of the session."""


@dataclass(frozen=True, slots=True)
class Prelude:
    """The calls that each process of a job makes before its session. It is pickled, so it holds data only."""

    steps: tuple[Step, ...]

    def __call__(self) -> Mapping[str, Any]:
        options: dict[str, Any] = {}
        for step in self.steps:
            options.update(step() or {})
        return options


@dataclass(frozen=True, slots=True)
class SeparateHost:
    """Makes a process appear to be on a host of its own."""

    def __call__(self) -> None:
        from holdfast.comms.transport import liveness

        os.environ[liveness.HOST] = f"host-{os.getpid()}"
        liveness.this_host.cache_clear()


class SessionProcesses(DrivenProcessSet):
    """A job of `LocalCluster`, each process of which runs `body(session, *args)`."""

    def __init__(
        self,
        scenario: Scenario,
        body: Callable[..., Any],
        args: Sequence[Any],
        prelude: Sequence[Step],
        hosts: Hosts | None = None,
        register: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        spec = scenario.job
        steps: list[Step] = [*prelude] if hosts is None else [hosts.claim(), *prelude]
        if spec.hosts == "many":
            steps.append(SeparateHost())
        timeouts = Timeouts(**{name: getattr(spec.timeouts, name) for name in spec.timeouts.__struct_fields__})
        options = {"min_size": spec.min_size, "shards": spec.shards or spec.ranks, "timeouts": timeouts}
        if register is not None:
            options["register"] = register
        self._replace = spec.replace
        self._view: View | None = None
        self._undo = contextlib.ExitStack()
        try:
            cluster = self._undo.enter_context(
                LocalCluster(
                    spec.ranks,
                    spec.backend,
                    spares=spec.spares,
                    threads=1,
                    echo=False,
                    environ={"OMP_NUM_THREADS": "1", **spec.environ, **(environ or {})},
                    session=options,
                    prepare=Prelude(tuple(steps)) if steps else None,
                )
            )
            if spec.disk is not None:
                self._undo.enter_context(small_disk(cluster.logs, spec.disk))
            self.job: Job = self._undo.enter_context(cluster.start(body, *args))
        except BaseException:
            self._undo.close()
            raise
        self.directory, self.events_directory = self.job.directory, self.job.events_directory
        self._see_new()

    @property
    def register_url(self) -> str:
        return self.job.register_url

    def view(self) -> View | None:
        """The newest known view; None before the first."""
        with contextlib.suppress(HoldfastError):
            self._view = self.job.newest_view() or self._view
        return self._view

    def find(self, name: int | str) -> list[Victim]:
        view = self.view()
        members = () if view is None else view.members
        if isinstance(name, int) or name in ("coordinator", "last"):
            rank = {"coordinator": 0, "last": len(members) - 1}.get(name, name) if isinstance(name, str) else name
            if not 0 <= int(rank) < len(members):
                raise NoTargetProcess(f"there is no rank {rank}: the job has {counted(len(members), 'member')} now")
            return [self._member(view, int(rank))]
        if name == "joiner":
            return [self._victim(self.begun[-1])]
        if name == "spare":
            inside = {member.peer.pid for member in members}
            found = [each for each in self.begun if each.process.alive() and each.process.pid not in inside]
            if not found:
                raise NoTargetProcess("no spare is left")
            return [self._victim(found[0])]
        raise NoTargetProcess(f"nobody is called {name!r} in a job of sessions")

    def join(self) -> None:
        self.job.add()
        self._see_new()

    def over(self, timeout: float) -> bool:
        self.view()
        try:
            over = self.job.over(timeout)
        except RegisterAway:
            over = False
        lost = self._note_ends()
        if self._replace and not over:
            for _ in [each for each in lost if each.how != EXITED_WELL]:
                self.join()
        return over

    def results(self) -> Results:
        view = self.job.newest_view()
        try:
            values = self.job.results(timeout=END_SECONDS)
        except Exception as error:
            return Results(errors=(f"{type(error).__name__}: {error}",), ranks=0)
        ranks = len(view.members) if view is not None else 0
        return Results({f"rank {rank}": value for rank, value in enumerate(values)}, ranks=ranks)

    def close(self) -> None:
        self._undo.close()

    def _see_new(self) -> None:
        for number in range(len(self.begun), len(self.job.processes)):
            process = self.job.processes[number]
            self.begun.append(RunProcess(process.name, "rank", process, time.monotonic()))

    def _member(self, view: View | None, rank: int) -> Victim:
        assert view is not None
        member = view.members[rank]
        process = self.job.process_of(member.peer.pid)
        if process is None:
            raise NoTargetProcess(f"rank {rank} is process {member.peer.pid}, which is not of this job")
        return Victim(member.id, process, rank)

    def _victim(self, begun: RunProcess) -> Victim:
        view = self.view()
        for rank, member in enumerate(() if view is None else view.members):
            if member.peer.pid == begun.process.pid:
                return Victim(member.id, begun.process, rank)
        return Victim(begun.name, begun.process)


class StoreProcesses(DrivenProcessSet):
    """A publisher, holders and readers around one store. A process that dies is started anew."""

    def __init__(self, scenario: Scenario, spec: StoreWorkload, directory: Path, register: str | None = None) -> None:
        super().__init__()
        self._spec = spec
        self._contract = LocalContract.create("store", directory, scenario.job.backend, 1, register)
        self.directory, self.events_directory = directory, self._contract.events_directory
        self._count: dict[str, int] = {}
        self._values: dict[str, Any] = {}
        self._errors: list[str] = []
        self._stopping = False
        try:
            for role, count in (("holder", spec.holders), ("reader", spec.readers), ("publisher", 1)):
                for _ in range(count):
                    self._start(role)
        except BaseException:
            self.close()
            raise

    @property
    def register_url(self) -> str:
        return self._contract.register_url

    def find(self, name: int | str) -> list[Victim]:
        if name == "newest holder":
            return self._newest_holder()
        for each in self.begun:
            if each.role == name and each.process.alive() and each.name not in self._values:
                return [self._victim(each)]
        raise NoTargetProcess(f"no {name} is alive")

    def over(self, timeout: float) -> bool:
        time.sleep(timeout)
        for each in self._note_ends():
            self._take(each)
            if not self._stopping and each.name not in self._values and each.how != EXITED_WELL:
                self._start(each.role)
        if not self._stopping and self._done():
            self._stopping = True
            for each in self.begun:
                if each.process.alive():
                    with contextlib.suppress(EOFError, TimeoutError):
                        each.forked.channel.send(Stop(), timeout=1.0)
        return self._stopping and not any(each.process.alive() for each in self.begun)

    def results(self) -> Results:
        return Results(dict(self._values), tuple(self._errors), self._spec.holders)

    def close(self) -> None:
        for each in self.begun:
            each.process.kill()
        for each in self.begun:
            each.process.close()

    def _newest_holder(self) -> list[Victim]:
        """A holder that has the newest version."""
        from holdfast.store import WeightStore

        with WeightStore(self.register_url, hold=False, replicas=self._spec.replicas) as store:
            pids = [holder.pid for holder in store.holders("latest")]
        for each in self.begun:
            if each.role == "holder" and each.process.pid in pids and each.process.alive():
                return [self._victim(each)]
        raise NoTargetProcess("no holder has the newest version")

    def _start(self, role: str) -> None:
        from holdfast.harness.chaos.workloads.store import target_of

        number = self._count.get(role, 0)
        self._count[role] = number + 1
        name = f"{role}-{number}"
        process = zygote().spawn(
            target_of(role, self._spec, name),
            name=name,
            output=self.directory / f"{name}.log",
            environ=self._contract.environ(),
        )
        self.begun.append(RunProcess(name, role, process, time.monotonic()))

    def _take(self, each: RunProcess) -> None:
        """Take the message that a process sent before it ended."""
        try:
            value = each.forked.channel.recv(1.0)
        except (EOFError, TimeoutError):
            return
        if "error" in value:
            self._errors.append(f"{each.name}: {value['error']}")
        self._values[each.name] = value

    def _done(self) -> bool:
        """Whether the publisher and the readers are done, as their logs say, or a process has failed."""
        if self._errors:
            return True
        waiting = {"publisher": "finished", "reader": "read"}
        for each in self.begun:
            if each.role in waiting and each.process.alive():
                log = self.events_directory / f"{each.name}.jsonl"
                if f'"kind":"{waiting[each.role]}"'.encode() not in (log.read_bytes()[-600:] if log.exists() else b""):
                    return False
        return True
