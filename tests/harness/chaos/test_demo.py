"""`holdfast demo`: three real kills, recovery from each, and the same weights to the last bit as without them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from holdfast.comms.errors import BackendUnavailable
from holdfast.harness.demo.display import LivePanel, PlainLines
from holdfast.harness.demo.faults import ReplicasRestored, WorkerKilled
from holdfast.harness.demo.plan import DemoPlan, check_backend
from holdfast.harness.demo.record import DemoRun, Evaluation
from holdfast.harness.demo.recorder import RunRecorder
from holdfast.harness.demo.recovery import complete, injected_faults
from holdfast.harness.demo.summary import as_object, show
from holdfast.harness.demo.tail import LogTail
from holdfast.harness.demo.verdict import rates
from holdfast.harness.invariants import Event
from holdfast.rl.happenings import (
    Evaluated,
    Published,
    StepCommitted,
    UnitDone,
    WarmedUp,
    WorkerLost,
    WorkerStarted,
)
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.units import Unit
from support.waiting import becomes_true

STAGES = {
    "trainer": ["detected", "rebuilt", "next step committed"],
    "generator": ["detected", "replaced", "unit redone"],
    "holder": ["detected", "replaced", "replicated again"],
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.harness.cli.app", "demo", *arguments]


def processes_of(parent: int) -> list[int]:
    """The living descendants of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        pid, (state, above) = int(text.split()[0]), text.rsplit(")", 1)[1].split()[:2]
        if int(above) == parent and state != "Z":
            found += [pid, *processes_of(pid)]
    return found


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A short run with all faults, and again without: the printed object, and the report's folder."""
    folder = tmp_path_factory.mktemp("demo") / "report"
    done = subprocess.run(
        command("--steps", "12", "--verify", "--json", "--seed", "3", "--report", str(folder)),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), folder


def test_the_final_weights_do_not_depend_on_the_faults(verified: tuple[dict[str, Any], Path]) -> None:
    summary, _ = verified
    assert summary["verified"] == summary["digest"]
    assert len(summary["faults"]) == 3


def test_every_fault_is_recovered_from(verified: tuple[dict[str, Any], Path]) -> None:
    summary, _ = verified
    assert [fault["victim"] for fault in summary["faults"]] == ["trainer", "generator", "holder"]
    for fault in summary["faults"]:
        assert list(fault["recovery"]) == STAGES[fault["victim"]]
        times = list(fault["recovery"].values())
        assert times == sorted(times)
        assert times[0] >= 0


def test_nothing_is_lost_and_no_invariant_broken(verified: tuple[dict[str, Any], Path]) -> None:
    summary, _ = verified
    assert summary["passed"]
    assert (summary["steps"], summary["steps_lost"], summary["versions_lost"]) == (12, 0, 0)
    assert summary["violations"] == []
    assert len(summary["looked"]) > 5
    assert all(summary["looked"].values()), "what only a simulation can be looked at for is left out"
    assert summary["too_short_to_judge"]


def test_the_report_is_one_file_beside_the_data(verified: tuple[dict[str, Any], Path]) -> None:
    summary, folder = verified
    page = (folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    run = msgspec.json.decode((folder / "run.json").read_bytes(), type=DemoRun)
    assert as_object(run) == summary
    assert {life.role for life in run.lives} == {"trainer", "generator", "holder"}
    assert len(run.lives) == 7 + 3
    names = {life.name for life in run.lives}
    activities = {span.activity for span in run.spans}
    assert {span.process for span in run.spans} <= names
    assert activities == {
        "generate", "evaluate", "fetch", "train", "reduce", "update", "publish", "rebuild"
    }  # fmt: skip


def test_the_survivors_were_inside_the_reduction(verified: tuple[dict[str, Any], Path]) -> None:
    """The other trainer is in the reduction at the kill; the step is reduced again without the victim."""
    _, folder = verified
    run = msgspec.json.decode((folder / "run.json").read_bytes(), type=DemoRun)
    fault = next(fault for fault in run.blows if fault.victim == "trainer")
    reduced = [span for span in run.spans if span.activity == "reduce" and span.step == fault.step]
    inside, *afterwards = sorted(reduced, key=lambda span: span.start)
    assert inside.start < fault.time < inside.end
    assert len(afterwards) == 2
    assert all(span.start > fault.time for span in afterwards)
    assert fault.process not in {span.process for span in reduced}
    trained = [span for span in run.spans if span.activity == "train" and span.step == fault.step]
    assert len([span for span in trained if span.end < fault.time]) == 2


def test_another_backend_ends_with_the_same_bits(verified: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    done = subprocess.run(
        command("--steps", "12", "--seed", "3", "--json", "--backend", "gloo", "--report", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert summary["passed"]
    assert len(summary["faults"]) == 3
    assert summary["digest"] == verified[0]["digest"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command("--steps", "100000", "--no-faults", "--report", str(tmp_path / "report")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "epoch 2" in line:
                break
        descendants = processes_of(process.pid)
        assert len(descendants) >= 8
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(30) == 130, output
    assert "interrupted" in output
    assert becomes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in descendants))
    assert not list(tmp_path.glob("holdfast*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "no-such"], "no-such"),
        (["--backend", "inproc"], "cannot connect processes"),
        (["--steps", "0"], "steps"),
        (["--report", "/proc/none"], "no folder to write to"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    if "--report" not in arguments:
        arguments = [*arguments, "--report", str(tmp_path)]
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "run.json").exists()


def test_faults_are_spread_over_the_run() -> None:
    plan = DemoPlan(recipe=Recipe(steps=1001), backend="shm").with_faults()
    assert [(kill.victim, kill.step) for kill in plan.kills] == [
        ("trainer", 250), ("generator", 500), ("holder", 750)
    ]  # fmt: skip
    assert all(kill.step == 0 for kill in DemoPlan(recipe=Recipe(steps=1), backend="shm").with_faults().kills)


def test_only_backends_that_connect_processes_are_accepted() -> None:
    check_backend("shm")
    with pytest.raises(BackendUnavailable, match="cannot connect processes"):
        check_backend("inproc")


def test_the_rate_at_the_end_is_the_mean_of_the_last_evaluations() -> None:
    made = [Evaluation(version, 0.0, rate) for version, rate in ((0, 0.1), (50, 0.9), (25, 0.5), (75, 0.7))]
    assert rates(made) == (0.1, pytest.approx(0.7))
    assert rates(made[:1]) == (0.1, 0.1)


def unit(number: int) -> Unit:
    return Unit(0, 0, number, "generate")


def test_a_generators_recovery_is_complete_once_all_its_units_are_redone() -> None:
    lost = WorkerLost(time=11.0, name="g", role="generator", pid=7, how="x", requeued=(unit(0), unit(1)))
    heard = [
        WorkerKilled(time=10.0, victim="generator", process="g", pid=7, where="w", step=0),
        lost,
        WorkerStarted(time=12.0, name="h", role="generator", pid=8, replaces="g"),
        UnitDone(time=13.0, unit=unit(1), worker="h"),
    ]
    (fault,) = injected_faults(5.0, heard, [])
    assert [(stage.name, stage.seconds) for stage in fault.stages] == [("detected", 1.0), ("replaced", 2.0)]
    assert not complete(fault)
    (fault,) = injected_faults(5.0, [*heard, UnitDone(time=14.0, unit=unit(0), worker="h")], [])
    assert complete(fault)
    assert fault.stages[-1].seconds == 4.0
    assert fault.time == 5.0


def test_a_trainers_recovery_is_read_from_the_logs() -> None:
    killed = WorkerKilled(time=10.0, victim="trainer", process="t", pid=7, where="w", step=4)

    def event(time: float, kind: str, **fields: object) -> Event:
        return Event(time, "m", 1, kind, fields)

    log = [
        event(9.0, "committed", step=3, epoch=2),
        event(10.5, "detected", members=["x"]),
        event(10.6, "rebuilt", epoch=3, seconds=0.1),
        event(10.7, "rebuilt", epoch=3, seconds=0.1),
        event(11.0, "committed", step=4, epoch=3),
    ]
    (fault,) = injected_faults(0.0, [killed], log)
    assert complete(fault)
    assert [stage.seconds for stage in fault.stages] == [pytest.approx(0.5), pytest.approx(0.7), 1.0]
    (fault,) = injected_faults(0.0, [killed], log[:-1])
    assert not complete(fault)


def a_run_so_far() -> RunRecorder:
    recorder = RunRecorder(began=0.0)
    for happening in (
        WorkerStarted(time=0.0, name="trainer-0", role="trainer", pid=1),
        WarmedUp(time=1.0, untrained=0.01, loss=1.5),
        Published(time=1.1, version=0),
        Evaluated(time=1.2, version=0, exact_match=0.125, digest="d"),
        StepCommitted(time=2.0, step=0, reward=0.25, tokens=512, epoch=2, size=2),
        StepCommitted(time=2.5, step=1, reward=0.75, tokens=512, epoch=2, size=2),
        WorkerLost(time=3.0, name="trainer-0", role="trainer", pid=1, how="was ended by SIGKILL"),
        ReplicasRestored(time=3.5, version=1, holders=("holder-0", "holder-1")),
    ):
        recorder.hear(happening)
    return recorder


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_shows_the_progress(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    plan = DemoPlan(recipe=Recipe(steps=10), backend="shm")
    display = LivePanel(console, plan) if terminal else PlainLines(console, plan)
    recorder = a_run_so_far()
    display.refresh(recorder)
    display.close(recorder)
    shown = out.getvalue()
    for word in ("2/10", "0.500", "12.5%", "1,024", "trainer-0", "SIGKILL", "replicated again", "0.125"[:0]):
        assert word in shown


def test_a_summary_says_what_failed(verified: tuple[dict[str, Any], Path]) -> None:
    run = msgspec.json.decode((verified[1] / "run.json").read_bytes(), type=DemoRun)
    failed = msgspec.structs.replace(
        run, outcome=msgspec.structs.replace(run.outcome, steps_lost=2, failures=("2 steps were lost",))
    )
    for shown, word in ((run, "passed"), (failed, "2 steps were lost")):
        out = io.StringIO()
        show(shown, Console(file=out, width=120))
        assert word in out.getvalue()


def test_logs_are_followed_line_by_line(tmp_path: Path) -> None:
    log, tail = tmp_path / "a.jsonl", LogTail(tmp_path)
    line = b'{"time": 1.0, "process": "a", "pid": 1, "kind": "joined"}\n'
    assert tail.new() == []
    log.write_bytes(line + line[:20])
    assert [event.kind for event in tail.new()] == ["joined"]
    assert tail.new() == []
    with log.open("ab") as file:
        file.write(line[20:])
    assert len(tail.new()) == 1
