"""The workload of the weight store: the bodies of its publisher, holders and readers, and their processes.

Every byte of a version follows from its number, so a reader can check it.

"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.ft import event_lines, events
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import zygote
from holdfast.ft.registers import RegisterAway
from holdfast.ft.telemetry.event_log import CLOSE_SECONDS, EventLog
from holdfast.harness.chaos.run.process_set import (
    EXITED_WELL,
    NoTargetProcess,
    ProcessSet,
    Results,
    RunProcess,
    Victim,
)
from holdfast.harness.chaos.run.session_processes import digest_of
from holdfast.harness.chaos.scenario import Scenario
from holdfast.harness.chaos.workload import FLIP_BIT, STOP, StoreWorkload
from holdfast.store import StoreTimeout, WeightStore

TENSORS = 4
KEEP = 4
NAMES = {"copied": "published", "published": "visible"}
"""Readers may see a version before its publisher returns: checkers need the moment from which on they may."""

RETRY_SECONDS = 0.1
READ_SECONDS = 0.02
PATIENCE = 20.0
"""Seconds that one publish or get may take, with any fault."""


def weights(spec: StoreWorkload, version: int) -> dict[str, torch.Tensor]:
    """All weights of a version."""
    elements = max(1, int(spec.megabytes * 1e6 / 4 / TENSORS))
    base = torch.arange(elements, dtype=torch.float32)
    return {f"layer.{number}": (base * (number + 1) + version).sin_() for number in range(TENSORS)}


def _opened(spec: StoreWorkload, log: EventLog, *, hold: bool) -> WeightStore:
    def observe(kind: str, fields: dict[str, object]) -> None:
        log.emit(event_lines.make_event(NAMES.get(kind, kind), fields))
        if kind == "copied":  # written before a reader can fetch it, and before this process can be killed after that
            log.flush(CLOSE_SECONDS)

    url = os.environ["HOLDFAST_REGISTER"]
    return WeightStore(url, replicas=spec.replicas, hold=hold, keep=KEEP, observe=observe, timeout=PATIENCE)


def publish(channel: ProcessChannel, spec: StoreWorkload, name: str) -> dict[str, Any]:
    """Publish the versions that are missing, up to the last."""
    log = EventLog(name)
    with _opened(spec, log, hold=False) as store:
        first = (_trying(store.latest) or 0) + 1
        log.emit(events.StateReceived(step=first - 2, epoch=1))
        for version in range(first, spec.versions + 1):
            time.sleep(spec.pause)
            _trying(partial(store.publish, version, weights(spec, version)))
            log.emit(events.StepCommitted(step=version - 1, epoch=1))
        log.emit(events.StepsFinished(step=spec.versions - 1))
        channel.recv(600.0)
    log.close()
    return {"role": "publisher", "digest": digest_of(weights(spec, spec.versions))}


def hold(channel: ProcessChannel, spec: StoreWorkload, name: str) -> dict[str, Any]:
    """Keep replicas until told to stop."""
    log = EventLog(name)
    with _opened(spec, log, hold=True) as store:
        log.emit(events.HolderReady())
        while channel.recv(600.0) == FLIP_BIT:
            _spoil(store)
    log.close()
    return {"role": "holder"}


def read(channel: ProcessChannel, spec: StoreWorkload, name: str) -> dict[str, Any]:
    """Fetch the newest version repeatedly, up to the last, and check its bytes."""
    log = EventLog(name)
    reads, newest = 0, 0
    into = {key: torch.empty_like(tensor) for key, tensor in weights(spec, 1).items()}
    with _opened(spec, log, hold=False) as store:
        while newest < spec.versions:
            _trying(partial(store.wait, 1, PATIENCE))
            time.sleep(READ_SECONDS)
            newest = _trying(partial(store.get, "latest", into))
            log.emit(events.VersionFetched(version=newest))
            reads += 1
            wanted = weights(spec, newest)
            if not all(torch.equal(into[key], wanted[key]) for key in wanted):
                log.emit(events.VersionWrong(version=newest))
        log.emit(events.ReadsEnded(reads=reads))
        channel.recv(600.0)
    log.close()
    return {"role": "reader", "digest": digest_of(into), "reads": reads}


def _trying(action: Callable[[], Any]) -> Any:
    """Retry `action` while the register is away. Raises after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return action()
        except RegisterAway:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def _spoil(store: WeightStore) -> None:
    """Flip a bit in each replica of the newest version held here."""
    newest = store.latest()
    for (version, _, _), kept in list(store._replica_holder._kept.items()):
        if version == newest:
            kept.memory[len(kept.memory) // 3] ^= 1


Body = Callable[[ProcessChannel, StoreWorkload, str], dict[str, Any]]
BODIES: dict[str, Body] = {"publisher": publish, "holder": hold, "reader": read}


def target_of(role: str, spec: StoreWorkload, name: str) -> Callable[[ProcessChannel], None]:
    """The target of a process: runs its body, then sends the result, or the failure in words."""

    def target(channel: ProcessChannel) -> None:
        torch.set_num_threads(1)
        try:
            channel.send(BODIES[role](channel, spec, name))
        except (HoldfastError, StoreTimeout, ChannelClosed, TimeoutError) as error:
            channel.send({"role": role, "error": f"{type(error).__name__}: {error}"})

    return target


# Processes ------------------------------------------------------------------------------------------------------------


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
