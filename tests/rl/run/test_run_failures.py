"""What ends a run and what does not: bad input is named before any process starts, outages are outlived."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.actors.errors import ActorDied, EndpointFailed
from holdfast.rl.actors.service import ServiceOptions, ServiceReplica
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import parse_config, resolved
from holdfast.rl.errors import ConfigChanged, RunFailed, StepsDone
from holdfast.rl.generators.models import ModelMisfit
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import EpisodeFailed, Event, ProcessLost, ProcessStarted, StepTrained
from holdfast.rl.run.trainer_processes import ask_trainer
from holdfast.rl.trainers.trainer_actor import TrainerEnded, TrainerLeftOut
from support.rl.small_batches import tiny_llama
from support.rl.training_runs import SMALL, configured, invoke, run
from support.samples.actors import Counter
from support.waiting import PATIENCE

pytestmark = pytest.mark.timeout(300)

WORDS = [*"abcdefgh", "<unk>"]


def roles(directory: Path) -> set[str]:
    return {each.role for each in RunDirectory(directory).events() if isinstance(each, ProcessStarted)}


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
    directory.config_file.write_text(begun := resolved(configured()))
    shown = invoke("rl", "resume", directory.path, "--set", "trainer.rate=1e-3")
    assert shown.exit_code == 2 and "trainer.rate was 0.0005 and is 0.001; resume with the old" in shown.output
    with pytest.raises(ConfigChanged, match=r"trainer\.rate"):
        run(configured(trainer__rate=1e-3), directory.path)
    assert directory.config_file.read_text() == begun and not roles(directory.path)


def test_fewer_steps_than_a_run_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000000004").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000000004" / ".metadata").touch()
    with pytest.raises(StepsDone, match="the run has 4 steps already, and steps = 3"):
        run(configured(), tmp_path / "run")
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
PYTHON = '[[reward]]\nkind = "python"\nfunction = "{path}:fails"\n'
GAMES = '[environment]\nname = "python:{path}:Broken"\nservers = 1\nsessions = 8\n'


@pytest.mark.parametrize(
    ("section", "source"),
    [
        (PYTHON, "the reward"),
        pytest.param(GAMES, "environment 'python:.*'", marks=pytest.mark.thorough),
    ],
)
def test_what_fails_for_every_answer_ends_the_run(tmp_path: Path, section: str, source: str) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    config = configured(section.format(path=tmp_path / "broken.py"))
    said = rf"^{source} failed in 9 groups one after another, the last time: .*it cannot say.*; see to it, and resume"
    with pytest.raises(RunFailed, match=said):
        run(config, tmp_path / "run")


STEPS = 12
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
ASYNCHRONOUS = {"algorithm__mode": "asynchronous", "algorithm__staleness": 1, "sampling__group": 2}


class Outage:
    """An observer that moves the files of the run's register away at a step, and back after some seconds."""

    def __init__(self, directory: Path, step: int) -> None:
        self.over = threading.Event()
        self._directory, self._step = directory, step

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepTrained) and event.step == self._step:
            (folder,) = self._directory.glob("job-*")
            files = list(folder.glob("register.sqlite*"))
            for file in files:
                file.rename(file.with_name(f"away-{file.name}"))
            threading.Timer(AWAY_SECONDS, self._end, (files,)).start()

    def _end(self, files: list[Path]) -> None:
        for file in files:
            file.with_name(f"away-{file.name}").rename(file)
        self.over.set()


def test_no_reward_and_no_outage_ends_a_run(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = configured(PYTHON.format(path=tmp_path / "rewards.py"), steps=STEPS, **ASYNCHRONOUS)
    outage = Outage(tmp_path / "run", 3)
    assert run(config, tmp_path / "run", outage).steps == STEPS
    assert outage.over.is_set(), "the run has waited for its register"
    events = list(RunDirectory(tmp_path / "run").events())
    steps = [each for each in events if isinstance(each, StepTrained)]
    assert [each.step for each in steps] == list(range(STEPS))
    assert not [each for each in events if isinstance(each, ProcessLost)]
    failed = [each for each in events if isinstance(each, EpisodeFailed)]
    assert failed and {each.prompt for each in failed} <= {2, 3, 6, *range(1, 400, 4)}
    trained = [prompt for each in steps for prompt in each.prompts]
    assert len(trained) == len(set(trained)) == 4 * STEPS, "the next prompts take the places of those that failed"
    assert not set(trained) & {each.prompt for each in failed}
    reasons = {each.prompt: each.reason for each in failed}
    assert "SystemExit" in reasons[1]
    assert "it cannot say" in reasons[2]
    assert "is nan" in reasons[3]
    assert "its process ended" in reasons[6]


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
