"""The processes of a job of sessions: started, found by rank, and ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.ft import Timeouts
from holdfast.ft.console.units import counted
from holdfast.ft.membership.view import View
from holdfast.ft.registers import RegisterAway
from holdfast.harness.chaos.faults.disk import small_disk
from holdfast.harness.chaos.run.process_set import (
    EXITED_WELL,
    NoTargetProcess,
    ProcessSet,
    Results,
    RunProcess,
    Victim,
)
from holdfast.harness.chaos.scenario.scenario import Scenario
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.local_cluster import LocalCluster

END_SECONDS = 10.0


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


class SessionProcesses(ProcessSet):
    """A job of `LocalCluster`, each process of which runs `body(session, *args)`."""

    def __init__(
        self,
        scenario: Scenario,
        body: Callable[..., Any],
        args: Sequence[Any],
        prelude: Sequence[Step],
        register: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        spec = scenario.job
        steps = [*prelude]
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
