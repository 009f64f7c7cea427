"""One run of the demo: starts the job, injects the faults, shows the run, judges it."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from holdfast.comms.system.keys import load_key
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.harness.demo.display import Display
from holdfast.harness.demo.engine import ZygoteEngine
from holdfast.harness.demo.faults import Faults
from holdfast.harness.demo.plan import DemoPlan
from holdfast.harness.demo.record import DemoRun
from holdfast.harness.demo.recorder import RunRecorder
from holdfast.harness.demo.recovery import injected_faults
from holdfast.harness.demo.spans import spans
from holdfast.harness.demo.tail import LogTail
from holdfast.harness.demo.verdict import judge
from holdfast.harness.invariants import Event, examine, read_directory
from holdfast.rl.crew import Site
from holdfast.rl.driver import TrainingDriver
from holdfast.rl.happenings import Happening
from holdfast.store import WeightStore

JOB = "demo"
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The files and the engine of a run; `setup_seconds` is the time to make them."""

    contract: LocalContract
    engine: ZygoteEngine
    setup_seconds: float

    @staticmethod
    def prepare(plan: DemoPlan, directory: Path, began: float) -> RunSetup:
        """Make the files in the empty, owner-only `directory`, and import the modules that workers need.

        `began` is when the user began to wait, on `time.monotonic()`.
        """
        contract = LocalContract.create(JOB, directory, plan.backend, plan.crew.trainers)
        logs = directory / "output"
        logs.mkdir(mode=0o700)
        engine = ZygoteEngine(logs, contract.environ())
        engine.warm_up()
        return RunSetup(contract, engine, time.monotonic() - began)


class DemoRunner:
    """A run of `plan` on the files and engine of `setup`, shown by `display`."""

    def __init__(self, plan: DemoPlan, setup: RunSetup, display: Display) -> None:
        self._plan, self._setup, self._display = plan, setup, display
        self._recorder = RunRecorder()
        self._tail = LogTail(setup.contract.events_directory)

    def run(self) -> DemoRun:
        """Run, and return the record; leaves no process behind.

        Raises `RunFailed` and the like if the run did not finish, `KeyboardInterrupt` also on SIGTERM.
        """
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        contract = self._setup.contract
        with (
            WeightStore(contract.register_url, hold=False) as store,
            closing(EventLog("demo", contract.events_directory)) as log,
        ):
            faults = Faults(self._plan, store, log, self._recorder.hear)
            try:
                digest = asyncio.run(self._drive(faults))
            finally:
                self._look()
                self._display.close(self._recorder)
        seconds = time.monotonic() - self._recorder.began
        events = read_directory(contract.events_directory)
        found = tuple(examine(events))
        recorder = self._recorder
        kills = injected_faults(recorder.began, recorder.happenings, events)
        names = {life.pid: life.name for life in recorder.lives.values()}
        return DemoRun(
            backend=self._plan.backend,
            began=began,
            seconds=seconds,
            setup_seconds=self._setup.setup_seconds,
            recipe=self._plan.recipe,
            crew=self._plan.crew,
            steps=tuple(recorder.steps),
            evaluations=tuple(recorder.evaluations),
            lives=tuple(recorder.lives.values()),
            spans=spans(recorder.began, events, names),
            blows=kills,
            notes=tuple(sorted(recorder.notes, key=lambda note: note.time)),
            findings=found,
            outcome=judge(self._plan, recorder, events, found, kills, faults.pending, digest),
        )

    async def _drive(self, faults: Faults) -> str:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

        def audience(happening: Happening) -> None:
            self._recorder.hear(happening)
            faults.hear(happening)

        driver = TrainingDriver(
            self._plan.recipe, self._plan.crew, self._site(), self._setup.engine, audience, faults.pause
        )
        faults.driver = driver
        watching = asyncio.create_task(self._watch())
        try:
            return await driver.run(self._plan.timeout)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            watching.cancel()
            await faults.close()

    def _site(self) -> Site:
        contract, plan = self._setup.contract, self._plan
        return Site(
            address="",
            job=contract.name,
            key=load_key(contract.key_file),
            register=contract.register_url,
            replicas=plan.crew.replicas,
            keep=plan.recipe.lag + 3,
            faults=plan.points,
        )

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self) -> None:
        for event in self._tail.new():
            self._say(event)
        self._display.refresh(self._recorder)

    def _say(self, event: Event) -> None:
        """Log the events of the trainers' sessions that say something new."""
        names = {life.pid: name for name, life in self._recorder.lives.items()}
        who = names.get(event.pid, event.process)
        match event.kind:
            case "detected":
                self._recorder.note(event.time, who, f"has detected a death: {event.text('evidence')}")
            case "installed" if event.integer("rank") == 0:
                text = f"epoch {event.integer('epoch')} of {len(event.names('members'))} ranks"
                self._recorder.note(event.time, who, f"{text}: {event.text('reason')}")
            case "rebuilt":
                text = f"is in epoch {event.integer('epoch')}, rebuilt in {event.number('seconds') * 1e3:.1f} ms"
                self._recorder.note(event.time, who, text)
            case "synced":
                step = event.integer("step")
                state = f"the state after step {step}" if step >= 0 else "the state at the start"
                self._recorder.note(event.time, who, f"has taken over {state}")
            case "lost":
                self._recorder.note(event.time, who, f"version {event.integer('version')} is lost")
