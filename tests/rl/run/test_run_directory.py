"""The directory of a run: lines that a death of the driver cannot tear."""

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
from holdfast.rl.data.episode import Group, Prompt
from holdfast.rl.run.run_directory import RunDirectory, RunDirectoryUnusable, RunInUse
from holdfast.rl.run.run_events import Event, ProcessLost, StepTrained, WeightsPublished
from support.children import Child
from support.rl.small_batches import episode

EVENTS: tuple[Event, ...] = (
    WeightsPublished(time=0.5, version=0),
    ProcessLost(time=1.0, name="generator-0", role="generator", pid=7, how="was ended by SIGKILL"),
    StepTrained(
        time=2.0, step=0, reward=0.5, loss=0.1, gradient_norm=1.0, tokens=128, staleness=(0, 1), epoch=3, size=2
    ),
)


def group(number: int) -> Group:
    prompt = Prompt(number=number, tokens=(1, 2))
    made = episode(prompt, (3,))
    return Group(number=number, prompt=prompt, episodes=(made, made))


def test_events_and_episodes_are_read_as_they_were_written(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").open() as directory:
        for event in EVENTS:
            directory.append(event)
        directory.append_group(group(4))
        assert tuple(directory.events()) == EVENTS
        assert list(directory.groups()) == [group(4)]


@given(cut=st.integers(0, 200))
def test_a_line_that_a_death_cut_off_is_dropped_and_all_others_are_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    with directory.open():
        for event in EVENTS:
            directory.append(event)
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
        directory.append_all(EVENTS)
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
                directory.append(WeightsPublished(time=0.0, version=step))
                if step == 0:
                    pipe.send("begun")

    for round_ in range(5):
        child = start(write)
        assert child.hear() == "begun"
        time.sleep(0.013 * round_)
        os.kill(child.pid, signal.SIGKILL)
        child.kill()
        with RunDirectory(tmp_path).open() as directory:
            versions = [event.version for event in directory.events() if isinstance(event, WeightsPublished)]
        begins = [index for index, version in enumerate(versions) if version == 0]
        assert len(begins) == round_ + 1
        for begin, end in zip(begins, (*begins[1:], len(versions)), strict=True):
            assert versions[begin:end] == list(range(end - begin))
