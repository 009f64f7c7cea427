"""What the processes of a run do becomes events: spans with their processor time, and the time of each process."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from holdfast.comms.transport.liveness import this_host
from holdfast.harness.training.live_view import LiveView
from holdfast.harness.training.report import RunFacts
from holdfast.rl.actors.service import ReplicaStatus, ServiceStatus
from holdfast.rl.run.run_directory import RunDirectory, RunDirectoryUnusable, RunStatus, read_status
from holdfast.rl.run.run_events import Activity, ProcessorTime, ProcessStarted, RunResumed
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.telemetry import TrainerStatus, WorkLog, WorkReport, processor_with_descendants
from support.rl.training_runs import invoke
from support.waiting import PATIENCE, next_line


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_span_has_the_processor_time_of_its_own_thread_also_if_it_fails() -> None:
    log = WorkLog()

    def wait() -> None:
        with log.doing("publish", 3):
            other.wait(30.0)

    other = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(ZeroDivisionError), log.doing("generate", 7):
        spin(0.05)
        raise ZeroDivisionError
    other.set()
    thread.join()
    spans = {span.what: span for span in log.report().spans}
    assert spans["generate"].number == 7 and spans["generate"].cpu >= 0.05
    assert spans["publish"].cpu < 0.05 <= spans["publish"].seconds, "waiting is no processor time"
    assert log.report().spans == (), "each span is reported once"


def test_the_processor_time_of_children_counts_where_they_do_the_work() -> None:
    before = processor_with_descendants()
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        next_line(child.stdout)
        assert processor_with_descendants() - before >= 0.25
        child.communicate(b"\n", timeout=PATIENCE)


def test_what_is_collected_becomes_events_and_a_process_that_hangs_costs_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, said = WorkLog(), list[int]()

    async def trainers() -> Mapping[str, WorkReport]:
        return {"trainer-0": log.report()}

    async def generators() -> Mapping[str, WorkReport]:
        await asyncio.Event().wait()
        return {}

    async def then() -> None:
        said.append(1)

    async def body() -> None:
        roles = {"trainer": trainers, "generator": generators}
        async with telemetry.collecting(roles, then):
            with log.doing("forward_backward", 1):
                spin(0.02)

    monkeypatch.setattr("holdfast.rl.run.telemetry.SECONDS", 0.05)
    with RunDirectory(tmp_path).open() as directory:
        telemetry = RunTelemetry(directory)
        telemetry.emit(ProcessStarted(time=0.0, name="trainer-0", role="trainer", pid=1))
        asyncio.run(body())
        events = list(directory.events())
    [span] = [each for each in events if isinstance(each, Activity)]
    assert (span.process, span.what, span.number) == ("trainer-0", "forward_backward", 1) and span.cpu >= 0.02
    times = [each.process for each in events if isinstance(each, ProcessorTime)]
    assert times.count("driver") == times.count("trainer-0") == len(said) >= 2
    facts = RunFacts.of(events)
    [use] = [each for each in facts.processor_uses() if each.role == "trainer"]
    assert dict(use.work) == {"forward_backward": span.cpu} and use.seconds >= span.cpu
    assert [each.role for each in facts.uses()] == ["trainer"]
    share = facts.model_share()
    assert share is not None and 0 < share <= 1


def test_a_directory_that_takes_no_more_is_told_while_the_run_waits_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        if (tmp_path / "events.jsonl").exists():
            (tmp_path / "events.jsonl").unlink()
            (tmp_path / "events.jsonl").mkdir()

    async def body() -> None:
        with pytest.raises(RunDirectoryUnusable):
            async with asyncio.timeout(10.0), RunTelemetry(directory).collecting({}, then):
                await asyncio.Event().wait()

    monkeypatch.setattr("holdfast.rl.run.telemetry.EVERY", 0.01)
    with RunDirectory(tmp_path).open() as directory:
        asyncio.run(body())


def status_of(*pids: int, **fields: Any) -> RunStatus:
    """The status of a run with trainers of these processes, and a replica in the first of them."""
    replica = ReplicaStatus(
        name="generator-4", slot=0, host="", pid=pids[0] if pids else 0, health="ready", load=2, restarts=3
    )
    service = ServiceStatus(
        name="generator", version=6, replicas=(replica,), queued=5, calls=90, retried=4, overloaded=0, lost=3
    )
    trainers = {
        f"trainer-{n}": TrainerStatus(pid=p, rank=n, epoch=2, committed=6, newest_batch=7) for n, p in enumerate(pids)
    }
    given = {"time": time.time(), "driver": 1, "step": 6, "steps": 40, "trainers": trainers, "services": (service,)}
    return RunStatus(**given | fields)


def test_top_shows_trainers_and_replicas_and_a_driver_that_is_silent(tmp_path: Path) -> None:
    first, second = status_of(9, 9).trainers.values()
    trainers = {"trainer-0": first, "trainer-1": msgspec.structs.replace(second, rank=None)}
    for age, ended, words in ((0.0, False, "running"), (60.0, False, "last heard 1 min"), (60.0, True, "ended")):
        RunDirectory(tmp_path).write_status(status_of(9, time=time.time() - age, ended=ended, trainers=trainers))
        shown = invoke("top", tmp_path, "--once")
        assert shown.exit_code == 0 and words in shown.output
        for part in ("step 6 of 40", "rank 0, epoch 2", "spare", "generator-4", "5 queued", "3 replicas lost"):
            assert part in shown.output
    assert '"restarts": 3' in invoke("top", tmp_path, "--json").output


def test_top_looks_at_each_process_of_a_run_whose_driver_has_ended(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(PATIENCE)
    RunDirectory(tmp_path).write_status(status_of(dead.pid, os.getpid(), driver=dead.pid, host=this_host()))
    lines = invoke("top", tmp_path, "--once").output.splitlines()
    names = ("driver", "trainer-0", "trainer-1", "generator-4")
    said = {name: next(line for line in lines if name in line) for name in names}
    assert f"its driver (pid {dead.pid}) has ended; holdfast rl resume" in said["driver"]
    assert "ended" in said["trainer-0"] and "ended" in said["generator-4"] and "ready" not in said["generator-4"]
    assert "rank 1, epoch 2" in said["trainer-1"]


def test_a_process_that_began_after_the_status_is_another_one_with_its_id(tmp_path: Path) -> None:
    status = status_of(time=time.time() - 3600 * 24 * 365, driver=os.getpid(), host=this_host(), services=())
    RunDirectory(tmp_path).write_status(status)
    read = read_status(RunDirectory(tmp_path).status_file)
    assert read is not None and read.gone == (os.getpid(),)


def test_the_lines_of_a_run_have_one_clock_that_never_runs_backwards() -> None:
    """Events of other processes come late, and those of a resumed run count from its first start."""
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 40) as view:
        view.begin("starting")
        view(RunResumed(time=125.0, step=12))
        view(ProcessStarted(time=128.0, name="trainer-0", role="trainer", pid=1, seconds=3.0))
        view(ProcessStarted(time=115.0, name="generator-0", role="generator", pid=2, seconds=1.0))
        view.note("SIGKILL")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    times = [float(line.split(" s ")[0]) for line in lines]
    assert times == sorted(times) and times[-1] < 60.0
    assert "times count from this start, the run had lasted 2 min 5 s before it" in lines[1]
