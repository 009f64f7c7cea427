"""Trainers with TorchTitan's models: what is refused without it, and what runs in its own environment."""

from __future__ import annotations

import importlib.util
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="trainers need transformers: pip install 'holdfast[rl]'")

from holdfast.rl.config.named_code import ExtraNotInstalled
from holdfast.rl.config.run_config import TitanConfig
from holdfast.rl.generators.errors import ModelMisfit
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.trainers.titan.model import TitanModel, mesh_of, model_config
from support.source_tree import ROOT

PYTHON = ROOT / ".venv" / "extras" / "titan" / "bin" / "python"
PROGRAM = ROOT / "examples" / "stack" / "titan" / "trainers.py"
SOURCE = ModelSource(config={"model_type": "llama", "vocab_size": 8})


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 4))
def test_a_mesh_holds_all_trainers_and_keeps_the_degrees_that_fit(size: int, replicate: int, tensor: int) -> None:
    mesh = mesh_of(size, replicate, tensor)
    assert list(mesh) == ["dp_replicate", "fsdp", "tp"]
    assert mesh["dp_replicate"] * mesh["fsdp"] * mesh["tp"] == size
    if size % (replicate * tensor) == 0:
        assert (mesh["dp_replicate"], mesh["tp"]) == (replicate, tensor)
    assert mesh["tp"] in (1, tensor) and mesh["dp_replicate"] in (1, replicate)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": "gpt2"}, "use one of llama, qwen3"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"head_dim": 8}, "head_dim=8 x 4 heads is not 64"),
    ],
)
def test_a_model_that_it_cannot_express_is_refused(more: dict[str, Any], words: str) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64, **more}
    with pytest.raises(ModelMisfit, match=words):
        model_config(SimpleNamespace(**config), "a model")


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is installed here")
def test_without_torchtitan_the_error_says_how_to_get_it() -> None:
    with pytest.raises(ExtraNotInstalled, match=r"titan is not installed.*run make extra-titan"):
        TitanModel(SOURCE, TitanConfig())


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="torchtitan is not installed: make extra-titan")
def test_a_killed_trainer_does_not_change_a_bit() -> None:
    """One rank against two, of which one is killed and a spare comes; the program compares the weights."""
    jobs = ["llama3 FSDP2, 1 rank", "llama3 FSDP2, 2 ranks, 1 killed, a spare"]
    done = subprocess.run([PYTHON, PROGRAM, *jobs], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0 and "DIFFERS" not in done.stdout, done.stdout + done.stderr
