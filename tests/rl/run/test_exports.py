"""Saved versions are found, evaluated and exported without any process of their run."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from holdfast.comms.errors import CorruptData
from holdfast.rl.config.named_code import ExtraNotInstalled, load_code
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import parse_config, resolved
from holdfast.rl.data.prompts import arithmetic_held_out
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.run import evaluation
from holdfast.rl.run.evaluation import BestRecord, NothingHeldOut, evaluate_source, held_out_prompts
from holdfast.rl.run.policy import policy_source, task_of
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.saved_versions import NoSavedVersion, SavedVersions
from holdfast.rl.trainers.policy import build_policy, merged
from holdfast.rl.trainers.training import weights_digest
from support.rl.training_runs import invoke
from support.source_tree import ROOT

EXPORT = ROOT / "examples" / "stack" / "executorch" / "export.py"
executorch: Any = sys.modules[load_code(f"{EXPORT}:export").__module__]
"""The example that exports a program of ExecuTorch, as `holdfast rl export --to FILE.py:NAME` loads it."""

greedy: Any = load_code(f"{EXPORT.with_name('program.py')}:greedy")

CONFIG = parse_config("[sampling]\nmax_new_tokens = 2", "test")
SOURCE = policy_source(CONFIG)
PROMPTS = held_out_prompts(CONFIG, task_of(CONFIG), 12)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has hardly begun: it has version 0."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text(resolved(CONFIG))
    return directory


def test_a_folder_is_loaded_by_transformers_with_the_same_bits(run: Path, tmp_path: Path) -> None:
    command = ["rl", "export", run, tmp_path / "out", "--version", "0"]
    assert invoke(*command).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert weights_digest(loaded.state_dict()) == weights_digest(SOURCE.build().state_dict())
    again = invoke(*command)
    assert again.exit_code == 2 and "exists already" in again.output


def test_a_file_has_all_weights_and_says_where_they_are_from(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert invoke("rl", "export", run, "--version", "latest", "--to", "safetensors", out).exit_code == 0
    model = SOURCE.build()
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["version"] == "0"
        assert file.metadata()["digest"] == weights_digest(model.state_dict())
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in model.state_dict().items()
        }


def test_a_function_of_the_users_exports_too(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def names(config, source, out):\n"
        "    out.write_text('\\n'.join(source.build().state_dict()))\n"
        "    return f'{config.steps} steps'\n"
    )
    out = tmp_path / "names.txt"
    done = invoke("rl", "export", run, "--version", "0", "--to", f"{tmp_path / 'mine.py'}:names", out)
    assert done.exit_code == 0 and done.output.strip().endswith(f"{CONFIG.steps} steps")
    assert out.read_text().splitlines() == list(SOURCE.build().state_dict())
    absent = invoke("rl", "export", run, "--version", "0", "--to", "executorch", out)
    assert absent.exit_code == 2 and "write FILE.py:NAME" in absent.output


def test_without_its_environment_a_program_is_refused_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ExtraNotInstalled, match="make extra-executorch"):
        executorch.export_program(SOURCE, PROMPTS, CONFIG.sampling, tmp_path / "model.pte")


@pytest.mark.parametrize(
    ("difference", "different", "words"),
    [(3e-6, (), r"logits differ .* by 3e-06, more than 1e-06"), (1e-7, (4, 7), r"2 prompts of 12 otherwise")],
)
def test_a_program_that_differs_from_the_model_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: float, different: tuple[int, ...], words: str
) -> None:
    def differs(python: Path, job: Any, scratch: Path, out: Path) -> Any:
        Path(job["draft"]).write_bytes(b"a program")
        assert len(job["answers"]) == len(job["prompts"]) == 12 and all(len(each) == 2 for each in job["answers"])
        return executorch.ExecutorchReport(
            nbytes=9,
            difference=difference,
            allowed=1e-6,
            different=different,
            delegated=1.0,
        )

    monkeypatch.setattr(executorch, "extra_python", lambda _: Path(sys.executable))
    monkeypatch.setattr(executorch, "_run", differs)
    with pytest.raises(executorch.ExportRefused, match=words):
        executorch.export_program(SOURCE, PROMPTS, CONFIG.sampling, tmp_path / "model.pte")
    assert not list(tmp_path.iterdir())


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    most=st.integers(1, 6),
    stop=st.sets(st.integers(0, 6), max_size=2),
)
def test_the_greedy_loop_ends_at_the_first_stop_token(prompt: list[int], most: int, stop: set[int]) -> None:
    """The model here says the last token plus the number of tokens so far."""

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        following = int(tokens[0, -1] + tokens.shape[1]) % 7
        return torch.nn.functional.one_hot(torch.tensor([[following] * tokens.shape[1]]), 7)

    said = greedy(logits, prompt, most, tuple(stop))
    assert 1 <= len(said) <= most and not set(said[:-1]) & stop
    assert len(said) == most or said[-1] in stop


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_program_of_executorch_answers_as_the_model(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "extras" / "executorch" / "bin" / "python").exists():
        pytest.skip("executorch is not installed: make extra-executorch")
    source = msgspec.structs.replace(SOURCE, config={**SOURCE.config, "num_hidden_layers": 1})
    report = executorch.export_program(source, PROMPTS, CONFIG.sampling, tmp_path / "model.pte")
    assert report.difference <= report.allowed and not report.different and report.delegated > 0
    assert (tmp_path / "model.pte").stat().st_size == report.nbytes


ADAPTERS = '[model]\nlora_rank = 2\nlora_targets = ["q_proj", "v_proj"]\n'
LORA = parse_config(ADAPTERS + "[sampling]\nmax_new_tokens = 2", "test")


def a_run(path: Path, config: RunConfig) -> tuple[RunDirectory, dict[int, str]]:
    """The directory of a run with checkpoints of versions 2 and 4; returns the digests of their weights too."""
    directory, digests = RunDirectory(path), {}
    directory.path.mkdir(exist_ok=True)
    directory.config_file.write_text(resolved(config))
    for version in (2, 4):
        policy = build_policy(policy_source(config), config.model)
        with torch.no_grad():
            for each in policy.parameters():
                if each.requires_grad:
                    each.add_(torch.full_like(each, 0.01 * version))
        state = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}
        dcp.save(state, checkpoint_id=directory.checkpoints / f"step-{version:09d}", no_dist=True)
        digests[version] = weights_digest(merged(policy) if config.model.lora_rank else policy.state_dict())
    return directory, digests


@pytest.mark.parametrize("config", [CONFIG, LORA], ids=["all weights", "adapters"])
def test_a_checkpoint_has_the_weights_that_its_trainers_published(tmp_path: Path, config: RunConfig) -> None:
    directory, digests = a_run(tmp_path, config)
    saved = SavedVersions(config, directory)
    assert saved.numbers == (0, 2, 4) and saved.find("latest") == 4 and saved.best is None
    assert {each: weights_digest(saved.model(each).state_dict()) for each in (2, 4)} == digests
    first, second = (saved.model(each).state_dict() for each in (0, 2))
    assert weights_digest(first) == weights_digest(policy_source(config).build().state_dict())
    changed = {name.rsplit(".", 2)[-2] for name in first if not first[name].equal(second[name])}
    assert config is CONFIG or changed == {"q_proj", "v_proj"}, "the layers that have adapters, and no other"
    assert weights_digest(saved.source(2, tmp_path / "scratch").build().state_dict()) == digests[2]


def test_the_best_version_is_that_of_the_record(tmp_path: Path) -> None:
    directory, _ = a_run(tmp_path, CONFIG)
    model = ModelSource(config=policy_source(CONFIG).config, seed=5).build()
    save_model(model, directory.best / "version-3")
    record = BestRecord(version=3, reward=0.25, folder="version-3")
    (directory.best / "best.json").write_bytes(msgspec.json.encode(record))
    saved = SavedVersions(CONFIG, directory)
    assert saved.numbers == (0, 2, 3, 4) and saved.find("best") == 3
    assert weights_digest(saved.model(3).state_dict()) == weights_digest(model.state_dict())


def test_a_version_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    directory, _ = a_run(tmp_path, CONFIG)
    for version in ("3", "best", "-1", "newest", ""):
        with pytest.raises(NoSavedVersion, match="on disk are 0, 2, 4, and no version was evaluated yet"):
            SavedVersions(CONFIG, directory).find(version)


def test_a_checkpoint_of_another_model_is_damage(tmp_path: Path) -> None:
    directory, _ = a_run(tmp_path, LORA)
    with pytest.raises(CorruptData, match="step-000000002 does not fit the model"):
        SavedVersions(CONFIG, directory).model(2)


def test_an_evaluation_scores_every_prompt_once_whatever_the_size_of_a_batch() -> None:
    """A model's answers do not depend on the prompts beside them."""
    found = []
    for batch in (1, 5, 32):
        sampling = msgspec.structs.replace(CONFIG.sampling, batch=batch, group=2)
        config = msgspec.structs.replace(CONFIG, sampling=sampling)
        result = asyncio.run(evaluate_source(config, policy_source(config), 23))
        assert [each.prompt for each in result.answers] == [task_of(config).held_out.prompt(n).text for n in range(23)]  # type: ignore[union-attr]
        assert result.tokens == 46 and result.reward == sum(each.reward for each in result.answers) / 23
        found.append([each.answer for each in result.answers])
    assert found[0] == found[1] == found[2]


def test_without_held_out_prompts_there_is_nothing_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataclasses.replace(task_of(CONFIG), held_out=None)
    monkeypatch.setattr(evaluation, "task_of", lambda config: task)
    with pytest.raises(NothingHeldOut, match=r"data\.held_out"):
        asyncio.run(evaluate_source(CONFIG, policy_source(CONFIG)))


def test_the_command_shows_score_and_answers_or_all_of_it_as_json(tmp_path: Path) -> None:
    a_run(tmp_path, CONFIG)
    command = ["rl", "eval", tmp_path, "--version", "2", "--prompts", "9"]
    shown = invoke(*command)
    assert shown.exit_code == 0 and "version 2 of" in shown.output and "9 held-out prompts" in shown.output
    answers = msgspec.json.decode(invoke(*command, "--json").output)["result"]["answers"]
    assert {each["reference"] for each in answers} <= {each.answer for each in arithmetic_held_out()}
