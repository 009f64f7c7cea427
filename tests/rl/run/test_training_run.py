"""A whole run has the same bits whichever process dies, in an environment and with TorchTitan too; what ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from holdfast.comms.transport.liveness import is_exiting
from holdfast.harness.training.command import write_pages
from holdfast.harness.training.report import RunFacts
from holdfast.rl.actors.engine import Engine, LocalEngine
from holdfast.rl.actors.errors import ActorDied, EndpointFailed
from holdfast.rl.actors.service import ServiceOptions, ServiceReplica
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import load_config, parse_config, resolved
from holdfast.rl.data.prompts import arithmetic_training
from holdfast.rl.errors import ConfigChanged, RunFailed, StepsDone, UnknownEnvironment
from holdfast.rl.generators.models import ModelMisfit
from holdfast.rl.run import run_events
from holdfast.rl.run.evaluation import evaluate_source
from holdfast.rl.run.policy import task_of
from holdfast.rl.run.run_directory import RunDirectory, read_status
from holdfast.rl.run.saved_versions import SavedVersions
from holdfast.rl.run.trainer_processes import ask_trainer
from holdfast.rl.run.training_run import RunResult
from holdfast.rl.trainers.trainer_actor import TrainerEnded, TrainerLeftOut
from holdfast.rl.trainers.training import weights_digest
from support.programs.forked_programs import run_holdfast
from support.rl import training_runs
from support.rl.environment_servers import ServerProcess
from support.rl.small_batches import tiny_llama
from support.rl.training_runs import SMALL, SPARED, Killer, invoke, run
from support.samples.actors import Counter
from support.source_tree import ROOT
from support.waiting import PATIENCE, eventually

STEPS = 12
EVERY = {"evaluation__every": 6, "checkpoint__every": 3, "telemetry__episodes": 32}


def configured(**overrides: object) -> RunConfig:
    return training_runs.configured(**{"steps": STEPS} | SPARED | EVERY | overrides)


def events_of(directory: Path, *kinds: type) -> list[Any]:
    return [event for event in RunDirectory(directory).events() if isinstance(event, kinds)]


def trained_steps(directory: Path) -> list[int]:
    return [event.step for event in events_of(directory, run_events.StepTrained)]


def check_losses(killer: Killer, directory: Path, steps: int) -> None:
    """All kills of the plan cost a process, and no step."""
    assert not killer.plan and set(killer.struck) <= killer.lost
    assert trained_steps(directory) == list(range(steps)), "no step is lost, and none is trained twice"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the last weights of a run without faults on one trainer."""
    return run(configured(trainer__replicas=1, trainer__spares=0), tmp_path_factory.mktemp("run")).digest


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "replicas"), [("ddp", 3), ("fsdp2", 2)])
def test_the_weights_are_equal_to_the_bit_on_any_number_of_trainers(
    tmp_path: Path, undisturbed: str, strategy: str, replicas: int
) -> None:
    config = configured(trainer__strategy=strategy, trainer__replicas=replicas, trainer__spares=0)
    assert run(config, tmp_path).digest == undisturbed
    saved = SavedVersions(config, RunDirectory(tmp_path))
    assert weights_digest(saved.model(STEPS).state_dict()) == undisturbed, "the checkpoint has them too"


def test_the_weights_are_equal_to_the_bit_after_kills_in_every_role(
    tmp_path: Path, undisturbed: str, make_engine: Callable[..., Engine]
) -> None:
    """Those of the best version have the reward that they had in the run."""
    stop, config = int(signal.SIGSTOP), configured()
    killer = Killer(
        {2: ("trainer", 9), 4: ("generator", 9), 6: ("holder", 9), 7: ("trainer", stop), 9: ("generator", stop)}
    )
    result = run(config, tmp_path, killer, make_engine)
    assert result.digest == undisturbed
    check_losses(killer, tmp_path, STEPS)
    saved = SavedVersions(config, RunDirectory(tmp_path))
    best = asyncio.run(evaluate_source(config, saved.source(saved.find("best"), tmp_path / "scratch")))
    assert result.best is not None and (saved.best, best.reward) == (result.best.version, result.best.reward)


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["loop.before_step:1", "loop.after_update:8"])
def test_a_driver_that_dies_at_any_point_is_resumed_to_the_same_bits(
    tmp_path: Path, undisturbed: str, point: str
) -> None:
    """Its processes die with it. On resuming, there is one trainer more."""
    file = tmp_path / "run.toml"
    file.write_text(resolved(configured()))
    fault = {**os.environ, "HOLDFAST_FAULT": f"{point}:-1"}
    killed = run_holdfast("rl", "train", file, "-d", tmp_path / "run", environ=fault)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    started = [event.pid for event in events_of(tmp_path / "run", run_events.ProcessStarted)]
    eventually(lambda: all(map(is_exiting, started)))
    result = run(configured(trainer__replicas=3), tmp_path / "run")
    assert result.digest == undisturbed
    resumed = [event.step for event in events_of(tmp_path / "run", run_events.RunResumed)]
    name, step = point.split(":")
    done = int(step) + (name != "loop.before_step")
    assert resumed in ([done // 3 * 3], [(done - 1) // 3 * 3]), "the newest checkpoint that was whole"


@pytest.mark.thorough
def test_adapters_and_small_forwards_end_with_the_same_bits_when_a_trainer_is_killed(tmp_path: Path) -> None:
    """Generators get the merged weights. The forwards are of three of the eight episodes of a part."""
    changes: dict[str, object] = {
        "steps": 6,
        "model__lora_rank": 4,
        "model__lora_alpha": 8.0,
        "model__lora_targets": '["q_proj", "v_proj"]',
        "trainer__micro_batch": 3,
        "trainer__strategy": "fsdp2",
    }
    quiet = run(configured(**changes, trainer__replicas=1, trainer__spares=0), tmp_path / "quiet")
    killer = Killer({2: ("trainer", 9)})
    assert run(configured(**changes), tmp_path / "killed", killer).digest == quiet.digest
    check_losses(killer, tmp_path / "killed", 6)


@pytest.mark.thorough
def test_asynchronous_groups_are_never_staler_than_the_bound_and_each_prompt_is_trained_once(tmp_path: Path) -> None:
    """A generator dies on the way, and its requests go to others."""
    config = configured(algorithm__mode="asynchronous", algorithm__staleness=2)
    killer = Killer({3: ("generator", 9), 7: ("trainer", 9)})
    run(config, tmp_path, killer)
    assert len(killer.struck) == 2
    assert trained_steps(tmp_path) == list(range(STEPS))
    assert max(behind for event in events_of(tmp_path, run_events.StepTrained) for behind in event.staleness) <= 2
    numbers = [group.number for group in RunDirectory(tmp_path).groups()]
    assert len(numbers) == len(set(numbers)) == 8 * STEPS


def test_a_run_that_has_ended_goes_on_to_more_steps_with_the_same_bits(tmp_path: Path, undisturbed: str) -> None:
    """After its last step the trainers meet once more, to publish: that is no step, and has no checkpoint."""
    alone = {"trainer__replicas": 1, "trainer__spares": 0, "evaluation__every": 0}
    ended = run(configured(**alone, steps=4), tmp_path)
    saved = SavedVersions(configured(**alone), RunDirectory(tmp_path))
    assert saved.find("latest") == 4 and weights_digest(saved.model(4).state_dict()) == ended.digest
    assert run(configured(**alone), tmp_path).digest == undisturbed
    assert trained_steps(tmp_path) == list(range(STEPS))


@pytest.mark.thorough
def test_a_run_whose_processes_die_again_and_again_fails_with_the_reason(tmp_path: Path) -> None:
    def kill_trainers(event: run_events.Event) -> None:
        if isinstance(event, run_events.ProcessStarted) and event.role == "trainer":
            os.kill(event.pid, signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"trainers were lost.*SIGKILL"):
        run(configured(engine__restarts=3), tmp_path, kill_trainers)


FEW = {"steps": 6, "trainer__spares": 0, "store__holders": 1, "store__copies": 1, "model__device": "cuda"}
"""No process that a test on a GPU does not need: each of them starts CUDA anew."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_the_weights_are_equal_to_the_bit_after_kills_of_trainer_and_generator(tmp_path: Path) -> None:
    quiet = run(configured(**FEW, trainer__replicas=1, generator__replicas=1), tmp_path / "quiet")
    killer = Killer({1: ("trainer", 9), 2: ("generator", 9), 3: ("generator", int(signal.SIGSTOP))})
    result = run(configured(**FEW), tmp_path / "killed", killer)
    check_losses(killer, tmp_path / "killed", 6)
    assert result.digest == quiet.digest


PYTHON = ROOT / ".venv" / "extras" / "titan" / "bin" / "python"
PROMPTS = 24

TITAN: dict[str, object] = {
    "steps": 5,
    "model__warmup_steps": 4,
    "model__warmup_batch": 64,
    "algorithm__groups": 8,
    "sampling__batch": 8,
    "trainer__kind": "titan",
    "trainer__strategy": "fsdp2",
    "trainer__replicas": 2,
    "checkpoint__every": 2,
}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="torchtitan is not installed: make extra-titan")
def test_a_run_of_torchtitan_is_resumed_evaluated_and_exported(tmp_path: Path) -> None:
    """The commands run in this interpreter, which has no TorchTitan."""
    directory, out = tmp_path / "run", tmp_path / "exported"

    def holdfast(*words: object) -> str:
        done = invoke("rl", *words)
        assert done.exit_code == 0, done.output
        return done.stdout

    (tmp_path / "run.toml").write_text(resolved(training_runs.configured(**TITAN)))
    fault = {**os.environ, "HOLDFAST_FAULT": "loop.after_step:3:-1"}
    killed = run_holdfast("rl", "train", tmp_path / "run.toml", "-d", directory, environ=fault, timeout=280.0)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    result = json.loads(holdfast("resume", directory, "--json"))
    [again] = [each.step for each in events_of(directory, run_events.RunResumed)]
    assert again in (2, 4), "the newest checkpoint that was whole"
    unrecorded = {3} if again == 4 else set()  # the driver died after step 3, and before it wrote of it
    assert set(trained_steps(directory)) == set(range(5)) - unrecorded

    saved = SavedVersions(load_config(directory / "config.toml"), RunDirectory(directory))
    assert saved.find("latest") == 5
    shown = holdfast("eval", directory, "--version", "latest", "--prompts", PROMPTS, "--json")
    answers = json.loads(shown)["result"]["answers"]
    holdfast("export", directory, out, "--version", "latest")

    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert weights_digest(model.state_dict()) == result["digest"], "the weights that the trainers published"
    first = saved.model(0).state_dict()
    assert all(not each.equal(first[name]) for name, each in model.state_dict().items() if "norm" not in name)
    task = task_of(load_config(directory / "config.toml"))
    assert task.held_out is not None and len(answers) == PROMPTS
    for number, answer in enumerate(answers):
        prompt = task.held_out.prompt(number)
        given = torch.tensor([prompt.tokens])
        drawn = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=2)
        said = task.tokenizer.decode(drawn[0, len(prompt.tokens) :].tolist())
        assert (answer["prompt"], answer["answer"]) == (prompt.text, said), "transformers says the same, greedily"


GAME_STEPS = 8
GUESS = """
[environment]
name = "guess"
arguments = { high = 5, turns = 3 }
servers = 1
sessions = 8
timeout = 20.0
"""
EVALUATED: dict[str, object] = {"evaluation__every": 4, "evaluation__prompts": 6, "telemetry__episodes": 16}


def at(url: str) -> dict[str, object]:
    """What lets a run play at a server that it does not start."""
    return {"environment__servers": 0, "environment__arguments": "{}", "environment__addresses": f'["{url}"]'}


def playing(**overrides: object) -> RunConfig:
    return training_runs.configured(
        GUESS, **{"steps": GAME_STEPS, "sampling__max_new_tokens": 1} | EVALUATED | overrides
    )


Game = tuple[RunResult, Path]


@pytest.fixture(scope="module")
def undisturbed_game(tmp_path_factory: pytest.TempPathFactory) -> Game:
    """The result of a run in which nothing dies, and its directory."""
    path = tmp_path_factory.mktemp("run")
    return run(playing(environment__sessions=16), path), path


def test_a_group_is_of_several_turns_and_learns_from_the_tokens_of_the_policy_alone(undisturbed_game: Game) -> None:
    _, path = undisturbed_game
    groups = list(RunDirectory(path).groups())
    assert sorted(group.number for group in groups) == list(range(4 * GAME_STEPS))
    for group in groups:
        assert {each.prompt for each in group.episodes} == {group.prompt}
        assert group.prompt.text == "guess a number from 1 to 5"
        for each in group.episodes:
            assert sum(each.mask) == each.turns <= 3, "a token a turn"
            assert each.reward == 1.0 if each.turns < 3 else each.reward in (0.0, 1.0)
            drawn = {version for version, mine in zip(each.versions, each.mask, strict=True) if mine}
            assert drawn == {group.number // 4}, "of the version of the step"
    assert [event.version for event in events_of(path, run_events.Evaluated)] == [0, 4, 8]


@pytest.mark.thorough
def test_the_weights_have_the_same_bits_when_servers_are_killed_and_stopped(
    tmp_path: Path, undisturbed_game: Game, make_engine: Callable[..., Engine]
) -> None:
    """There is one server: what dies with it goes on in the next, after the same actions."""
    killer = Killer({1: ("environment", signal.SIGKILL), 4: ("environment", signal.SIGSTOP)})
    result = run(playing(), tmp_path, killer, make_engine)
    quiet, path = undisturbed_game
    assert result.digest == quiet.digest
    groups = list(RunDirectory(path).groups())
    assert list(RunDirectory(tmp_path).groups()) == groups, "no prompt is skipped, or trained twice"
    check_losses(killer, tmp_path, GAME_STEPS)
    started = events_of(tmp_path, run_events.ProcessStarted)
    replaced = [each.replaces for each in started if each.role == "environment"]
    assert replaced == ["", *killer.struck], "each is replaced by the next"


@pytest.mark.thorough
def test_saved_weights_are_evaluated_in_the_environment_as_in_the_run(tmp_path: Path, undisturbed_game: Game) -> None:
    config, (result, path) = playing(environment__sessions=16), undisturbed_game
    best, saved = result.best, SavedVersions(config, RunDirectory(path))
    assert best is not None and saved.best == best.version
    found = asyncio.run(evaluate_source(config, saved.source(saved.find("best"), tmp_path / "scratch")))
    assert (found.reward, found.failed, len(found.answers)) == (best.reward, 0, 6)
    assert {each.prompt for each in found.answers} == {"guess a number from 1 to 5"}
    assert found.tokens >= 6 and all(each.answer for each in found.answers)
    shown = invoke("rl", "eval", path, "--prompts", "3")
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
    quiet = run(playing(**MIXED), tmp_path / "quiet")
    killer = Killer({0: ("environment", signal.SIGKILL), 2: ("environment", signal.SIGSTOP)})
    result = run(playing(**MIXED), tmp_path / "struck", killer)
    assert result.digest == quiet.digest
    check_losses(killer, tmp_path / "struck", 4)
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
        (
            at("ws://127.0.0.1:9"),
            "environment 'guess': no server of it can be used: connect of environment ws://127.0.0.1:9",
        ),
        ({"environment__max_tokens": 10}, "its first observation is 27 tokens long"),
    ],
)
def test_an_environment_that_is_not_there_is_named_before_anything_starts(
    tmp_path: Path, overrides: dict[str, object], words: str
) -> None:
    with pytest.raises(UnknownEnvironment, match=words):
        run(playing(**overrides), tmp_path)
    assert roles(tmp_path) <= {"driver", "environment"}


@pytest.mark.thorough
def test_a_run_plays_at_a_server_that_it_did_not_start(tmp_path: Path) -> None:
    with ServerProcess("guess?high=5&turns=3") as server:
        assert run(playing(**at(server.url), steps=2), tmp_path).steps == 2


@pytest.mark.thorough
def test_what_servers_and_holders_did_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.rl.run.telemetry.EVERY", 0.1)  # the run is short
    run(playing(steps=6, store__holders=2, store__copies=2), tmp_path / "run")
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
    config = playing(environment__name=f"python:{tmp_path}/flawed.py:Flawed", environment__timeout=3.0, steps=4)
    run(config, tmp_path / "run")
    failed = events_of(tmp_path / "run", run_events.EpisodeFailed)
    assert any("no answer for" in event.reason for event in failed if event.again)
    assert all("no finite number" in event.reason for event in failed if not event.again)
    left_out = {event.prompt for event in failed if not event.again}
    trained = sorted(group.number for group in RunDirectory(tmp_path / "run").groups())
    assert len(set(trained)) == 16 and left_out and not left_out & set(trained)
    assert trained[-1] < 16 + len(left_out), "each prompt is trained, or one whose environment lied"


WORDS = [*"abcdefgh", "<unk>"]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def roles(directory: Path) -> set[str]:
    return {each.role for each in events_of(directory, run_events.ProcessStarted)}


def a_model(
    folder: Path, *, words: int = 9, positions: int = 16, tokenizer: bool = True, overrides: Sequence[str] = ()
) -> RunConfig:
    """A configuration with a small model in `folder` that has so many words and positions, and prompts for it."""
    tiny_llama(words, positions=positions).build().save_pretrained(folder / "model")
    if tokenizer:
        known = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
        known.pre_tokenizer = pre_tokenizers.Whitespace()
        make: Any = PreTrainedTokenizerFast
        make(tokenizer_object=known, unk_token="<unk>").save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "a b c d e", "answer": "a"}))
    paths = f"""[model]\npath = "{folder}/model"\n[data]\ntask = "jsonl"\ntrain = "{folder}/train.jsonl"\n"""
    return parse_config(SMALL + paths, "test", overrides)


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        ({"words": 8}, (), "it has 8 tokens, and its tokenizer 9"),
        ({"positions": 6}, (), "the longest prompt and sampling.max_new_tokens make 7 tokens, and it attends to 6"),
        ({"tokenizer": False}, (), "its folder has no tokenizer"),
        ({}, ("sampling.stop=[3, 9]",), "sampling.stop has the token 9, and its tokens are 0 to 8"),
        ({}, ("model.lora_rank=2", 'model.lora_targets=["q_prox"]'), "q_prox"),
        pytest.param({}, ("model.device=cuda",), "sees no GPU", marks=NO_GPU),
    ],
)
def test_a_model_that_does_not_fit_is_named_before_anything_starts(
    tmp_path: Path, model: dict[str, int], overrides: tuple[str, ...], said: str
) -> None:
    config = a_model(tmp_path, **model, overrides=overrides)
    with pytest.raises(ModelMisfit, match=said):
        run(config, tmp_path / "run")
    assert roles(tmp_path / "run") == set(), "a run that is refused has not begun"


def test_another_configuration_is_refused_by_resume_and_changes_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config_file.write_text(begun := resolved(training_runs.configured()))
    shown = invoke("rl", "resume", directory.path, "--set", "trainer.rate=1e-3")
    assert shown.exit_code == 2 and "trainer.rate was 0.0005 and is 0.001; resume with the old" in shown.output
    with pytest.raises(ConfigChanged, match=r"trainer\.rate"):
        run(training_runs.configured(trainer__rate=1e-3), directory.path)
    assert directory.config_file.read_text() == begun and not roles(directory.path)


def test_fewer_steps_than_a_run_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000000004").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000000004" / ".metadata").touch()
    with pytest.raises(StepsDone, match="the run has 4 steps already, and steps = 3"):
        run(training_runs.configured(), tmp_path / "run")
    assert roles(tmp_path / "run") == set()


def test_trainers_that_cannot_begin_end_the_run_while_generators_wait_for_weights(tmp_path: Path) -> None:
    """A damaged checkpoint is seen in the trainers' threads, once all processes have started."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000000001"
    checkpoint.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (checkpoint / name).write_bytes(b"damaged")
    with pytest.raises(
        RunFailed, match=r"^trainer-\d has ended: the checkpoint .*step-000000001 cannot be read .*an older one$"
    ):
        run(a_model(tmp_path), tmp_path / "run")
    assert "trainer" in roles(tmp_path / "run")


BROKEN = """
from holdfast.rl.environments.builtin import GuessNumberEnvironment

def fails(answer):
    raise ArithmeticError("it cannot say")

class Broken(GuessNumberEnvironment):
    def step(self, action):
        raise ArithmeticError("it cannot say")
"""
REWARD = '[[reward]]\nkind = "python"\nfunction = "{path}:fails"\n'
GAMES = '[environment]\nname = "python:{path}:Broken"\nservers = 1\nsessions = 8\n'


@pytest.mark.parametrize(
    ("section", "source"),
    [(REWARD, "the reward"), pytest.param(GAMES, "environment 'python:.*'", marks=pytest.mark.thorough)],
)
def test_what_fails_for_every_answer_ends_the_run(tmp_path: Path, section: str, source: str) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    config = training_runs.configured(section.format(path=tmp_path / "broken.py"))
    said = rf"^{source} failed in 9 groups one after another, the last time: .*it cannot say.*; see to it, and resume"
    with pytest.raises(RunFailed, match=said):
        run(config, tmp_path / "run")


AWAY_SECONDS = 4.0
"""More than any wait of the roles that is no wait for the register."""

REWARDS = """
import os, sys

def fails(answer):
    if answer.prompt.number % 4 == 1:
        sys.exit()
    if answer.prompt.number == 6:
        os._exit(0)
    if answer.prompt.number == 2:
        raise ArithmeticError("it cannot say")
    if answer.prompt.number == 3:
        return float("nan")
    return float(answer.text.strip() == answer.prompt.answer)
"""
ASYNCHRONOUS = {
    "algorithm__mode": "asynchronous",
    "algorithm__staleness": 2,
    "algorithm__updates": 2,
    "sampling__group": 2,
}


class Outage:
    """An observer that moves the files of the run's register away at a step, and back after some seconds."""

    def __init__(self, directory: Path, step: int) -> None:
        self.over = threading.Event()
        self._directory, self._step = directory, step

    def __call__(self, event: run_events.Event) -> None:
        if isinstance(event, run_events.StepTrained) and event.step == self._step:
            files = list(self._directory.glob("job-*/register.sqlite*"))
            away = [file.rename(file.with_name(f"away-{file.name}")) for file in files]
            threading.Timer(AWAY_SECONDS, self._end, (away, files)).start()

    def _end(self, away: list[Path], files: list[Path]) -> None:
        for here, there in zip(away, files, strict=True):
            here.rename(there)
        self.over.set()


def test_no_reward_and_no_outage_ends_a_run(tmp_path: Path) -> None:
    """Its batches are recorded with both of their updates."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = training_runs.configured(REWARD.format(path=tmp_path / "rewards.py"), steps=STEPS, **ASYNCHRONOUS)
    outage = Outage(tmp_path / "run", 4)
    assert run(config, tmp_path / "run", outage).steps == STEPS
    assert outage.over.is_set(), "the run has waited for its register"
    steps = events_of(tmp_path / "run", run_events.StepTrained)
    assert [(each.step, each.version) for each in steps] == [(step, step + 2) for step in range(0, STEPS, 2)]
    assert not events_of(tmp_path / "run", run_events.ProcessLost)
    failed = events_of(tmp_path / "run", run_events.EpisodeFailed)
    assert failed and {each.prompt for each in failed} <= {2, 3, 6, *range(1, 400, 4)}
    trained = [prompt for each in steps for prompt in each.prompts]
    assert len(trained) == len(set(trained)) == 4 * STEPS // 2, "the next prompts take the places of those that failed"
    assert not set(trained) & {each.prompt for each in failed}
    reasons = {each.prompt: each.reason for each in failed}
    for prompt, words in ((1, "SystemExit"), (2, "it cannot say"), (3, "is nan"), (6, "its process ended")):
        assert words in reasons[prompt]


async def test_a_trainer_that_was_evicted_is_replaced_and_other_errors_leave_its_process() -> None:
    members: asyncio.Queue[ServiceReplica] = asyncio.Queue()
    spec = ServiceOptions(Counter, prepare=members.put)
    async with asyncio.timeout(PATIENCE), LocalEngine(), await spec.as_service() as counter:
        member = await members.get()
        with pytest.raises(RunFailed, match=r"^counter-0 has ended: nothing is committed$"):
            await ask_trainer(member, "fail", TrainerEnded("nothing is committed"))
        with pytest.raises(EndpointFailed, match="Traceback"):
            await ask_trainer(member, "fail", TrainerEnded("TypeError: of holdfast", fault=True))
        assert await ask_trainer(member, "add") == 1 and counter.status().lost == 0
        with pytest.raises(ActorDied, match=r"counter-0 .* cannot do fail: .*evicted in epoch 2"):
            await ask_trainer(member, "fail", TrainerLeftOut("evicted in epoch 2: silent for 3 s"))
        assert ((await members.get()).name, counter.status().lost) == ("counter-0.1", 1)
