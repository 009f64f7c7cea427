"""Runs that play in an environment: its servers die, stop and hang, and the weights have the same bits."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from holdfast.harness.training.command import write_pages
from holdfast.harness.training.report import RunFacts
from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.prompts import arithmetic_training
from holdfast.rl.errors import UnknownEnvironment
from holdfast.rl.run.evaluation import evaluate_source
from holdfast.rl.run.run_directory import RunDirectory, read_status
from holdfast.rl.run.run_events import EpisodeFailed, Evaluated, ProcessStarted, StepTrained
from holdfast.rl.run.saved_versions import SavedVersions
from support.rl import training_runs
from support.rl.environment_servers import server_process
from support.rl.started_monarch import start_monarch_once
from support.rl.training_runs import Killer, invoke, run

pytestmark = pytest.mark.timeout(300)

STEPS = 8
GUESS = """
[environment]
name = "guess"
arguments = { high = 5, turns = 3 }
servers = 1
sessions = 8
timeout = 20.0
"""
EVALUATED: dict[str, object] = {"evaluation__every": 4, "evaluation__prompts": 6, "telemetry__episodes": 16}


def configured(**overrides: object) -> RunConfig:
    return training_runs.configured(GUESS, **{"steps": STEPS, "sampling__max_new_tokens": 1} | EVALUATED | overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunDirectory]:
    """The digest of the last weights of a run in which nothing dies, and its directory."""
    path = tmp_path_factory.mktemp("run")
    return run(configured(environment__sessions=16), path).digest, RunDirectory(path)


def test_a_group_is_of_several_turns_and_learns_from_the_tokens_of_the_policy_alone(
    undisturbed: tuple[str, RunDirectory],
) -> None:
    _, directory = undisturbed
    groups = list(directory.groups())
    assert sorted(group.number for group in groups) == list(range(4 * STEPS))
    for group in groups:
        assert {each.prompt for each in group.episodes} == {group.prompt}
        assert group.prompt.text == "guess a number from 1 to 5"
        for each in group.episodes:
            assert sum(each.mask) == each.turns <= 3, "a token a turn"
            assert each.reward == 1.0 if each.turns < 3 else each.reward in (0.0, 1.0)
            drawn = {version for version, mine in zip(each.versions, each.mask, strict=True) if mine}
            assert drawn == {group.number // 4}, "of the version of the step"
    assert [event.version for event in directory.events() if isinstance(event, Evaluated)] == [0, 4, 8]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["local", "monarch"])
def test_the_weights_have_the_same_bits_when_servers_are_killed_and_stopped(
    tmp_path: Path, undisturbed: tuple[str, RunDirectory], kind: str
) -> None:
    """There is one server: what dies with it goes on in the next, after the same actions."""
    killer = Killer({1: ("environment", signal.SIGKILL), 4: ("environment", signal.SIGSTOP)})
    engine: Any = LocalEngine if kind == "local" else start_monarch_once()
    result = run(configured(), tmp_path, killer, engine)
    digest, quiet = undisturbed
    assert result.digest == digest
    assert list(RunDirectory(tmp_path).groups()) == list(quiet.groups()), "no prompt is skipped, or trained twice"
    assert len(killer.struck) == 2 and set(killer.struck) <= killer.lost
    started = [each for each in RunDirectory(tmp_path).events() if isinstance(each, ProcessStarted)]
    replaced = [each.replaces for each in started if each.role == "environment"]
    assert replaced == ["", *killer.struck], "each is replaced by the next"
    trained = [event.step for event in RunDirectory(tmp_path).events() if isinstance(event, StepTrained)]
    assert trained == list(range(STEPS))


@pytest.mark.thorough
def test_saved_weights_are_evaluated_in_the_environment_as_in_the_run(tmp_path: Path) -> None:
    config = configured(steps=4)
    best = run(config, tmp_path).best
    saved = SavedVersions(config, RunDirectory(tmp_path))
    assert best is not None and saved.best == best.version
    found = asyncio.run(evaluate_source(config, saved.source(saved.find("best"), tmp_path / "scratch")))
    assert (found.reward, found.failed, len(found.answers)) == (best.reward, 0, 6)
    assert {each.prompt for each in found.answers} == {"guess a number from 1 to 5"}
    assert found.tokens >= 6 and all(each.answer for each in found.answers)
    shown = invoke("rl", "eval", tmp_path, "--prompts", "3")
    assert shown.exit_code == 0 and "3 held-out episodes" in shown.output, shown.output


MIXED = {
    "environment__name": "arithmetic",
    "environment__arguments": '{split="train"}',
    "environment__share": 0.25,
    "environment__max_turns": 1,
    "model__warmup_steps": 4,
    "sampling__max_new_tokens": 2,
    "steps": 4,
}


@pytest.mark.thorough
def test_a_share_of_the_groups_is_played_beside_prompts_and_outlives_the_servers_too(tmp_path: Path) -> None:
    quiet = run(configured(**MIXED), tmp_path / "quiet")
    killer = Killer({0: ("environment", signal.SIGKILL), 2: ("environment", signal.SIGSTOP)})
    result = run(configured(**MIXED), tmp_path / "struck", killer)
    assert result.digest == quiet.digest
    assert len(killer.struck) == 2 and set(killer.struck) <= killer.lost
    groups = {group.number: group for group in RunDirectory(tmp_path / "struck").groups()}
    assert sorted(groups) == list(range(16))
    known = {problem.prompt: problem.answer for problem in arithmetic_training()}
    for number, group in groups.items():
        assert group.prompt.text in known, "no problem is one that is held out"
        played = not group.prompt.answer
        assert played == (number % 4 == 3), "every fourth group"
    status = read_status(RunDirectory(tmp_path / "struck").status_file)
    assert status is not None and [each.name for each in status.services] == ["holder", "generator", "environment"]
    assert status.services[-1].lost == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"environment__name": "chess"}, "environment 'chess.*': there are arithmetic, guess"),
        ({"environment__arguments": "{deep=3}"}, "there is no option 'deep'; there are: high, turns"),
        (
            {
                "environment__servers": 0,
                "environment__arguments": "{}",
                "environment__addresses": '["ws://127.0.0.1:9"]',
            },
            "environment 'guess': no server of it can be used: connect of environment ws://127.0.0.1:9",
        ),
        ({"environment__max_tokens": 10}, "its first observation is 27 tokens long"),
    ],
)
def test_an_environment_that_is_not_there_is_named_before_anything_starts(
    tmp_path: Path, overrides: dict[str, object], words: str
) -> None:
    with pytest.raises(UnknownEnvironment, match=words):
        run(configured(**overrides), tmp_path)
    roles = Counter(each.role for each in RunDirectory(tmp_path).events() if isinstance(each, ProcessStarted))
    assert roles.keys() <= {"driver", "environment"}


@pytest.mark.thorough
def test_a_run_plays_at_a_server_that_it_did_not_start(tmp_path: Path) -> None:
    with server_process("guess?high=5&turns=3") as server:
        changes: dict[str, object] = {"environment__servers": 0, "environment__arguments": "{}"}
        changes |= {"environment__addresses": f'["{server.url}"]'}
        assert run(configured(**changes, steps=2), tmp_path).steps == 2


@pytest.mark.thorough
def test_what_servers_and_holders_did_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.rl.run.telemetry.EVERY", 0.1)  # the run is short
    run(configured(steps=6, store__holders=2, store__copies=2), tmp_path / "run")
    facts = RunFacts.of(RunDirectory(tmp_path / "run").events())
    steps = [each for each in facts.activities if (each.role, each.what) == ("environment", "step")]
    assert sum(each.number for each in steps) >= 6 * 16, "an episode has a step at least"
    assert len(steps) < 6 * 16, "calls at the same time are one span"
    [use] = [each for each in facts.uses() if each.role == "environment"]
    assert use.processes == 1 and 0 < use.busy < 1 and use.idle_seconds > 0
    [spent] = [each for each in facts.processor_uses() if each.role == "environment"]
    assert 0 < dict(spent.work)["step"] < spent.seconds
    assert {each.what for each in facts.activities if each.role == "holder"} == {"replicate"}
    (tmp_path / "report").mkdir()
    page = write_pages(tmp_path / "run", tmp_path / "report").report.read_text()
    assert "environment" in page.partition("Processor")[2]


FLAWED = """
import time
from pathlib import Path
from holdfast.rl.environments.builtin import GuessNumberEnvironment
from holdfast.rl.environments.environment import Observation

class Flawed(GuessNumberEnvironment):
    def step(self, action):
        observation = super().step(action)
        if self._secret == 1:
            return Observation(text="?", reward=float("nan"))
        try:
            Path(__file__).with_name("hung").touch(exist_ok=False)
        except FileExistsError:
            return observation
        time.sleep(600.0)
"""


@pytest.mark.thorough
def test_an_environment_of_ones_own_that_lies_or_hangs_costs_its_episodes_alone(tmp_path: Path) -> None:
    """It lies of one secret number of five, and hangs once: there another session goes on."""
    (tmp_path / "flawed.py").write_text(FLAWED)
    config = configured(environment__name=f"python:{tmp_path}/flawed.py:Flawed", environment__timeout=3.0, steps=4)
    run(config, tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    failed = [event for event in directory.events() if isinstance(event, EpisodeFailed)]
    assert any("no answer for" in event.reason for event in failed if event.again)
    assert all("no finite number" in event.reason for event in failed if not event.again)
    left_out = {event.prompt for event in failed if not event.again}
    trained = sorted(group.number for group in directory.groups())
    assert len(set(trained)) == 16 and left_out and not left_out & set(trained)
    assert trained[-1] < 16 + len(left_out), "each prompt is trained, or one whose environment lied"
