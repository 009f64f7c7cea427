"""Exports are what was trained, appear whole or not at all, and a program that answers otherwise is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from holdfast.harness.cli.app import app
from holdfast.rl.config.named_code import ExtraNotInstalled, load_code
from holdfast.rl.config.toml import parse_config, resolved
from holdfast.rl.run.policy import policy_source, task_of
from holdfast.rl.run.version_evaluation import held_out_prompts
from holdfast.rl.trainers.training import weights_digest
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
    command = ["rl", "export", str(run), str(tmp_path / "out"), "--version", "0"]
    assert CliRunner().invoke(app, command).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert weights_digest(loaded.state_dict()) == weights_digest(SOURCE.build().state_dict())
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "exists already" in again.output


def test_a_file_has_all_weights_and_says_where_they_are_from(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    command = ["rl", "export", str(run), "--version", "latest", "--to", "safetensors", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
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
    command = ["rl", "export", str(run), "--version", "0", "--to", f"{tmp_path / 'mine.py'}:names", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and done.output.strip().endswith(f"{CONFIG.steps} steps")
    assert out.read_text().splitlines() == list(SOURCE.build().state_dict())
    absent = CliRunner().invoke(app, [*command[:-2], "executorch", str(out)])
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
            largest=1.0,
            different=different,
            delegated=1.0,
            seconds=1.0,
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
