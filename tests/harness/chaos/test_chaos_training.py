"""Chaos over reinforcement learning: real kills in every role, and a driver that is resumed; `holdfast demo`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ft.faultpoints import Arrival
from holdfast.harness.chaos.outcome import training
from holdfast.harness.chaos.outcome.record import ChaosRun, load_report
from holdfast.harness.chaos.run.scenario_run import fits
from holdfast.harness.chaos.run.scenario_runner import ScenarioRunner
from holdfast.harness.chaos.run.training_processes import TrainingRecord
from holdfast.harness.chaos.scenario import (
    find_scenario,
    parse,
    scenario_names,
    scenario_path,
    schedule,
    text_of,
)
from holdfast.harness.testbed import netns
from holdfast.rl.config.toml import parse_config
from holdfast.rl.run.run_events import EpisodeFailed, Event, RunResumed, StepTrained, WeightsServed
from support.event_records import trained
from support.programs.forked_programs import run_python, said
from support.waiting import PROGRAM_SECONDS, becomes_true

pytestmark = pytest.mark.timeout(400)
STEPS = 16
RUN = text_of(scenario_path("rl-driver-killed")).partition("[[fault]]")[0]
RUN = RUN.replace("\nsteps = 24", f"\nsteps = {STEPS}").replace("prompts = 32", "prompts = 16")
RUN += """
[workload.run.checkpoint]
every = 4
[workload.run.engine]
kind = "local"
"""
IN_EVERY_ROLE = """
[[fault]]
type = "kill"
at.point = "train.in_reduction"
at.in_step = 3
at.rank = 1
[[fault]]
type = "kill"
at.point = "generate.between_tokens"
at.in_step = 6
[[fault]]
type = "kill"
who = "holder"
at.step = 8
[[fault]]
type = "pause"
who = "generator"
at.step = 10
[expect]
ranks = 2
rebuilds = [1, 1]
progress = 90.0
"""
OF_THE_DRIVER = """
[[fault]]
type = "kill"
at.point = "loop.after_step"
at.in_step = 10
[expect]
progress = 90.0
"""


@pytest.fixture(scope="module")
def runner() -> ScenarioRunner:
    """One runner for all tests: they are compared with the same run without faults."""
    return ScenarioRunner()


def played(runner: ScenarioRunner, faults: str) -> ChaosRun:
    return runner.run(parse(RUN + faults, "test", "test.toml"), 0).report


@pytest.mark.thorough
def test_a_run_outlives_faults_in_every_role_and_ends_with_the_same_bits(runner: ScenarioRunner) -> None:
    run = played(runner, IN_EVERY_ROLE)
    assert run.passed, run.failures
    assert run.digest == run.reference_digest != ""
    assert run.speed.steps == STEPS
    assert [fault.victims[0].split("-")[0] for fault in run.strikes] == ["trainer", "generator", "holder", "generator"]
    *stages, last = [[stage.name for stage in fault.stages] for fault in run.strikes]
    assert stages == [["detected", "rebuilt", "resumed"]] * 3
    assert last[0] == "detected", "the other generator may do the last steps before this one is replaced"
    killed = {fault.victims[0] for fault in run.strikes}
    assert {life.name: life.fate for life in run.lives if life.fate != "finished"} == dict.fromkeys(killed, "killed")
    looked = {finding.invariant: finding.looked for finding in run.findings}
    assert looked[training.PROMPTS] == 8 * STEPS
    assert looked[training.RECOVERY] == 4
    assert looked["committed steps are kept"] > STEPS


@pytest.mark.thorough
def test_a_driver_that_is_killed_is_resumed(runner: ScenarioRunner) -> None:
    run = played(runner, OF_THE_DRIVER)
    assert run.passed, run.failures
    assert run.digest == run.reference_digest != ""
    roles = [life.role for life in run.lives]
    assert roles.count("driver") == 2
    assert all(life.fate == "finished" for life in run.lives if life.name.endswith("/2"))
    (fault,) = run.strikes
    assert fault.victims == ("driver",)
    assert [stage.name for stage in fault.stages] == ["detected", "rebuilt", "resumed"]


# -- what is checked


def record(drivers: tuple[tuple[Event, ...], ...], left: tuple[str, ...] = ()) -> TrainingRecord:
    config = parse_config(
        'steps = 6\n[algorithm]\nmode = "asynchronous"\ngroups = 4\nstaleness = 1\n[trainer]\nunits = 4\n', "test"
    )
    return TrainingRecord(config=config, drivers=drivers, groups=(), left=left)


def step(number: int, behind: int = 0) -> StepTrained:
    return trained(number, staleness=(behind,) * 4, prompts=tuple(range(4 * number, 4 * number + 4)))


def committed(first: int, last: int) -> tuple[Event, ...]:
    """The events of the steps from `first` to before `last`."""
    found: list[Event] = []
    for number in range(first, last):
        served = WeightsServed(time=number + 0.2, version=number + 1, process="generator-0", seconds=0.1)
        found += [step(number), served]
    return tuple(found)


def violated(drivers: tuple[tuple[Event, ...], ...], left: tuple[str, ...] = ()) -> set[str]:
    return {each.invariant for each in training.examine(record(drivers, left), (), 5.0) if each.violations}


@given(cut=st.integers(1, 5), back=st.integers(0, 5))
def test_a_run_that_was_resumed_from_any_checkpoint_holds(cut: int, back: int) -> None:
    begin = max(0, cut - back)
    assert violated((committed(0, cut), (RunResumed(time=9.0, step=begin), *committed(begin, 6)))) == set()


@given(lost=st.integers(0, 5))
def test_a_step_that_is_left_out_or_trained_twice_is_seen(lost: int) -> None:
    events = tuple(each for each in committed(0, 6) if not (isinstance(each, StepTrained) and each.step == lost))
    assert training.STEPS in violated((events,))
    assert violated(((*committed(0, lost + 1), *committed(lost, 6)),)) == {training.STEPS}


@given(seed=st.integers(0, 1000))
def test_prompts_that_are_trained_twice_or_left_out_are_seen(seed: int) -> None:
    dice = random.Random(seed)
    events = list(committed(0, 6))
    index, chosen = dice.choice([(n, each) for n, each in enumerate(events[6:], 6) if isinstance(each, StepTrained)])
    twice = (*chosen.prompts[:3], dice.randrange(4 * chosen.step))
    events[index] = msgspec.structs.replace(chosen, prompts=twice)
    assert violated((tuple(events),)) == {training.PROMPTS}
    assert violated((jumped(chosen.step),)) == {training.PROMPTS}, "more than the staleness admits to be unfinished"


def jumped(first: int) -> tuple[Event, ...]:
    """The events of six steps, of which five prompts are left out at step `first`."""
    return tuple(
        msgspec.structs.replace(each, prompts=tuple(prompt + 5 for prompt in each.prompts))
        if isinstance(each, StepTrained) and each.step >= first
        else each
        for each in committed(0, 6)
    )


def test_a_prompt_whose_episode_went_on_elsewhere_is_trained_and_one_that_failed_need_not_be() -> None:
    for again, wrong in ((False, ()), (True, (training.PROMPTS,))):
        failures = tuple(EpisodeFailed(time=0.0, prompt=prompt, reason="gone", again=again) for prompt in range(5))
        assert violated((failures + jumped(0),)) == set(wrong)


def test_stale_tokens_lost_versions_and_left_processes_are_seen() -> None:
    stale = (*committed(0, 5), step(5, behind=2), *committed(5, 6)[1:])
    assert violated((stale,)) == {training.STALENESS}
    events = committed(0, 6)
    assert violated((events[:-1],)) == {training.VERSIONS}
    assert violated((events,), ("generator-0 (pid 7)",)) == {training.NOTHING_LEFT}


def test_a_recovery_that_takes_too_long_is_seen() -> None:
    late = (*committed(0, 3), *(msgspec.structs.replace(each, time=each.time + 20.0) for each in committed(3, 6)))
    results = training.examine(record((late,)), (1.5, 2.5), 5.0)
    (found,) = (each for each in results if each.invariant == training.RECOVERY)
    assert found.looked == 2
    assert [each.time for each in found.violations] == [2.5]


# -- scenarios of this kind


def test_a_point_with_a_random_step_waits_from_that_step_on() -> None:
    faults = '[[fault]]\ntype = "kill"\nat.point = "generate.between_tokens"\nat.random = [0.5, 0.75]\n'
    scenario = parse(RUN + faults, "test", "test.toml")
    steps = {schedule(scenario, seed)[0].when.since for seed in range(20)}
    assert len(steps) > 1 and all(STEPS // 2 - 1 <= step < STEPS for step in steps)
    (planned,) = schedule(scenario, 0)
    arrivals = [Arrival(1, "generate.between_tokens", step, -1, 0) for step in range(STEPS)]
    assert [each.step for each in arrivals if fits(each, planned.when)] == list(range(planned.when.since, STEPS))


def test_the_library_breaks_every_role() -> None:
    scenarios = [find_scenario(name) for name in scenario_names() if name.startswith("rl-") and name != "rl-demo"]
    assert len(scenarios) >= 6
    struck = {name for each in scenarios for fault in each.faults for name in getattr(fault.what, "names", ())}
    points = {fault.at.point for each in scenarios for fault in each.faults}
    assert {"environment", "generator", "holder", "trainer"} <= struck
    assert {"train.in_reduction", "generate.between_tokens", "loop.after_step"} <= points


# -- holdfast demo: a run on Monarch recovers from faults in every role, reports them, and ends in order

needs_monarch = pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")


def command(*arguments: str) -> list[str]:
    return ["-m", "holdfast.harness.cli.app", "demo", *arguments]


def demonstrated(*arguments: str, folder: Path) -> dict[str, Any]:
    """What a demo prints that held, with its report in a folder."""
    asked = command(*arguments, "--json", "--report", str(folder))
    summary: dict[str, Any] = json.loads(run_python(*asked, timeout=350.0))
    assert summary["passed"] and summary["violations"] == []
    return summary


@pytest.mark.thorough
@needs_monarch
def test_every_role_is_struck_and_recovers_nothing_is_lost_and_the_report_shows_it(tmp_path: Path) -> None:
    """A short run with all faults."""
    summary = demonstrated("--steps", "24", "--seed", "3", folder=tmp_path)
    assert summary["steps"] == 24
    assert summary["looked"][training.PROMPTS] == 64 * 24
    struck = [fault["process"].split("-")[0] for fault in summary["faults"]]
    assert struck == ["trainer", "generator", "environment", "holder", "environment"]
    assert summary["faults"][-1]["process"].split(", ")[1].startswith("generator-"), "and a generator at the same time"
    for fault in summary["faults"]:
        times = list(fault["recovery"].values())
        assert next(iter(fault["recovery"])) == "detected", fault
        assert times == sorted(times)
    page = (tmp_path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "What was learnt" in page and "Policy tokens a second" in page
    assert "rl-demo-episodes.html" in page
    assert "holdfast demo --seed 3 --steps 24" in page
    assert "class=" in (tmp_path / "rl-demo-episodes.html").read_text()
    (run,) = load_report(tmp_path).runs
    assert {life.role for life in run.lives} >= {"driver", "trainer", "generator", "holder", "environment"}
    assert {span.process for span in run.spans} <= {life.name for life in run.lives}


@pytest.mark.thorough
@needs_monarch
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, short: Path, number: int) -> None:
    environ = {**os.environ, "TMPDIR": str(short)}
    with subprocess.Popen(
        [sys.executable, *command("--steps", "100000", "--report", str(tmp_path / "report"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready after" in line:
                break
        descendants = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        assert len(descendants) >= 4
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(PROGRAM_SECONDS) == (130 if number == signal.SIGINT else 128 + number), output
    assert becomes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in descendants))
    assert not list(short.glob("holdfast-chaos*"))


@pytest.mark.thorough
@needs_monarch
@pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}")
@pytest.mark.parametrize("backend", ["ucx", "gloo"])
def test_a_host_of_a_run_is_lost_and_nothing_with_it(tmp_path: Path, backend: str) -> None:
    asked = ("--hosts", "3", "--steps", "12", "--backend", backend)
    summary = demonstrated(*asked, folder=tmp_path)
    assert summary["steps"] == 12
    assert summary["looked"][training.STEPS] == 12 and summary["looked"][training.PROMPTS] == 32 * 12
    assert summary["looked"][training.VERSIONS] > 12 and summary["looked"][training.COPIES] > 0
    (run,) = load_report(tmp_path).runs
    assert run.backend == backend
    (loss,) = run.host_losses
    assert {name.split("-")[0] for name in loss.processes} == {"trainer", "generator", "holder"}
    assert loss.step is not None and loss.answer is not None and loss.copies is not None, loss
    gone = {life.name for life in run.lives if life.fate == "killed"}
    assert gone == set(loss.processes)
    page = (tmp_path / "report.html").read_text()
    assert "Host lost to next step" in page and "holdfast demo --seed 0 --steps 12 --hosts 3" in page


@needs_monarch
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "0"), "steps"),
        (("--hosts", "3"), "it takes root"),
        (("--backend", "gloo"), "--backend is for several hosts"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = said("demo", "--report", tmp_path, *arguments)
    assert done.exit_code == 2 and words in done.stderr, done.output
    assert not (tmp_path / "run.json").exists()
