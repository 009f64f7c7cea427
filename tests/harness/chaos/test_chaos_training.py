"""Chaos over reinforcement learning: real kills in every role, a driver that is resumed, and the checks of a run."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ft.faultpoints import Arrival
from holdfast.harness.chaos.outcome import training
from holdfast.harness.chaos.outcome.record import ChaosRun
from holdfast.harness.chaos.run.scenario_run import fits
from holdfast.harness.chaos.run.scenario_runner import ScenarioRunner
from holdfast.harness.chaos.run.training_processes import TrainingRecord
from holdfast.harness.chaos.scenario import BadScenario, find_scenario, parse, scenario_names, schedule
from holdfast.rl.config.toml import parse_config
from holdfast.rl.run.run_events import EpisodeFailed, Event, RunResumed, StepTrained, WeightsServed

STEPS = 16
RUN = f"""
title = "reinforcement learning"
limit = 200.0
[workload]
kind = "rl"
[workload.run]
steps = {STEPS}
[workload.run.model]
warmup_steps = 4
warmup_batch = 64
[workload.run.algorithm]
mode = "synchronous"
groups = 8
staleness = 0
[workload.run.sampling]
group = 4
max_new_tokens = 2
batch = 4
[workload.run.evaluation]
every = 8
prompts = 16
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
@pytest.mark.timeout(400)
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
@pytest.mark.timeout(400)
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


def step(number: int, prompts: tuple[int, ...] | None = None, behind: int = 0) -> StepTrained:
    return StepTrained(
        time=float(number),
        step=number,
        reward=0.5,
        loss=0.1,
        gradient_norm=1.0,
        tokens=8,
        staleness=(behind,) * 4,
        epoch=1,
        size=2,
        prompts=tuple(range(4 * number, 4 * number + 4)) if prompts is None else prompts,
    )


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
    index, trained = dice.choice([(n, each) for n, each in enumerate(events[6:], 6) if isinstance(each, StepTrained)])
    twice = (*trained.prompts[:3], dice.randrange(4 * trained.step))
    events[index] = msgspec.structs.replace(trained, prompts=twice)
    assert violated((tuple(events),)) == {training.PROMPTS}
    assert violated((jumped(trained.step),)) == {training.PROMPTS}, "more than the staleness admits to be unfinished"


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


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("steps = 16", "step = 16"), 7, "workload.run.step: no such field; did you mean 'steps'?"),
        (("groups = 8", "groups = 0"), 13, "workload.run.algorithm.groups: 0 is not allowed"),
        (('"synchronous"', '"asynchronous"'), 44, 'only the loop of workload.run.algorithm.mode = "synchronous"'),
        (('kind = "rl"', 'kind = "rl"\nsteps = 3'), 6, "workload.steps: no such field; did you mean"),
        (('"local"\n', '"local"\n[job]\nranks = 2\n'), 26, "its processes in workload.run"),
        (("train.in_reduction", "train.somewhere"), 27, "no point 'train.somewhere'"),
        (('who = "holder"', 'who = "reader"'), 36, "there are driver, trainer, spare, generator, holder"),
    ],
)
def test_what_a_scenario_of_this_kind_cannot_have_is_refused_with_its_line(
    change: tuple[str, str], line: int, words: str
) -> None:
    text = (RUN + IN_EVERY_ROLE).replace(*change)
    with pytest.raises(BadScenario) as refused:
        parse(text, "test", "test.toml")
    assert words in str(refused.value)
    assert refused.value.line == line


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
