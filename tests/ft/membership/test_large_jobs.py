"""Behaviour of large jobs, on real processes: with HOLDFAST_MESH=2 five ranks are many."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.ft import Session, Timeouts
from holdfast.harness import LocalCluster
from holdfast.harness.invariants import check, event_of

STEPS = 40
TIMES = Timeouts(heartbeat=0.1, suspect=1.0, operation=20.0, rebuild=10.0, join=15.0)


def add_up(session: Session, gate: Path) -> tuple[int, list[int]]:
    """All ranks sum their shards, step by step; from step 3 on only once `gate` exists."""
    sums: list[int] = []
    for attempt in session.steps(STEPS):
        while attempt.step == 3 and not gate.exists():
            time.sleep(0.01)
        with attempt:
            part = torch.tensor([sum(attempt.shards)])
            attempt.comm.all_reduce(part)
        if attempt.committed:
            sums.append(int(part))
    return session.rank or 0, sums


@pytest.mark.parametrize("spares", [0, 1])
def test_the_first_rank_dies_and_the_others_learn_of_the_next_view(spares: int) -> None:
    options: dict[str, Any] = {"timeouts": TIMES, "shards": 12}
    environ = {"HOLDFAST_MESH": "2", "HOLDFAST_FAULT": "commit.before_barrier:9:0:5"}
    with LocalCluster(5, "shm", spares=spares, session=options, environ=environ) as ranks:
        gate = ranks.logs / "gate"
        job = ranks.start(add_up, gate)
        job.wait_for_spares()
        gate.touch()
        results = job.results(60)
        events = job.events()
    assert [rank for rank, _ in results] == list(range(4 + spares))
    assert all(sums[-30:] == [66] * 30 for _, sums in results)
    installed = [event["epoch"] for event in events if event["kind"] == "installed"]
    assert installed.count(max(installed)) == 4 + spares
    assert check([event_of(event) for event in events]) == []


def test_an_impossible_mesh_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HOLDFAST_MESH", "0")
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    with pytest.raises(ValueError, match="HOLDFAST_MESH"):
        Session("shm", size=2, job="j", register=f"sqlite://{tmp_path}/r.sqlite", key_file=key)
