"""What cannot work is named before any process starts; a reward that fails costs its episode, and is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from holdfast.harness.cli.app import app
from holdfast.rl.config.load import parse_config
from holdfast.rl.config.resume import resolved
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.generators.errors import ModelMisfit
from holdfast.rl.run.errors import RunFailed, StepsDone
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import EpisodeFailed, ProcessStarted, StepTrained
from support.rl.console import WIDE
from support.rl.training_runs import run

pytestmark = pytest.mark.timeout(300)

TEXT = """
steps = 3
[algorithm]
mode = "synchronous"
groups = 4
staleness = 0
[sampling]
group = 4
max_new_tokens = 2
[trainer]
replicas = 1
spares = 0
strategy = "ddp"
[generator]
replicas = 1
[store]
holders = 1
copies = 1
[engine]
kind = "local"
[evaluation]
every = 0
"""
WORDS = [*"abcdefgh", "<unk>"]


def roles(directory: Path) -> set[str]:
    return {each.role for each in RunDirectory(directory).events() if isinstance(each, ProcessStarted)}


def a_model(
    folder: Path, *, words: int, positions: int, tokenizer: bool = True, overrides: Sequence[str] = ()
) -> RunConfig:
    """A configuration with a small model in `folder` that has so many words and positions, and prompts for it."""
    config = LlamaConfig(
        vocab_size=words,
        max_position_embeddings=positions,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    if tokenizer:
        known = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
        known.pre_tokenizer = pre_tokenizers.Whitespace()
        make: Any = PreTrainedTokenizerFast
        make(tokenizer_object=known, unk_token="<unk>").save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "a b c d e", "answer": "a"}))
    paths = f"""[model]\npath = "{folder}/model"\n[data]\ntask = "jsonl"\ntrain = "{folder}/train.jsonl"\n"""
    return parse_config(TEXT + paths, "test", overrides)


@pytest.mark.parametrize(
    ("words", "positions", "tokenizer", "said"),
    [
        (8, 16, True, "it has 8 tokens, and its tokenizer 9"),
        (9, 6, True, "the longest prompt and sampling.max_new_tokens make 7 tokens, and it attends to 6"),
        (9, 16, False, "its folder has no tokenizer"),
    ],
)
def test_a_model_and_a_tokenizer_that_do_not_fit_are_named_before_anything_starts(
    tmp_path: Path, words: int, positions: int, tokenizer: bool, said: str
) -> None:
    config = a_model(tmp_path, words=words, positions=positions, tokenizer=tokenizer)
    with pytest.raises(ModelMisfit, match=said):
        run(config, tmp_path / "run")
    assert roles(tmp_path / "run") == set(), "a run that is refused has not begun"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("sampling.stop=[3, 9]",), "sampling.stop has the token 9, and its tokens are 0 to 8"),
        (("model.lora_rank=2", 'model.lora_targets=["q_prox"]'), "q_prox"),
    ],
)
def test_tokens_and_layers_that_the_model_has_not_are_named_before_anything_starts(
    tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    config = a_model(tmp_path, words=9, positions=16, overrides=overrides)
    with pytest.raises(ModelMisfit, match=said):
        run(config, tmp_path / "run")
    assert roles(tmp_path / "run") == set()


def test_another_configuration_is_refused_by_resume_and_changes_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config_file.write_text(begun := resolved(parse_config(TEXT, "test")))
    shown = CliRunner().invoke(app, ["rl", "resume", str(directory.path), "--set", "trainer.rate=1e-3"], env=WIDE)
    assert shown.exit_code == 2 and "trainer.rate was 0.0005 and is 0.001; resume with the old" in shown.output
    assert directory.config_file.read_text() == begun and not roles(directory.path)


def test_fewer_steps_than_a_run_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000000004").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000000004" / ".metadata").touch()
    with pytest.raises(StepsDone, match="the run has 4 steps already, and steps = 3"):
        run(parse_config(TEXT, "test"), tmp_path / "run")
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
        run(a_model(tmp_path, words=9, positions=16), tmp_path / "run")
    assert "trainer" in roles(tmp_path / "run")


REWARD = """
def moody(answer):
    if answer.prompt.number == 1:
        raise ArithmeticError("it cannot say")
    return float("nan") if answer.prompt.number == 6 else float(len(answer.text))
"""


def test_a_reward_that_raises_or_is_no_number_costs_its_episodes_which_are_counted(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    more = f"""[[reward]]\nkind = "python"\nfunction = "{tmp_path}/reward.py:moody"\n"""
    run(parse_config(TEXT + more, "test"), tmp_path / "run")
    events = list(RunDirectory(tmp_path / "run").events())
    failed = [each for each in events if isinstance(each, EpisodeFailed)]
    assert [each.prompt for each in failed] == [1] * 4 + [6] * 4
    assert all("it cannot say" in each.reason for each in failed[:4])
    assert all("is nan" in each.reason for each in failed[4:])
    trained = [prompt for each in events if isinstance(each, StepTrained) for prompt in each.prompts]
    assert sorted(trained) == [each for each in range(14) if each not in (1, 6)], "the next prompts take their places"


BROKEN = """
from holdfast.rl.environments.builtin.guess_number import GuessNumberEnvironment

def broken(answer):
    raise ArithmeticError("it cannot say")

class Broken(GuessNumberEnvironment):
    def step(self, action):
        raise ArithmeticError("it cannot say")
"""
PYTHON = '[[reward]]\nkind = "python"\nfunction = "{path}:broken"\n'
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
    config = parse_config(TEXT + section.format(path=tmp_path / "broken.py"), "test")
    said = rf"^{source} failed in 9 groups one after another, the last time: .*it cannot say.*; see to it, and resume"
    with pytest.raises(RunFailed, match=said):
        run(config, tmp_path / "run")
