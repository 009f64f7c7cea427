"""The directory of a run: lines that a death of the driver cannot tear. Events reach it first, then observers."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.harness.training.driver import TensorBoard
from holdfast.rl.data.episode import Group, Prompt
from holdfast.rl.run.run_directory import RunDirectory, RunDirectoryUnusable, RunInUse
from holdfast.rl.run.run_events import Activity, CopiesRestored, Evaluated, Event, ProcessLost, StepTrained
from holdfast.rl.run.telemetry import RunTelemetry
from support.children import Child
from support.rl.small_batches import episode

EVENTS: tuple[Event, ...] = (
    CopiesRestored(time=0.5, versions=1),
    ProcessLost(time=1.0, name="generator-0", role="generator", pid=7, how="was ended by SIGKILL"),
    StepTrained(
        time=2.0, step=0, reward=0.5, loss=0.1, gradient_norm=1.0, tokens=128, staleness=(0, 1), epoch=3, size=2
    ),
)


def group(number: int) -> Group:
    prompt = Prompt(number=number, tokens=(1, 2))
    made = episode(prompt, (3,))
    return Group(number=number, prompt=prompt, episodes=(made, made))


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
