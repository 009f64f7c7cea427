"""Members of a job that are Monarch actors: the process of one is killed, and the others go on."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.ft.event_lines import to_record
from holdfast.ft.launch.job_contract import LocalContract
from support.source_tree import ROOT
from support.waiting import becomes_true

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'"),
]
SECONDS = 90.0


def test_an_actor_with_a_session_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    contract = LocalContract("job", tmp_path, "shm", 3).made()
    environ = {**os.environ, **contract.environ(), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(ROOT / "examples" / "stack" / "monarch" / "sessions.py"), "3", "250"]

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in map(to_record, contract.events()) if event["kind"] == kind]

    driver = subprocess.Popen(program, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        began = becomes_true(lambda: len(events("committed")) > 9, SECONDS, interval=0.05)
        assert began, "no steps are done"
        victim = next(event["pid"] for event in events("rebuilt") if event["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        words, _ = driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
        driver.communicate(timeout=SECONDS)
    assert driver.returncode == 0, words
    ends = [line for line in words.splitlines() if line.startswith(("lost", "rank"))]
    epoch = events("rebuilt")[-1]["epoch"]
    assert [line.split(":")[0] for line in ends] == ["lost"] + [
        f"rank {rank} of 2 finished in epoch {epoch}" for rank in range(2)
    ], words
    built = {event["epoch"]: event["size"] for event in events("rebuilt")}
    assert [size for _, size in sorted(built.items())] == [3, 2]
