"""Versions of a run on disk are found without any process of it, and evaluated as in the run."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from holdfast.comms.errors import CorruptData
from holdfast.harness.cli.app import app
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import parse_config, resolved
from holdfast.rl.data.prompts import arithmetic_held_out
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.run import version_evaluation
from holdfast.rl.run.policy import policy_source, task_of
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.saved_versions import NoSavedVersion, SavedVersions
from holdfast.rl.run.version_evaluation import NothingHeldOut, evaluate_source
from holdfast.rl.trainers.adapters import merged
from holdfast.rl.trainers.best_version import BestRecord
from holdfast.rl.trainers.policy import build_policy
from holdfast.rl.trainers.training import weights_digest
from support.rl.console import WIDE

LORA = parse_config("[model]\nlora_rank = 2\n[sampling]\nmax_new_tokens = 2", "test")
PLAIN = parse_config("[sampling]\nmax_new_tokens = 2", "test")


def a_run(path: Path, config: RunConfig) -> tuple[RunDirectory, dict[int, str]]:
    """The directory of a run with checkpoints of versions 2 and 4; returns the digests of their weights too."""
    directory, digests = RunDirectory(path), {}
    directory.path.mkdir(exist_ok=True)
    directory.config_file.write_text(resolved(config))
    for version in (2, 4):
        policy = build_policy(policy_source(config), config.model)
        with torch.no_grad():
            for each in policy.parameters():
                each.add_(torch.full_like(each, 0.01 * version))
        state = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}
        dcp.save(state, checkpoint_id=directory.checkpoints / f"step-{version:09d}", no_dist=True)
        digests[version] = weights_digest(merged(policy) if config.model.lora_rank else policy.state_dict())
    return directory, digests


@pytest.mark.parametrize("config", [PLAIN, LORA], ids=["all weights", "adapters"])
def test_a_checkpoint_has_the_weights_that_its_trainers_published(tmp_path: Path, config: RunConfig) -> None:
    directory, digests = a_run(tmp_path, config)
    saved = SavedVersions(config, directory)
    assert saved.numbers == (0, 2, 4) and saved.find("latest") == 4 and saved.best is None
    assert {each: weights_digest(saved.model(each).state_dict()) for each in (2, 4)} == digests
    first = weights_digest(policy_source(config).build().state_dict())
    assert weights_digest(saved.model(0).state_dict()) == first
    assert weights_digest(saved.source(2, tmp_path / "scratch").build().state_dict()) == digests[2]


def test_the_best_version_is_that_of_the_record(tmp_path: Path) -> None:
    directory, _ = a_run(tmp_path, PLAIN)
    model = ModelSource(config=policy_source(PLAIN).config, seed=5).build()
    save_model(model, directory.best / "version-3")
    record = BestRecord(version=3, reward=0.25, folder="version-3")
    (directory.best / "best.json").write_bytes(msgspec.json.encode(record))
    saved = SavedVersions(PLAIN, directory)
    assert saved.numbers == (0, 2, 3, 4) and saved.find("best") == 3
    assert weights_digest(saved.model(3).state_dict()) == weights_digest(model.state_dict())


def test_a_version_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    directory, _ = a_run(tmp_path, PLAIN)
    for version in ("3", "best", "-1", "newest", ""):
        with pytest.raises(NoSavedVersion, match="on disk are 0, 2, 4, and no version was evaluated yet"):
            SavedVersions(PLAIN, directory).find(version)


def test_a_checkpoint_of_another_model_is_damage(tmp_path: Path) -> None:
    directory, _ = a_run(tmp_path, LORA)
    with pytest.raises(CorruptData, match="step-000000002 does not fit the model"):
        SavedVersions(PLAIN, directory).model(2)


def test_an_evaluation_scores_every_prompt_once_whatever_the_size_of_a_batch() -> None:
    """A model's answers do not depend on the prompts beside them."""
    found = []
    for batch in (1, 5, 32):
        sampling = msgspec.structs.replace(PLAIN.sampling, batch=batch, group=2)
        config = msgspec.structs.replace(PLAIN, sampling=sampling)
        result = asyncio.run(evaluate_source(config, policy_source(config), 23))
        assert [each.prompt for each in result.answers] == [task_of(config).held_out.prompt(n).text for n in range(23)]  # type: ignore[union-attr]
        assert result.tokens == 46 and result.reward == sum(each.reward for each in result.answers) / 23
        found.append([each.answer for each in result.answers])
    assert found[0] == found[1] == found[2]


def test_without_held_out_prompts_there_is_nothing_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataclasses.replace(task_of(PLAIN), held_out=None)
    monkeypatch.setattr(version_evaluation, "task_of", lambda config: task)
    with pytest.raises(NothingHeldOut, match=r"data\.held_out"):
        asyncio.run(evaluate_source(PLAIN, policy_source(PLAIN)))


def test_the_command_shows_score_and_answers_or_all_of_it_as_json(tmp_path: Path) -> None:
    a_run(tmp_path, PLAIN)
    shown = CliRunner().invoke(app, ["rl", "eval", str(tmp_path), "--version", "2", "--prompts", "9"], env=WIDE)
    assert shown.exit_code == 0 and "version 2 of" in shown.output and "9 held-out prompts" in shown.output
    data = CliRunner().invoke(app, ["rl", "eval", str(tmp_path), "--version", "2", "--prompts", "9", "--json"])
    answers = msgspec.json.decode(data.output)["result"]["answers"]
    assert {each["reference"] for each in answers} <= {each.answer for each in arithmetic_held_out()}
