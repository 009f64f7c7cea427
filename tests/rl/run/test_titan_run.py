"""A run with TorchTitan's trainers: its driver is killed and resumed, and its checkpoint evaluated and exported."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="trainers need transformers: pip install 'holdfast[rl]'")

import torch
from transformers import AutoModelForCausalLM
from typer.testing import Result

from holdfast.rl.config.toml import load_config, resolved
from holdfast.rl.run.policy import task_of
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import RunResumed, StepTrained
from holdfast.rl.run.saved_versions import SavedVersions
from holdfast.rl.trainers.training import weights_digest
from support.programs.forked_programs import run_holdfast
from support.rl.training_runs import configured, invoke
from support.source_tree import ROOT

PYTHON = ROOT / ".venv" / "extras" / "titan" / "bin" / "python"
STEPS, PROMPTS = 5, 24

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="torchtitan is not installed: make extra-titan"),
]
TITAN: dict[str, object] = {
    "steps": STEPS,
    "model__warmup_steps": 4,
    "model__warmup_batch": 64,
    "algorithm__groups": 8,
    "sampling__batch": 8,
    "trainer__kind": "titan",
    "trainer__strategy": "fsdp2",
    "trainer__replicas": 2,
    "checkpoint__every": 2,
}


def holdfast(*words: str) -> Result:
    """A command of `holdfast rl`, in this interpreter, which has no TorchTitan."""
    done = invoke("rl", *words)
    assert done.exit_code == 0, done.output
    return done


def test_a_run_of_torchtitan_is_resumed_evaluated_and_exported(tmp_path: Path) -> None:
    directory, out = tmp_path / "run", tmp_path / "exported"
    (tmp_path / "run.toml").write_text(resolved(configured(**TITAN)))
    fault = {**os.environ, "HOLDFAST_FAULT": "loop.after_step:3:-1"}
    killed = run_holdfast("rl", "train", tmp_path / "run.toml", "-d", directory, environ=fault, timeout=280.0)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    result = json.loads(holdfast("resume", str(directory), "--json").stdout)
    events = list(RunDirectory(directory).events())
    [again] = [each.step for each in events if isinstance(each, RunResumed)]
    assert again in (2, 4), "the newest checkpoint that was whole"
    unrecorded = {3} if again == 4 else set()  # the driver died after step 3, and before it wrote of it
    assert {each.step for each in events if isinstance(each, StepTrained)} == set(range(STEPS)) - unrecorded

    saved = SavedVersions(load_config(directory / "config.toml"), RunDirectory(directory))
    assert saved.find("latest") == STEPS
    shown = holdfast("eval", str(directory), "--version", "latest", "--prompts", str(PROMPTS), "--json")
    answers = json.loads(shown.stdout)["result"]["answers"]
    holdfast("export", str(directory), str(out), "--version", "latest")

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
