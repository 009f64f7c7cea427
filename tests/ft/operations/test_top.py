"""`holdfast top` shows a job that runs, hangs, lost a rank and ended, and only reads its files."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from holdfast.ft import Timeouts
from holdfast.ft.diagnosis.jobs import JobState, LastFault, NoSuchJob, ProcessRow, locate
from holdfast.ft.event_lines import EventTail
from holdfast.harness import LocalCluster
from holdfast.harness.cli.app import app
from holdfast.harness.cli.top_screen import render
from support.waiting import becomes_true


def look(directory: Path) -> dict[str, Any]:
    """The output of `holdfast top --json`."""
    done = CliRunner().invoke(app, ["top", str(directory), "--json"])
    assert done.exit_code == 0, done.output
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def until(directory: Path, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first output for which a condition holds."""
    assert becomes_true(lambda: true(look(directory)), interval=0.05), look(directory)
    return look(directory)


def _train(session: Any, gate: str) -> None:
    """20 steps; rank 1 of the first epoch waits in step 5 for a file to appear (or its end)."""
    victim = False
    for attempt in session.steps(20):
        victim = victim or (attempt.step == 0 and attempt.rank == 1)
        with attempt:
            while victim and attempt.step == 5 and not Path(gate).exists():
                time.sleep(0.01)
            attempt.comm.all_reduce(torch.ones(8))


def test_a_job_is_shown_while_it_hangs_after_it_lost_a_rank_and_when_it_is_done(tmp_path: Path) -> None:
    options = {"min_size": 3}
    with (
        LocalCluster(3, "shm", spares=1, session=options) as cluster,
        cluster.start(_train, str(tmp_path / "never")) as job,
    ):
        job.wait_for_spares()
        hung = until(job.directory, lambda said: any(r["waits_for"] == [1] and r["inside"] for r in said["rows"]))
        assert (hung["phase"], hung["members"], hung["backend"], hung["last_fault"]) == ("running", 3, "shm", None)
        assert [row["rank"] for row in hung["rows"]] == [0, 1, 2, None]
        assert [row["state"] for row in hung["rows"]] == ["running", "running", "running", "spare"]
        assert [row["pid"] for row in hung["rows"]][:3] == [job.pid(rank) for rank in range(3)]
        assert hung["rows"][1]["step"] == 5
        assert not hung["rows"][1]["inside"]

        job.kill(1)
        job.results(timeout=60.0)
        done = until(job.directory, lambda said: all(row["state"] == "done" for row in said["rows"]))
        assert (done["phase"], done["step"], done["faults"]) == ("finished", 19, 1)
        fault = done["last_fault"]
        assert fault["epoch"] == hung["epoch"]
        assert 0 < fault["recovery"] < fault["resume"] < 30
        assert len(done["rows"]) == 3

        shown = CliRunner().invoke(app, ["top", str(job.directory), "--once"], env={"COLUMNS": "120"}).output
        assert "finished" in shown
        assert "last fault" in shown


def test_top_runs_live_in_a_terminal_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "p1.jsonl").write_text('{"time":1,"process":"p1","pid":1,"kind":"joined","address":"x"}\n')
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "holdfast.harness.cli.app", "top", str(tmp_path), "--every", "0.05"]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
    os.close(inside)
    try:
        shown = b""
        while b"holdfast top" not in shown:
            shown += os.read(terminal, 4096)
        process.send_signal(2)
        while True:  # the terminal closes when the process has
            try:
                os.read(terminal, 4096)
            except OSError:
                break
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(20)
        os.close(terminal)


@pytest.mark.timeout(60)
def test_top_writes_nothing_to_the_folder_that_it_watches(tmp_path: Path) -> None:
    (tmp_path / "p1.jsonl").write_text('{"time":1,"process":"p1","pid":1,"kind":"joined"}\nhalf a li')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert look(tmp_path)["phase"] == "unknown"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_logs_are_followed_line_by_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "p1.jsonl"
    tail = EventTail(tmp_path)
    process = b'"process":"p1","pid":7'
    log.write_bytes(b'{"time":2,"kind":"b",%b}\n{"time":1,"kind":"a",%b}\n{"time":3,%b,' % (process, process, process))
    assert [event.kind for event in tail.new()] == ["a", "b"]
    assert tail.new() == []
    with log.open("ab") as file:
        file.write(b'"kind":"c"}\nrubbish\n[]\n{"kind":"no time"}\n{"time":4,"kind":"no process"}\n')
    assert [event.kind for event in tail.new()] == ["c"]


def test_the_screen_shows_members_steps_and_failures() -> None:
    rows = (
        ProcessRow(0, "p0", 10, "running", 7, 12.5, "all_reduce(float32, [4], sum)", True, 2.5, (1,)),
        ProcessRow(1, "p1", 11, "stopped", 7, 0.0, "barrier()", False, 2.6),
    )
    fault = LastFault(61.0, 3, "rank 2 (p9) is gone: its process ended", 0.0042, None)
    console = Console(width=110, record=True)
    with console.capture() as shown:
        console.print(render(JobState("job", "running", 4, 2, "shm", 7, 12.5, 1, fault, rows)))
    for words in ("epoch 4", "12.5 steps/s", "all_reduce", "2.5 s", "stopped", "rank 2 (p9) is gone", "in 4.2 ms"):
        assert words in shown.get()
    waiting = ProcessRow(None, "p1", 7, "waits for 2 members", -1, 0.0, "", False, 0.0)
    with console.capture() as shown:
        console.print(render(JobState("job", "forming", 1, 1, "", -1, 0.0, 0, None, (waiting,), needed=2)))
    assert "waits for 2 more" in shown.get() and "waits for 2 members" in shown.get()


def test_jobs_that_end_during_the_search_for_another_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            folder = tmp_path / "holdfast-x" / "job-y"
            folder.mkdir(parents=True)
            (folder / "register.sqlite").touch()
            shutil.rmtree(tmp_path / "holdfast-x")

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(2_000):
            with pytest.raises(NoSuchJob, match="no job of that name"):
                locate("no-such-job")
    finally:
        over.set()
        other.join()
    done = CliRunner().invoke(app, ["top", "no-such-job"])
    assert (done.exit_code, "no job of that name" in done.output) == (1, True)


def test_the_screen_says_that_processes_wait_for_members() -> None:
    """The start needs a third process; later two of them are needed, and one was killed."""
    times = Timeouts(heartbeat=0.1, suspect=0.5, operation=20.0, rebuild=5.0, join=30.0)
    with LocalCluster(2, session={"size": 3, "min_size": 2, "timeouts": times}) as cluster:
        job = cluster.start(_train, str(cluster.logs / "gate"))
        said = until(job.directory, lambda said: said["needed"] == 1 and len(said["rows"]) == 2)
        assert said["phase"] == "forming"
        assert [row["state"] for row in said["rows"]] == ["waits for 1 member"] * 2
    with LocalCluster(2, session={"min_size": 2, "timeouts": times}) as cluster:
        job = cluster.start(_train, str(cluster.logs / "gate"))
        job.wait_for("committed", step=2)
        job.kill(1)
        said = until(job.directory, lambda said: said["needed"] == 1)
        assert [row["state"] for row in said["rows"]] == ["waits for 1 member", "killed"]
