"""The flight recorder: its records outlive the process, and damaged files are refused."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.ft.events import StepBegun
from holdfast.ft.telemetry import flight
from holdfast.ft.telemetry.flight import BadRecording, OpStatus, RecordingState, decode, find, read
from holdfast.ft.telemetry.flight.recorder import FlightRecorder, open_recorder
from support.waiting import PATIENCE

TENSOR = torch.ones(2, 3)


def recorder(folder: Path, **options: Any) -> FlightRecorder:
    return FlightRecorder(folder / "p1.flight", "p1", "job", **options)


def test_an_op_is_read_back_as_it_was_called(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.at_step(StepBegun(step=7, epoch=1))
    journal = made.journal("job", epoch=3, rank=1, size=4, backend="shm")
    journal.enter("all_reduce", 12, TENSOR.nbytes, TENSOR, "sum", -1)
    journal.leave(None)
    (op,) = read(made.path).ops
    assert str(op.signature) == "all_reduce(float32, [2, 3], sum)"
    assert (op.seq, op.ordinal, op.step, op.nbytes, op.status) == (12, 1, 7, 24, OpStatus.DONE)
    assert (op.communicator.name, op.communicator.epoch, op.communicator.rank, op.communicator.size) == ("job", 3, 1, 4)
    assert op.left is not None and 0 <= op.left - op.entered < 1


def test_an_unfinished_op_is_recorded_with_the_ranks_that_it_waits_for(tmp_path: Path) -> None:
    journal = recorder(tmp_path).journal("job", 1, 0, 4, "ucx")
    journal.enter("broadcast", 1, 8, TENSOR, None, 2)
    journal.waits([2], gives=[1, 3], rounds=5)
    (op,) = read(tmp_path / "p1.flight").ops
    assert (op.status, op.left, op.signature.peer) == (OpStatus.INSIDE, None, 2)
    assert op.waiting is not None
    assert (op.waiting.takes, op.waiting.gives, op.waiting.rounds) == ((2,), (1, 3), 5)


@pytest.mark.parametrize(
    ("error", "status", "ranks"),
    [
        (PeerFailed([2], "gone"), OpStatus.PEER_FAILED, (2,)),
        (OpTimeout("barrier", 1, 0.5, [0, 3]), OpStatus.TIMED_OUT, (0, 3)),
        (Revoked(1), OpStatus.REVOKED, ()),
        (Mismatch("no"), OpStatus.MISMATCH, ()),
        (KeyboardInterrupt(), OpStatus.ERROR, ()),
    ],
)
def test_a_failed_op_is_recorded_with_its_error_and_ranks(
    tmp_path: Path, error: BaseException, status: OpStatus, ranks: tuple[int, ...]
) -> None:
    journal = recorder(tmp_path).journal("job", 1, 0, 4, "shm")
    journal.enter("barrier", 1, 0, None, None, -1)
    journal.leave(error)
    (op,) = read(tmp_path / "p1.flight").ops
    assert (op.status, op.failed_ranks) == (status, ranks)


def test_the_ring_keeps_the_last_ops_and_the_last_communicators(tmp_path: Path) -> None:
    made = recorder(tmp_path, capacity=16)
    for epoch in range(1, 400):
        journal = made.journal("job", epoch, 0, 1, "shm")
        journal.enter("barrier", 1, 0, None, None, -1)
        journal.leave(None)
    ops = read(made.path).ops
    assert [op.communicator.epoch for op in ops] == list(range(384, 400))
    assert [op.number for op in ops] == list(range(384, 400))


def test_collectives_are_counted_apart_from_messages_to_each_peer(tmp_path: Path) -> None:
    journal = recorder(tmp_path).journal("job", 1, 0, 4, "shm")
    for seq, (op, peer) in enumerate([("send", 1), ("barrier", -1), ("send", 2), ("send", 1), ("barrier", -1)]):
        journal.enter(op, seq, 0, None, 0 if op == "send" else None, peer)
        journal.leave(None)
    assert [op.ordinal for op in read(tmp_path / "p1.flight").ops] == [1, 1, 1, 2, 2]


def test_calls_beyond_the_text_capacity_lose_only_their_shapes(tmp_path: Path) -> None:
    journal = recorder(tmp_path, text_bytes=256).journal("job", 1, 0, 1, "shm")
    for n in range(50):
        journal.enter("all_reduce", n, n, torch.empty(n), "sum", -1)
        journal.leave(None)
    ops = read(tmp_path / "p1.flight").ops
    assert ops[0].signature.shapes == ((0,),)
    assert ops[-1].signature.op == "all_reduce"
    assert ops[-1].nbytes == 49


def test_the_file_is_the_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        recorder(tmp_path)
    assert read(made.path).state == RecordingState.OPEN
    made.close("ValueError: no")
    assert (read(made.path).state, read(made.path).note) == (RecordingState.FAILED, "ValueError: no")


def test_recording_is_off_without_a_folder_to_write_to_or_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HOLDFAST_LOG_DIR", raising=False)
    assert open_recorder("p1", "job") is None
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOLDFAST_LOG_DIR", str(tmp_path / "file"))
    assert open_recorder("p1", "job") is None
    assert "records no ops" in caplog.text
    monkeypatch.setenv("HOLDFAST_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("HOLDFAST_RECORD", "0")
    assert open_recorder("p1", "job") is None
    monkeypatch.delenv("HOLDFAST_RECORD")
    assert open_recorder("p1", "job") is not None
    assert find(tmp_path / "logs") == [tmp_path / "logs" / "p1.flight"]


def test_a_recording_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    """Each record that the reader accepts is consistent: ordered times, and fields of one op."""
    made = recorder(tmp_path, capacity=64)
    over = threading.Event()

    def write() -> None:
        journal = made.journal("job", 1, 0, 1, "shm")
        number = 0
        while not over.is_set():
            number += 1
            journal.enter("all_reduce", number, 3 * number, TENSOR, "sum", -1)
            journal.leave(None)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            for op in read(made.path).ops:
                assert op.seq == op.ordinal == op.number
                assert op.nbytes == 3 * op.number
                assert op.left is None or op.left >= op.entered
    finally:
        over.set()
        writer.join()


# Damaged recordings ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small recording with ops of all kinds."""
    made = recorder(tmp_path_factory.mktemp("recorded"), capacity=8, text_bytes=512)
    journal = made.journal("job", 1, 2, 4, "shm")
    for op, error in [("all_reduce", None), ("barrier", PeerFailed([1], "gone")), ("broadcast", Revoked(1))]:
        journal.enter(op, 1, 24, TENSOR, "sum", 3)
        journal.leave(error)
    journal.enter("all_gather", 4, 24, (TENSOR, TENSOR), None, -1)
    journal.waits([1], [3], 2)
    return made.path.read_bytes()


@given(st.data(), st.binary(max_size=300))
def test_a_recording_that_was_cut_short_and_noise_are_refused(
    recorded: bytes, data: st.DataObject, noise: bytes
) -> None:
    cut = recorded[: data.draw(st.integers(0, len(recorded) - 1))]
    as_long = (noise * (len(recorded) // len(noise) + 1))[: len(recorded)] if noise else noise
    for wrong in (cut, as_long):
        with pytest.raises(BadRecording):
            decode(wrong, wrong, wrong)


@given(st.data())
def test_a_damaged_recording_is_refused_or_reads_as_one(recorded: bytes, data: st.DataObject) -> None:
    """Any change of bytes gives a recording or `BadRecording`, and no other error."""
    damaged = bytearray(recorded)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1) | st.sampled_from(range(flight.NOTE_AT)))
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        recording = decode(bytes(damaged), bytes(damaged), bytes(damaged))
    except BadRecording:
        return
    assert len(recording.ops) + recording.torn <= recording.capacity


def _patched(recorded: bytes, at: int, value: bytes) -> bytes:
    return recorded[:at] + value + recorded[at + len(value) :]


def test_an_unknown_version_is_refused_by_its_number(recorded: bytes) -> None:
    newer = _patched(recorded, 8, (99).to_bytes(4, "little"))
    with pytest.raises(BadRecording, match="version 99; this holdfast reads 1"):
        decode(newer, newer, newer)


def test_an_op_that_is_being_written_is_left_out_and_counted(recorded: bytes) -> None:
    assert len(decode(recorded, recorded, recorded).ops) == 4
    torn = _patched(recorded, flight.ring_at(512), (9).to_bytes(8, "little"))
    recording = decode(torn, torn, torn)
    assert (len(recording.ops), recording.torn) == (3, 1)


def test_files_that_cannot_be_recordings_are_refused_unread(tmp_path: Path, recorded: bytes) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("empty", "huge"):
        (tmp_path / name).touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    for name in ("missing", "folder", "pipe", "empty", "huge"):
        path = tmp_path / name
        began = time.monotonic()
        with pytest.raises(BadRecording) as refused:
            read(path)
        assert isinstance(refused.value, HoldfastError)
        assert time.monotonic() - began < PATIENCE
