"""Events of a run reach its directory, its observers and TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Activity, Evaluated, Event, StepTrained, WeightsPublished
from holdfast.rl.run.telemetry import RunTelemetry, TensorBoard


def test_events_are_in_the_directory_before_an_observer_gets_them(tmp_path: Path) -> None:
    heard: list[int] = []
    with RunDirectory(tmp_path).open() as directory:
        telemetry = RunTelemetry(directory, (lambda _: heard.append(len(list(directory.events()))),))
        for version in range(3):
            telemetry.emit(WeightsPublished(time=telemetry.now(), version=version))
    assert heard == [1, 2, 3]


def test_an_activity_is_emitted_unless_its_block_raises(tmp_path: Path) -> None:
    heard: list[Event] = []
    with RunDirectory(tmp_path).open() as directory:
        telemetry = RunTelemetry(directory, (heard.append,), began=100.0)
        with telemetry.doing("trainer-0", "trainer", "train", 7):
            pass
        with pytest.raises(ZeroDivisionError), telemetry.doing("trainer-0", "trainer", "train", 8):
            raise ZeroDivisionError
    (activity,) = heard
    assert isinstance(activity, Activity) and activity.number == 7 and activity.seconds >= 0.0
    assert activity.time >= 100.0, "a resumed run goes on at the time at which it stood"


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
