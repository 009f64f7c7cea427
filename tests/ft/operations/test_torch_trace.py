"""torch's own analyser reads the recordings that `holdfast blame --torch-trace` writes, and names the same rank."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace
from typer.testing import CliRunner

from holdfast.ft.diagnosis.analyse import analyse
from holdfast.ft.diagnosis.evidence import JobEvidence, ProcessState
from holdfast.ft.diagnosis.gathering import assemble
from holdfast.ft.diagnosis.torch_trace import PREFIX, write_dumps
from holdfast.ft.telemetry.flight import FlightRecorder, find, read
from holdfast.harness.cli.app import app
from support.blame.model import ModelCall, ModelWorld

SUM = ModelCall("all_reduce", torch.empty(4, device="meta"), "sum")
ODD = ModelCall("all_reduce", torch.empty(5, device="meta"), "sum")
TREE = ModelCall("broadcast", torch.empty(3, device="meta"), peer=0)


def evidence(folder: Path) -> JobEvidence:
    recordings = [read(path) for path in find(folder)]
    return assemble(recordings, {each.identity: ProcessState.RUNNING for each in recordings}, [], 1e4)


def torch_says(evidence: JobEvidence, folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What torch's analyser prints about the recordings."""
    write_dumps(evidence, folder)
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(folder)])
    return caplog.text


def hung(folder: Path, victim: int, *, capacity: int) -> JobEvidence:
    """Four ranks, 31 collectives in all, and `victim` does not come to the last."""
    world = ModelWorld(4, random.Random(victim), latency=1e-5, dead_after={victim: (30, -1)})
    for step in range(15):
        world.run([SUM] * 4, step)
        world.run([TREE] * 4, step)
    world.run([SUM] * 4, 15)
    world.write(folder, ["h"] * 4, [0.0] * 4, waits=True, capacity=capacity)
    return evidence(folder)


@pytest.mark.parametrize("capacity", [64, 16], ids=["all ops", "rings that wrapped"])
@pytest.mark.parametrize("victim", range(4))
def test_both_name_the_rank_that_is_missing_from_a_collective(
    tmp_path: Path, victim: int, capacity: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = hung(tmp_path, victim, capacity=capacity)
    said = torch_says(job, tmp_path / "fr", caplog)
    assert (analyse(job)[0].kind, analyse(job)[0].rank) == ("hang", victim)
    assert said.count("Not all ranks joining collective, sequence number: 31") == 1
    assert f"missing ranks: {{{victim}}}" in said


def test_both_name_the_rank_whose_shape_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = ModelWorld(3, random.Random(2), latency=1e-5)
    for step in range(5):
        world.run([SUM] * 3, step)
    world.dead_after = dict.fromkeys(range(3), (5, 0))
    world.run([SUM, SUM, ODD], 5)
    world.write(tmp_path, ["h"] * 3, [0.0] * 3, waits=False, capacity=64)
    job = evidence(tmp_path)
    said = torch_says(job, tmp_path / "fr", caplog)
    assert (analyse(job)[0].kind, analyse(job)[0].rank) == ("mismatch", 2)
    assert "Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH" in said
    assert "Culprit rank 1" not in said


def test_messages_are_matched_by_direction_and_groups_by_their_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both directions of a pair, ops of every other name, a subgroup, and one send that nobody receives."""
    tensor = torch.ones(2)
    for rank in range(3):
        recorder = FlightRecorder(tmp_path / f"p{rank}.flight", f"p{rank}", "job", capacity=64)
        journal = recorder.journal("job", 1, rank, 3, "shm")
        for op in ("connect", "window", "all_gather_object", "broadcast_object", "all_to_all", "unheard_of"):
            journal.enter(op, 0, 8, tensor if op == "window" else None, None, -1)
            journal.leave(None)
        if rank:
            peer, sends = 3 - rank, rank == 1
            for op in ("send", "recv") if sends else ("recv", "send"):
                journal.enter(op, 0, 8, tensor, 0, peer)
                journal.leave(None)
            inner = recorder.journal("job/1-2.0", 1, rank - 1, 2, "shm")
            inner.enter("barrier", 0, 0, None, None, -1)
            inner.leave(None)
        if rank == 2:
            journal.enter("send", 0, 8, tensor, 0, 0)
    said = torch_says(evidence(tmp_path), tmp_path / "fr", caplog)
    assert said.count("Not all ranks joining collective") == 1
    assert "missing ranks: {0}" in said
    assert "errors" not in said


def test_the_command_writes_a_file_a_rank_and_says_when_it_cannot(tmp_path: Path) -> None:
    hung(tmp_path, 1, capacity=64)
    outcome = CliRunner().invoke(app, ["blame", str(tmp_path), "--torch-trace", str(tmp_path / "fr")])
    assert outcome.exit_code == 0, outcome.output
    assert sorted(path.name for path in (tmp_path / "fr").iterdir()) == [f"{PREFIX}{rank}" for rank in range(4)]
    (tmp_path / "a file").write_text("")
    outcome = CliRunner().invoke(app, ["blame", str(tmp_path), "--torch-trace", str(tmp_path / "a file")])
    assert outcome.exit_code == 1
    assert "cannot be written" in outcome.output
