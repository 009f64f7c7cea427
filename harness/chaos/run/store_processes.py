"""The processes around a weight store: started, found by role, and ended."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness.chaos.run.process_set import (
    EXITED_WELL,
    NoTargetProcess,
    ProcessSet,
    Results,
    RunProcess,
    Victim,
)
from holdfast.harness.chaos.scenario.scenario import Scenario
from holdfast.harness.chaos.scenario.workload import STOP, StoreWorkload


class StoreProcesses(ProcessSet):
    """A publisher, holders and readers around one store. A process that dies is started anew."""

    def __init__(self, scenario: Scenario, spec: StoreWorkload, directory: Path, register: str | None = None) -> None:
        super().__init__()
        self._spec = spec
        self._contract = LocalContract("store", directory, scenario.job.backend, 1, register).made()
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
                        each.forked.channel.send(STOP, timeout=1.0)
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
