"""Reinforcement learning with trainers and generators on a GPU: the same bits with and without kills."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.generators.errors import ModelMisfit
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import StepTrained
from support.rl import training_runs
from support.rl.training_runs import SPARED, Killer, run

STEPS = 6
FEW = {"trainer__spares": 0, "store__holders": 1, "store__copies": 1}
"""No process that the test does not need: each of them starts CUDA anew."""


def configured(**overrides: object) -> RunConfig:
    return training_runs.configured(**SPARED | FEW | {"steps": STEPS, "model__device": "cuda"} | overrides)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_the_weights_are_equal_to_the_bit_after_kills_of_trainer_and_generator(tmp_path: Path) -> None:
    quiet = run(configured(trainer__replicas=1, generator__replicas=1), tmp_path / "quiet")
    killer = Killer({1: ("trainer", 9), 2: ("generator", 9), 3: ("generator", int(signal.SIGSTOP))})
    result = run(configured(), tmp_path / "killed", killer)
    assert len(killer.struck) == 3 and set(killer.struck) <= killer.lost
    trained = [event.step for event in RunDirectory(tmp_path / "killed").events() if isinstance(event, StepTrained)]
    assert trained == list(range(STEPS)), "no step is lost, and none is trained twice"
    assert result.digest == quiet.digest


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_on_a_gpu_that_is_not_there_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelMisfit, match="sees no GPU"):
        run(configured(), tmp_path)
