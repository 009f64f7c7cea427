"""The processes of a run of reinforcement learning: its driver, which starts all others, and is resumed if it dies."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.comms.transport.liveness import is_stopped
from holdfast.ft import events
from holdfast.ft.console.output import tail
from holdfast.ft.event_lines import EventTail, read_events, refuse
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import ForkedProcess, inherit_zygote, zygote
from holdfast.harness.chaos.run.process_set import (
    ENDED_WITH_DRIVER,
    EXITED_WELL,
    NoTargetProcess,
    ProcessSet,
    Results,
    RunProcess,
    Victim,
    recorded_ops,
)
from holdfast.harness.invariants import Event
from holdfast.harness.measure.workers import HeldProcess
from holdfast.harness.testbed.netns import EnterNamespace, Network
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Group
from holdfast.rl.run import run_events
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.telemetry import Observer

START_SECONDS = 120.0
PORT = 26600
DRIVER = 0
"""The host of the driver."""


class ActorHosts:
    """`count` hosts, with their files in the empty folder `folder`. A context manager.

    `environ` is added to the environment of all processes on them. Raises `Unsupported` without root or pyroute2,
    `HoldfastError` without etcd or if a host does not start.
    """

    def __init__(self, count: int, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self._folder, self._environ = folder, dict(environ or {})
        self.network = Network(count)
        hosts = self.network.addresses
        self.addresses = tuple(f"tcp://{each}:{PORT}" for each in hosts)
        self._undo = contextlib.ExitStack()
        self._started: list[ForkedProcess] = []

    def __enter__(self) -> ActorHosts:
        with contextlib.ExitStack() as undo:
            network = undo.enter_context(self.network)
            numbers = range(len(network.addresses))
            entries = [network.entry(number) for number in numbers]
            from holdfast.harness.testbed.etcd import EtcdCluster  # needs etcd3gw

            etcd = EtcdCluster(len(numbers), self._folder / "etcd", host=network.addresses, enter=entries)
            self.register = f"{undo.enter_context(etcd).url}/run"
            undo.callback(self._end)
            for number in numbers:
                self._started.append(self._start(number))
            for number in numbers:
                self._await(number)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _start(self, number: int) -> ForkedProcess:
        name, temporary = f"host-{number}", self._folder / f"tmp-{number}"
        temporary.mkdir(mode=0o700)
        serve = partial(_serve, self.network.entry(number), self.addresses[number])
        output = self._folder / f"{name}.log"
        return zygote().spawn(serve, name=name, output=output, environ={**self._environ, "TMPDIR": str(temporary)})

    def _await(self, number: int) -> None:
        process = self._started[number]
        try:
            process.channel.recv(START_SECONDS)
        except (ChannelClosed, EOFError, TimeoutError) as error:
            why = "did not start in time" if process.alive() else process.epitaph()
            raise HoldfastError(f"host {number} of the run is not there: {why}") from error

    def _end(self) -> None:
        for each in self._started:
            each.kill()
        for each in self._started:
            each.close()
        for number in range(len(self.addresses)):
            self.network.lose(number)


def _serve(entry: EnterNamespace, address: str, channel: ProcessChannel) -> None:
    """The body of a host's process: Monarch's host, until it is killed."""
    entry()
    tempfile.tempdir = None  # the zygote may have asked for it before this process had its environment
    inherit_zygote()
    from holdfast.rl.actors.monarch_host import main

    main(address, channel.send)


DRIVERS = 6
"""The most drivers of a run: one that dies so often is no better when it is resumed."""

GONE_SECONDS = 10.0
"""Seconds in which all processes of a run must be gone after its driver."""


@dataclass(slots=True)
class DriverLife:
    """A driver, and the events that it wrote. `zero` is the run's time 0 on `time.monotonic()`."""

    started: RunProcess
    zero: float = 0.0
    events: list[run_events.Event] = field(default_factory=list)


class TrainingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run wrote, with times on `time.monotonic()`: the events of each driver, and the episodes.

    `left` are the processes that were there after the last driver had ended.
    """

    config: RunConfig
    drivers: tuple[tuple[run_events.Event, ...], ...]
    groups: tuple[Group, ...]
    left: tuple[str, ...]


class TrainingProcesses(ProcessSet):
    """A driver in a process of its own, in the empty folder `directory`, and all that it starts.

    `observe` is called with each event of the run. With `hosts` the driver is on the first of them.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        environ: Mapping[str, str],
        observe: Observer = lambda event: None,
        hosts: ActorHosts | None = None,
    ) -> None:
        super().__init__()
        self._observe = observe
        self._enter: Callable[[], None] | None = None
        if hosts is not None:
            engine = msgspec.structs.replace(config.engine, hosts=hosts.addresses, register=hosts.register)
            config = msgspec.structs.replace(config, engine=engine)
            self._enter = hosts.network.entry(DRIVER)
            environ = {**environ, "HOLDFAST_INTERFACE": hosts.network.addresses[DRIVER]}
        self._config, self.directory, self.events_directory = config, directory, directory / "events"
        self._temporary = directory / "tmp"
        for folder in (self.events_directory, self._temporary):
            folder.mkdir(mode=0o700)
        self._environ = {**environ, "TMPDIR": str(self._temporary)}
        self._run = RunDirectory(directory / "run")
        self._tail = RunEventTail(self._run.events_file)
        self._logs: list[EventTail] = []
        self._drivers: list[DriverLife] = []
        self._named: dict[str, RunProcess] = {}
        self._foreign: list[HeldProcess] = []
        self._identities: dict[int, str] = {}
        self._digest, self._errors, self._left = "", list[str](), tuple[str, ...]()
        self._start_driver()

    # -- what a fault acts on

    @property
    def register_url(self) -> str:
        raise NotImplementedError("each driver has a register of its own")

    def find(self, name: int | str) -> list[Victim]:
        self._refresh()
        alive = [each for each in self.begun if each.process.alive() and not is_stopped(each.process.pid)]
        if name in ("trainer", "spare"):
            trainers = [each for each in alive if each.role == "trainer"]
            found = [each for each in trainers if (each.process.pid in self._identities) == (name == "trainer")]
        else:
            found = [each for each in alive if each.role == name]
        if not found:
            raise NoTargetProcess(f"no {name} is alive")
        return [self._victim(found[0])]

    def of_pid(self, pid: int) -> Victim | None:
        self._refresh()
        known = super().of_pid(pid)
        return known or Victim(f"process {pid}", self._opened(f"process {pid}", pid))

    def _victim(self, begun: RunProcess) -> Victim:
        return Victim(self._identities.get(begun.process.pid, begun.name), begun.process, label=begun.name)

    # -- the run

    def over(self, timeout: float) -> bool:
        self._refresh()
        driver = self._drivers[-1].started
        if driver.process.alive():
            return False
        self._note_ends()
        try:
            said = driver.forked.channel.recv(1.0)
        except (EOFError, TimeoutError):
            said = {}
        if driver.forked.wait(5.0).signal is not None and not said and len(self._drivers) < DRIVERS:
            self._left += self._until_gone()
            self._say_how(ENDED_WITH_DRIVER)
            self._start_driver()
            return False
        self._digest = said.get("digest", "")
        if not self._digest:
            self._errors.append(f"{driver.name}: {said.get('error') or driver.forked.epitaph()}")
        self._left += self._until_gone()
        self._refresh()
        self._say_how(EXITED_WELL if self._digest else ENDED_WITH_DRIVER)
        return True

    def results(self) -> Results:
        trained = [each for each in self._drivers[-1].events if isinstance(each, run_events.StepTrained)]
        values = {"trainers": {"digest": self._digest}} if self._digest else {}
        return Results(values, tuple(self._errors), trained[-1].size if trained else 0)

    def close(self) -> None:
        for each in self._drivers:
            each.started.forked.close()
        self._until_gone()
        for process in self._foreign:
            process.kill()
            process.close()

    def new_events(self) -> list[Event]:
        self._refresh()
        if self._run.sessions.exists():
            for number in range(len(self._logs), len(list(self._run.sessions.iterdir()))):
                self._logs.append(EventTail(self._run.sessions / str(number), refuse))
        new = [event for log in self._logs for event in log.new()]
        for event in new:
            if isinstance(event, events.StepBegun):
                self._identities[event.pid] = event.process
        return self._updates(new)

    def jobs(self) -> list[list[Event]]:
        """The events of each driver's trainers up to its death, and of all of its time what befell other processes.

        A driver's death ends its trainers too, so what they say then is no recovery.
        """
        faults = read_events(self.events_directory, refuse)
        ends = [each.started.born for each in self._drivers[1:]] + [float("inf")]
        found = []
        for number, (driver, end) in enumerate(zip(self._drivers, ends, strict=True)):
            mine = [each for each in faults if driver.started.born <= each.time < end]
            pid = driver.started.process.pid
            death = min(
                (each.time for each in mine if isinstance(each, events.FaultInjected) and each.target_pid == pid),
                default=float("inf"),
            )
            logged = self._updates(read_events(self._run.sessions / str(number), refuse))
            mine += [each for each in logged if each.time < death]
            mine += [event for each in driver.events for event in _fate(each, driver.zero, number)]
            if death < end:
                ended = max(death, driver.started.ended)
                mine.append(events.stamped(events.RoleLost(role="driver"), driver.started.name, pid, ended))
            found.append(sorted(mine, key=lambda event: event.time))
        return found

    def ops(self) -> list[list[Event]]:
        return [recorded_ops(self._run.sessions / str(number)) for number in range(len(self._drivers))]

    def record(self) -> TrainingRecord:
        """What the run wrote, once it is over."""
        self._refresh()
        return TrainingRecord(
            config=self._config,
            drivers=tuple(
                tuple(_placed(event, driver.zero, number) for event in driver.events)
                for number, driver in enumerate(self._drivers)
            ),
            groups=tuple(self._run.groups()),
            left=self._left,
        )

    def outputs(self) -> str:
        files = sorted(self._run.path.glob("output/*.log"))
        printed = [f"[{file.stem}] {text}" for file in files if (text := tail(file, 2000))]
        return "\n".join([super().outputs(), *printed])

    # -- parts

    def _start_driver(self) -> None:
        from holdfast.harness.training.driver import driver_of  # needs the extra rl; a list of scenarios does not

        name = _numbered("driver", len(self._drivers))
        process = zygote().spawn(
            driver_of(self._config, self._run.path, self._enter),
            name=name,
            output=self.directory / f"driver-{len(self._drivers)}.log",
            environ=self._environ,
        )
        started = RunProcess(name, "driver", process, time.monotonic())
        self.begun.append(started)
        self._drivers.append(DriverLife(started))

    def _refresh(self) -> None:
        """Read the events that the driver has written since the last call."""
        for event in self._tail.new():
            self._hear(event)
        self._note_ends()

    def _hear(self, event: run_events.Event) -> None:
        if isinstance(event, run_events.ProcessStarted) and event.role == "driver":
            driver = next(each for each in self._drivers if each.started.process.pid == event.pid)
            driver.zero = event.clock - event.time
            self._named.clear()
        driver = self._drivers[-1]
        if isinstance(event, run_events.ProcessStarted) and event.role != "driver":
            name = _numbered(event.name, len(self._drivers) - 1)
            started = RunProcess(name, event.role, self._opened(name, event.pid), driver.zero + event.time)
            self._named[event.name] = started
            self.begun.append(started)
        elif isinstance(event, run_events.ProcessLost) and event.name in self._named:
            lost = self._named[event.name]
            lost.ended, lost.how = lost.ended or driver.zero + event.time, event.how
        driver.events.append(event)
        self._observe(event)

    def _opened(self, name: str, pid: int) -> HeldProcess:
        process = HeldProcess(name, pid)
        self._foreign.append(process)
        return process

    def _say_how(self, how: str) -> None:
        """Say of the processes that have ended, and of which nothing is known, how they did."""
        self._note_ends()
        for each in self.begun:
            if each.ended and not each.how:
                each.how = how

    def _updates(self, logged: Sequence[Event]) -> list[Event]:
        """The events without those of the attempt after the last update, which publishes the last weights."""
        return [each for each in logged if getattr(each, "step", -1) < self._config.steps]

    def _until_gone(self) -> tuple[str, ...]:
        """Wait until all processes of the run are gone; returns those that are not."""
        deadline = time.monotonic() + GONE_SECONDS
        while True:
            left = {each.pid: each.name for each in self._foreign if each.alive()}
            left |= {pid: left.get(pid, "a process") for pid in _processes_of(self.directory)}
            if not left or time.monotonic() > deadline:
                return tuple(f"{name} (pid {pid})" for pid, name in left.items())
            time.sleep(0.02)


def _fate(event: run_events.Event, zero: float, driver: int) -> Iterator[Event]:
    """What became of a process, as measures read it; what becomes of trainers their session says."""
    time = zero + event.time
    match event:
        case run_events.ProcessLost() if event.role != "trainer":
            yield events.stamped(events.RoleLost(role=event.role), _numbered(event.name, driver), event.pid, time)
        case run_events.ProcessStarted() if event.replaces and event.role != "trainer":
            yield events.stamped(events.RoleReplaced(role=event.role), _numbered(event.name, driver), event.pid, time)
        case run_events.RunResumed():
            yield events.stamped(events.RoleReplaced(role="driver"), _numbered("driver", driver), 0, time)


def _numbered(name: str, driver: int) -> str:
    """A process's name, unique in a run of several drivers."""
    return f"{name}/{driver + 1}" if driver else name


def _placed(event: run_events.Event, zero: float, driver: int) -> run_events.Event:
    """An event on `time.monotonic()`, with unique names of processes."""
    changed: dict[str, object] = {"time": event.time + zero}
    for name in ("name", "process", "replaces", "lost"):
        if value := getattr(event, name, ""):
            changed[name] = _numbered(value, driver)
    return msgspec.structs.replace(event, **changed)


def _processes_of(directory: Path) -> list[int]:
    """The living processes that write to files in a directory, or were started to keep temporary files there."""
    mark, inside = f"TMPDIR={directory}/".encode(), f"{directory}/"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            given = (folder / "environ").read_bytes().split(b"\0")
            output = str((folder / "fd" / "1").readlink())
            if output.startswith(inside) or any(each.startswith(mark) for each in given):
                found.append(int(folder.name))
    return found


_decode = msgspec.json.Decoder(run_events.Event).decode


class RunEventTail:
    """The events in a file, which need not be there yet, and the read position in it."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0

    def new(self) -> list[run_events.Event]:
        """The events since the last call. An incomplete line is left for later."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(whole) + len(newline)
        return [_decode(line) for line in whole.splitlines()]
