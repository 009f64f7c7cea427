"""One run: starts the processes, injects and heals each fault at its moment, and waits for the end.

A process that reaches a point of the protocol where a fault may wait asks the `PointGate` over a Unix socket by its
`GateAgent` (`holdfast.ft.faultpoints`), and waits there until the harness has acted.

"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.files import bind_unix
from holdfast.ft.console.units import coarse_seconds
from holdfast.ft.event_lines import merge
from holdfast.ft.events import (
    FaultHealed,
    FaultInjected,
    JoinRequested,
    ProcessDied,
    ProcessStopped,
    SpareWaits,
    SpareWelcomed,
    StepBegun,
    StepCommitted,
    stamped,
)
from holdfast.ft.faultpoints import Arrival, GateAddress, PointFilter
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.ft.processes.zygote_start import OPTIMIZERS
from holdfast.ft.telemetry.event_log import EventDescriber, EventLog
from holdfast.harness import training
from holdfast.harness.chaos.fault_type import Undo
from holdfast.harness.chaos.run.fault_context import FaultContext, serve
from holdfast.harness.chaos.run.process_set import ProcessSet, Results, RunProcess
from holdfast.harness.chaos.run.session_processes import SessionProcesses
from holdfast.harness.chaos.run.store_processes import StoreProcesses
from holdfast.harness.chaos.run.training_processes import ActorHosts, TrainingProcesses, TrainingRecord
from holdfast.harness.chaos.scenario import Planned, Scenario, Trigger
from holdfast.harness.chaos.workload import Ddp, ReinforcementLearning, StoreWorkload
from holdfast.harness.cluster.job import standing_by
from holdfast.harness.cluster.rank_worker import Prepare
from holdfast.harness.invariants import Event
from holdfast.harness.links.client import Links
from holdfast.harness.links.policy import LinkTraffic
from holdfast.harness.report.model import FaultRecord, RecoveryStage
from holdfast.harness.testbed.netns import Network
from holdfast.rl.run.telemetry import Observer

LATE_STEPS = 5
"""So many steps after the step that a fault waits for, processes stop until the fault is injected."""

_COMMIT, _FINISH = "commit.before_prepare", "finish.before_propose"


def fits(arrival: Arrival, when: Trigger) -> bool:
    """Whether a trigger waits for this arrival, or lets the job go no further before its moment."""
    return any(each.fits(arrival) for each in _point_filters(when))


def gate_address(path: Path, triggers: Sequence[Trigger]) -> GateAddress:
    """The address of a gate, for processes that may be at the points of `triggers`."""
    return GateAddress(str(path), tuple(dict.fromkeys(each for when in triggers for each in _point_filters(when))))


def _point_filters(when: Trigger) -> tuple[PointFilter, ...]:
    if when.step is not None:
        # a job that ends before the step reaches no moment of this fault: its end is no substitute
        return PointFilter(_COMMIT, step=when.step + LATE_STEPS), PointFilter(_FINISH, since=when.step + 1)
    if when.point is not None:
        return (PointFilter(when.point, when.in_step, when.rank, when.epoch, when.since),)
    return ()


@dataclass(frozen=True, slots=True)
class WaitingProcess:
    """A process that waits at a point until `release`."""

    arrival: Arrival
    line: socket.socket

    def release(self) -> None:
        """Let the process go on. Does nothing if it is dead."""
        try:
            self.line.send(b"!")
        except OSError:
            return


class PointGate:
    """The harness's side: agents connect to its socket `path`. A context manager, for one thread."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "gate"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        bind_unix(self._door, self.path)
        self._door.listen(64)
        self._lines: dict[int, socket.socket] = {}

    def filenos(self) -> list[int]:
        """Descriptors that become readable when there is something to `take`."""
        return [self._door.fileno(), *self._lines]

    def take(self) -> list[WaitingProcess]:
        """The processes that have come to a point since the last call."""
        self._admit()
        found = []
        for number, line in list(self._lines.items()):
            try:
                data = line.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._lines.pop(number).close()
                continue
            found.append(WaitingProcess(msgspec.json.decode(data, type=Arrival), line))
        return found

    def _admit(self) -> None:
        while True:
            try:
                line, _ = self._door.accept()
            except BlockingIOError:
                return
            line.setblocking(False)
            self._lines[line.fileno()] = line

    def close(self) -> None:
        """Let all processes go on. Idempotent."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._door.close()

    def __enter__(self) -> PointGate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The run --------------------------------------------------------------------------------------------------------------


LOOK_SECONDS = 0.01
START_SECONDS = 0.5
"""How much time before the first step belongs to a run: before that the processes only import."""
FOR_DDP = (OPTIMIZERS, "holdfast.comms.torchdist.process_group")
PRELOAD = ("holdfast.harness.chaos.run.session_processes",)


@dataclass(frozen=True, slots=True)
class RunCallbacks:
    """What is called while a run lasts.

    `watch`: a few times a second, with the `phase` of the scenario, the number of committed steps and of all steps.
    `observe`: with the events of a run of reinforcement learning with faults. `narrate`: with a line for each fault
    that is injected, and for each event of the recoveries (not `is_fault`).
    """

    phase: str = ""
    watch: Callable[[str, int, int], None] = lambda phase, done, total: None
    observe: Observer = lambda event: None
    narrate: Callable[[str, bool], None] = lambda text, is_fault: None


QUIET = RunCallbacks()
"""Nobody watches."""


@dataclass(slots=True)
class RunFault:
    """A fault of the schedule while the run lasts, with times on `time.monotonic()`; `record` is what remains of it."""

    planned: Planned
    time: float | None = None
    healed: float | None = None
    injected: tuple[FaultInjected, ...] = ()
    """Its events: one for each victim, or one without a target."""
    victims: tuple[str, ...] = ()
    """The processes that it hit, for people."""
    step: int = -1
    refused: str = ""
    undo: Undo | None = None
    unhealed: str = ""
    """Why it could not be undone when it was over: it lasted on."""

    @property
    def waits(self) -> bool:
        """Whether the fault is neither injected nor refused yet."""
        return self.time is None and not self.refused

    def record(self, began: float, stages: tuple[RecoveryStage, ...]) -> FaultRecord:
        """The fault, in seconds since the run `began`, with the stages of the recovery from it."""
        healed, lasted = None, ""
        if self.healed is not None and self.time is not None:
            healed, lasted = self.healed - began, f"; it lasted {coarse_seconds(self.healed - self.time)}"
        return FaultRecord(
            words=self.planned.what.words(),
            victims=self.victims,
            time=None if self.time is None else self.time - began,
            step=self.step,
            stages=stages,
            number=self.planned.number,
            type=self.planned.type,
            when=self.planned.when.words(),
            healed=healed,
            refused=self.refused,
            note=f"Planned: {self.planned.when.words()}{lasted}.",
        )


@dataclass(slots=True)
class RawRun:
    """The raw data of a run, with times on `time.monotonic()`."""

    began: float
    ended: float = 0.0
    started: float = 0.0
    events: list[Event] = field(default_factory=list)
    jobs: list[list[Event]] = field(default_factory=list)
    """The events once more, of each job for itself."""
    ops: list[list[Event]] = field(default_factory=list)
    """The last ops of each process, of each job for itself."""
    training: TrainingRecord | None = None
    faults: list[RunFault] = field(default_factory=list)
    lives: list[RunProcess] = field(default_factory=list)
    results: Results = field(default_factory=Results)
    traffic: tuple[LinkTraffic, ...] = ()
    output: str = ""
    too_long: bool = False


class ScenarioRun:
    """One run of a scenario with the faults in `planned`.

    For workloads of sessions each rank runs `body(session, *args)`.
    """

    def __init__(
        self,
        scenario: Scenario,
        planned: Sequence[Planned],
        directory: Path,
        *,
        body: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        steps: int | None = None,
        seed: int = 0,
        callbacks: RunCallbacks = QUIET,
    ) -> None:
        self._scenario, self._directory, self._body, self._args = scenario, directory, body, tuple(args)
        self._steps, self._seed, self._callbacks = steps or 0, seed, callbacks
        self._describers: dict[str, EventDescriber] = {}
        self._raw = RawRun(time.monotonic(), faults=[RunFault(each) for each in planned])
        self._newest_step = -1
        self._addresses: set[str] = set()
        self._complete = scenario.workload.family != "session" or scenario.job.spares == 0
        self._standby: list[Event] = []
        self._waiting: list[WaitingProcess] = []

    def run(self) -> RawRun:
        """Do the whole run; leaves no process behind. Raises the errors of starting processes."""
        scenario, raw = self._scenario, self._raw
        if scenario.workload.family == "rl":
            zygote_with(*training.PRELOAD, training.DRIVER)
        else:
            zygote_with(*PRELOAD, *(FOR_DDP if isinstance(scenario.workload, Ddp) else ()))
        with contextlib.ExitStack() as undo:
            gate = undo.enter_context(PointGate(self._directory))
            links = undo.enter_context(Links(self._seed)) if scenario.job.links else None
            serving = serve(scenario.job, self._directory)
            server = None if serving is None else undo.enter_context(serving)
            register = None if server is None else server.url
            processes, network = self._process_set(undo, self._gate_environ(gate), links, register)
            undo.callback(processes.close)
            log = undo.enter_context(contextlib.closing(EventLog("chaos", processes.events_directory)))
            self._links, self._context = links, FaultContext(processes, links, network, log, time.monotonic, server)
            self._log = log
            try:
                self._loop(processes, gate)
            finally:
                self._mend(float("inf"))
            raw.ended = time.monotonic()
            raw.began = max(raw.began, raw.started - START_SECONDS)
            raw.results = processes.results() if not raw.too_long else Results(errors=("it did not end in time",))
            raw.traffic = links.traffic() if links is not None else ()
            fates = _fates(raw.faults)
            raw.jobs = [merge([events, _within(events, fates)]) for events in processes.jobs()]
            raw.events, raw.ops = merge(raw.jobs), processes.ops()
            if isinstance(processes, TrainingProcesses):
                raw.training = processes.record()
            raw.output = processes.outputs()
            raw.lives = [replace(each) for each in processes.begun]
        return raw

    def _gate_environ(self, gate: PointGate) -> dict[str, str]:
        """The variables by which processes ask at the points where a fault may wait for them."""
        triggers = tuple(each.planned.when for each in self._raw.faults if each.planned.when.seconds is None)
        return gate_address(gate.path, triggers).environ() if triggers else {}

    def _process_set(
        self, undo: contextlib.ExitStack, environ: Mapping[str, str], links: Links | None, register: str | None
    ) -> tuple[ProcessSet, Network | None]:
        """Start the processes; also returns the network of their hosts, if they are on hosts of their own."""
        scenario, count, workload = self._scenario, self._scenario.own_hosts, self._scenario.workload
        if count:
            self._folder("hosts")
        if isinstance(workload, ReinforcementLearning):
            hosts = None
            if count:
                hosts = undo.enter_context(ActorHosts(count, self._directory / "hosts", environ))
            self._raw.began = time.monotonic()
            observe = self._callbacks.observe if self._raw.faults else lambda event: None
            training = TrainingProcesses(workload.config, self._folder("training"), environ, observe, hosts)
            return training, None if hosts is None else hosts.network
        network = undo.enter_context(Network(count)) if count else None
        self._raw.began = time.monotonic()
        if isinstance(workload, StoreWorkload):
            return StoreProcesses(scenario, workload, self._folder("store"), register), network
        assert self._body is not None
        prepare: list[Prepare] = [] if network is None else [network.claim(self._directory / "hosts")]
        prepare += [] if links is None else [links.prepare()]
        return SessionProcesses(scenario, self._body, self._args, prepare, register, environ), network

    def _folder(self, name: str) -> Path:
        folder = self._directory / name
        folder.mkdir(mode=0o700)
        return folder

    def _loop(self, processes: ProcessSet, gate: PointGate) -> None:
        deadline = time.monotonic() + self._scenario.limit
        while not processes.over(0.0 if isinstance(processes, SessionProcesses) else LOOK_SECONDS):
            now = time.monotonic()
            if now > deadline:
                self._raw.too_long = True
                return
            self._look(processes)
            self._waiting += gate.take()
            if self._ready():
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    self._arrived(each, processes)
                self._inject_due(now)
            self._mend(now)
            poller = select.poll()
            for fd in gate.filenos():
                poller.register(fd, select.POLLIN)
            poller.poll(LOOK_SECONDS * 1000)

    def _look(self, processes: ProcessSet) -> None:
        """Read what the processes have logged since the last call."""
        new = processes.new_events()
        for event in new:
            if isinstance(event, StepCommitted):
                self._newest_step = max(self._newest_step, event.step)
            elif isinstance(event, JoinRequested):
                self._addresses.add(event.address)
            elif isinstance(event, SpareWaits | SpareWelcomed) and not self._complete:
                self._standby.append(event)
            if not self._raw.started and isinstance(event, StepBegun | StepCommitted):
                self._raw.started = event.time
            self._describe(event)
        if self._links is not None:
            self._links.control_endpoints(self._addresses)
        if new:
            self._callbacks.watch(self._callbacks.phase, self._newest_step + 1, self._steps)

    def _describe(self, event: Event) -> None:
        """Narrate what a job logs at INFO, from the first fault on."""
        describer = self._describers.setdefault(event.process, EventDescriber(event.process))
        level = describer.level(event)
        if level >= logging.INFO and any(fault.time is not None for fault in self._raw.faults):
            self._callbacks.narrate(describer.line(event), False)

    def _ready(self) -> bool:
        """Whether all spares stand by. Faults wait for this, so that equal seeds break equal jobs."""
        if not self._complete:
            self._complete = len(standing_by(self._standby)) >= self._scenario.job.spares
        return self._complete

    def _arrived(self, waiting: WaitingProcess, processes: ProcessSet) -> None:
        """Handle a process at a point: inject the faults that wait for it and those overdue, then release it."""
        try:
            for fault in self._raw.faults:
                if not fault.waits or not fits(waiting.arrival, fault.planned.when):
                    continue
                at_point = fault.planned.when.point is not None
                self._context.reached = processes.of_pid(waiting.arrival.pid) if at_point else None
                self._inject(fault, waiting.arrival.step if at_point else -1)
                if at_point:
                    break
        finally:
            self._context.reached = None
            waiting.release()

    def _inject_due(self, now: float) -> None:
        for fault in self._raw.faults:
            when = fault.planned.when
            if not fault.waits:
                continue
            due_step = when.step is not None and self._newest_step >= when.step
            due_time = when.seconds is not None and self._raw.started and now - self._raw.started >= when.seconds
            if due_step or due_time:
                self._inject(fault)

    def _inject(self, fault: RunFault, step: int = -1) -> None:
        """Inject a fault now, in `step`; -1: in the step after the newest one that was logged as committed."""
        self._context.number, before = fault.planned.number, len(self._context.injected)
        self._context.victims.clear()
        fault.step = self._newest_step + 1 if step < 0 else step
        try:
            fault.undo = fault.planned.what.inject(self._context)
        except HoldfastError as error:
            fault.refused = str(error)
            return
        fault.injected, fault.victims = tuple(self._context.injected[before:]), tuple(self._context.victims)
        fault.time = fault.injected[0].time if fault.injected else time.monotonic()
        self._callbacks.narrate(
            f"{fault.planned.what.summary} {', '.join(fault.victims)} ({fault.planned.when.words()})", True
        )

    def _mend(self, now: float) -> None:
        """Undo the faults that have lasted long enough; all of them if `now` is infinite."""
        for fault in self._raw.faults:
            lasts = fault.planned.lasts
            if fault.undo is None or fault.time is None:
                continue
            at_the_end = now == float("inf")
            if at_the_end or (lasts is not None and now - fault.time >= lasts):
                undo, fault.undo = fault.undo, None
                try:
                    undo()
                except HoldfastError as error:
                    if not at_the_end:
                        fault.unhealed = str(error)
                else:
                    if not at_the_end:
                        fault.healed = time.monotonic()
                        self._log.emit(FaultHealed(number=fault.planned.number))


KILLED = ("kill", "host-lost")
"""The notes of faults whose victims are dead from then on."""

FOR_GOOD = 1e6
"""Seconds reported for a pause without an end."""


def _within(events: Sequence[Event], fates: Sequence[Event]) -> list[Event]:
    """The events of `fates` that belong to a job, by the processes that its events name."""
    mine = {event.process for event in events} | {event.target for event in events if isinstance(event, FaultInjected)}
    return [each for each in fates if each.process in mine]


def _fates(faults: Sequence[RunFault]) -> list[Event]:
    """Events of the killed and paused processes, which log nothing themselves: checkers need them."""
    found: list[Event] = []
    for fault in faults:
        for each in fault.injected:
            if each.target is UNSET or each.target_pid is UNSET:
                continue
            if each.what in KILLED:
                fate: Event = ProcessDied(why="SIGKILL")
            elif each.what == "pause":
                fate = ProcessStopped(seconds=fault.planned.lasts or FOR_GOOD)
            else:
                continue
            found.append(stamped(fate, each.target, each.target_pid, each.time))
    return found
