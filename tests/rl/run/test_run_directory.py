"""What processes do becomes events; they reach the directory first, in lines that no death tears, then observers."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport.liveness import this_host
from holdfast.harness.training.driver import TensorBoard
from holdfast.harness.training.live_view import LiveView
from holdfast.harness.training.report import RunFacts
from holdfast.rl.actors.service import ReplicaStatus, ServiceStatus
from holdfast.rl.data.episode import Group, Prompt
from holdfast.rl.run.run_directory import RunDirectory, RunDirectoryUnusable, RunInUse, RunStatus, read_status
from holdfast.rl.run.run_events import (
    Activity,
    CopiesRestored,
    Evaluated,
    Event,
    ProcessLost,
    ProcessorTime,
    ProcessStarted,
    RunResumed,
    StepTrained,
)
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.telemetry import TrainerStatus, WorkLog, WorkReport, processor_with_descendants
from support.children import Child
from support.rl.small_batches import episode, group_of
from support.rl.training_runs import invoke
from support.waiting import PATIENCE, next_line

EVENTS: tuple[Event, ...] = (
    CopiesRestored(time=0.5, versions=1),
    ProcessLost(time=1.0, name="generator-0", role="generator", pid=7, how="was ended by SIGKILL"),
    StepTrained(
        time=2.0, step=0, reward=0.5, loss=0.1, gradient_norm=1.0, tokens=128, staleness=(0, 1), epoch=3, size=2
    ),
)


def group(number: int) -> Group:
    return group_of(*[episode(Prompt(number=number, tokens=(1, 2)), (3,))] * 2)


@given(cut=st.integers(0, 200))
def test_a_line_that_a_death_cut_off_is_dropped_and_all_others_are_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    with directory.open():
        directory.append(*EVENTS)
        directory.append_group(group(4))
    assert list(directory.groups()) == [group(4)]
    whole = directory.events_file.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    directory.events_file.write_bytes(kept)
    lines = kept.count(b"\n")
    assert tuple(directory.events()) == EVENTS[:lines]
    with directory.open():
        directory.append(EVENTS[0])
    assert tuple(directory.events()) == (*EVENTS[:lines], EVENTS[0])


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).open() as directory:
        directory.append(EVENTS[0])
        directory.events_file.write_bytes(directory.events_file.read_bytes() + b'{"kind":"other","time":1}\n')
        with pytest.raises(CorruptData, match=r"events\.jsonl:2"):
            list(directory.events())


@pytest.mark.parametrize("path", ["file", "file/run", "/proc/run", "/dev/null"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    said = pytest.raises(RunDirectoryUnusable, match=r"cannot be written: .*choose another directory")
    with said, RunDirectory(tmp_path / path).open():
        pass


def test_a_full_disk_ends_the_run_and_spoils_no_line(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").open() as directory:
        directory.append(*EVENTS)
    kept = directory.events_file.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kept + 10, hard))
    try:
        with pytest.raises(RunDirectoryUnusable, match="File too large"), directory.open():
            directory.append(EVENTS[0])
        with pytest.raises(RunDirectoryUnusable, match="File too large"), directory.open():
            (tmp_path / "run" / "checkpoint").write_bytes(bytes(kept + 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with directory.open():
        directory.append(EVENTS[1])
    assert tuple(directory.events()) == (*EVENTS, EVENTS[1])


def test_one_driver_works_in_a_directory_at_a_time(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).open(), pytest.raises(RunInUse), RunDirectory(tmp_path).open():
        pass
    with RunDirectory(tmp_path).open():
        pass


def test_a_driver_that_is_killed_leaves_a_directory_that_the_next_one_opens(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    """It writes events as fast as it can, and is killed at any point of that."""

    def write(pipe: Connection) -> None:
        with RunDirectory(tmp_path).open() as directory:
            for step in range(1_000_000):
                directory.append(CopiesRestored(time=0.0, versions=step))
                if step == 0:
                    pipe.send("begun")

    for round_ in range(5):
        child = start(write)
        assert child.hear() == "begun"
        time.sleep(0.013 * round_)
        os.kill(child.pid, signal.SIGKILL)
        child.kill()
        with RunDirectory(tmp_path).open() as directory:
            versions = [event.versions for event in directory.events() if isinstance(event, CopiesRestored)]
        begins = [index for index, version in enumerate(versions) if version == 0]
        assert len(begins) == round_ + 1
        for begin, end in zip(begins, (*begins[1:], len(versions)), strict=True):
            assert versions[begin:end] == list(range(end - begin))


def test_an_activity_is_in_the_directory_before_an_observer_gets_it_unless_its_block_raises(tmp_path: Path) -> None:
    heard: list[tuple[Event, int]] = []
    with RunDirectory(tmp_path).open() as directory:
        observers = (lambda event: heard.append((event, len(list(directory.events())))),)
        telemetry = RunTelemetry(directory, observers, began=100.0)
        for number in (7, 8):
            with telemetry.doing("trainer-0", "trainer", "train", number):
                pass
        with pytest.raises(ZeroDivisionError), telemetry.doing("trainer-0", "trainer", "train", 9):
            raise ZeroDivisionError
    activities, written = zip(*heard, strict=True)
    assert [each.number for each in activities if isinstance(each, Activity)] == [7, 8] and written == (1, 2)
    for each in activities:
        assert each.seconds >= 0.0
        assert each.time >= 100.0, "a resumed run goes on at the time at which it stood"


def test_tensorboard_gets_the_scalars_of_steps_and_evaluations(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event as Record

    board = TensorBoard(tmp_path)
    board(
        StepTrained(
            time=1.0, step=3, reward=0.25, loss=0.5, gradient_norm=1.0, tokens=64, staleness=(0, 2), epoch=1, size=2
        )
    )
    board(Evaluated(time=2.0, version=3, reward=0.75, best=True))
    board.close()
    found: dict[str, tuple[int, float]] = {}
    (file,) = tmp_path.iterdir()
    data, at = file.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        record = Record.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in record.summary.value:
            found[value.tag] = (record.step, value.simple_value)
    assert found["train/reward"] == (4, 0.25)
    assert found["train/staleness"] == (4, 2.0)
    assert found["evaluation/reward"] == (3, 0.75)


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


async def test_what_is_collected_becomes_events_and_a_process_that_hangs_costs_only_its_own(
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

    monkeypatch.setattr("holdfast.rl.run.telemetry.SECONDS", 0.05)
    with RunDirectory(tmp_path).open() as directory:
        telemetry = RunTelemetry(directory)
        telemetry.emit(ProcessStarted(time=0.0, name="trainer-0", role="trainer", pid=1))
        async with telemetry.collecting({"trainer": trainers, "generator": generators}, then):
            with log.doing("forward_backward", 1):
                spin(0.02)
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


async def test_a_directory_that_takes_no_more_is_told_while_the_run_waits_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        if (tmp_path / "events.jsonl").exists():
            (tmp_path / "events.jsonl").unlink()
            (tmp_path / "events.jsonl").mkdir()

    monkeypatch.setattr("holdfast.rl.run.telemetry.EVERY", 0.01)
    with RunDirectory(tmp_path).open() as directory, pytest.raises(RunDirectoryUnusable):
        async with asyncio.timeout(10.0), RunTelemetry(directory).collecting({}, then):
            await asyncio.Event().wait()


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
