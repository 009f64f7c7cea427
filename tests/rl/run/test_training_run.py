"""A whole run on real processes has the same bits with and without faults, in any process, the driver included."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import resolved
from holdfast.rl.errors import RunFailed
from holdfast.rl.generators.models import ModelMisfit
from holdfast.rl.run.evaluation import evaluate_source
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Event, ProcessStarted, RunResumed, StepTrained
from holdfast.rl.run.saved_versions import SavedVersions
from holdfast.rl.trainers.training import weights_digest
from support.programs.forked_programs import run_holdfast
from support.rl import training_runs
from support.rl.started_monarch import start_monarch_once
from support.rl.training_runs import SPARED, Killer, run
from support.waiting import becomes_true

pytestmark = pytest.mark.timeout(300)

STEPS = 12
EVERY = {"evaluation__every": 6, "checkpoint__every": 3, "telemetry__episodes": 32}


def configured(**overrides: object) -> RunConfig:
    return training_runs.configured(**{"steps": STEPS} | SPARED | EVERY | overrides)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent may have died without taking note of that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the last weights of a run without faults on one trainer."""
    return run(configured(trainer__replicas=1, trainer__spares=0), tmp_path_factory.mktemp("run")).digest


@pytest.mark.parametrize(("strategy", "replicas"), [("ddp", 3), pytest.param("fsdp2", 2, marks=pytest.mark.thorough)])
def test_the_weights_are_equal_to_the_bit_on_any_number_of_trainers(
    tmp_path: Path, undisturbed: str, strategy: str, replicas: int
) -> None:
    config = configured(trainer__strategy=strategy, trainer__replicas=replicas, trainer__spares=0)
    result = run(config, tmp_path)
    assert result.digest == undisturbed
    saved = SavedVersions(config, RunDirectory(tmp_path))
    last = saved.find("latest")
    assert last == STEPS and weights_digest(saved.model(last).state_dict()) == undisturbed, (
        "the checkpoint has them too"
    )
    best = asyncio.run(evaluate_source(config, saved.source(saved.find("best"), tmp_path / "scratch")))
    assert result.best is not None and (saved.best, best.reward) == (result.best.version, result.best.reward)


@pytest.mark.parametrize("kind", ["local", pytest.param("monarch", marks=pytest.mark.thorough)])
def test_the_weights_are_equal_to_the_bit_after_kills_in_every_role(
    tmp_path: Path, undisturbed: str, kind: str
) -> None:
    stop = int(signal.SIGSTOP)
    killer = Killer(
        {2: ("trainer", 9), 4: ("generator", 9), 6: ("holder", 9), 7: ("trainer", stop), 9: ("generator", stop)}
    )
    engine: Any = LocalEngine if kind == "local" else start_monarch_once()
    result = run(configured(), tmp_path, killer, engine)
    assert result.digest == undisturbed
    assert len(killer.struck) == 5 and set(killer.struck) <= killer.lost
    trained = [event.step for event in RunDirectory(tmp_path).events() if isinstance(event, StepTrained)]
    assert trained == list(range(STEPS)), "no step is lost, and none is trained twice"


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["loop.before_step:1", "loop.after_step:6", "loop.after_update:8"])
def test_a_driver_that_dies_at_any_point_is_resumed_to_the_same_bits(
    tmp_path: Path, undisturbed: str, point: str
) -> None:
    """Its processes die with it. On resuming, there is one trainer more."""
    file = tmp_path / "run.toml"
    file.write_text(resolved(configured()))
    fault = {**os.environ, "HOLDFAST_FAULT": f"{point}:-1"}
    killed = run_holdfast("rl", "train", file, "-d", tmp_path / "run", environ=fault, timeout=120.0)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    events = list(RunDirectory(tmp_path / "run").events())
    for started in [event for event in events if isinstance(event, ProcessStarted)]:
        becomes_true(lambda pid=started.pid: is_gone(pid), 20.0)
    result = run(configured(trainer__replicas=3), tmp_path / "run")
    assert result.digest == undisturbed
    resumed = [event.step for event in RunDirectory(tmp_path / "run").events() if isinstance(event, RunResumed)]
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
    assert len(killer.struck) == 1 and set(killer.struck) <= killer.lost


@pytest.mark.thorough
def test_asynchronous_groups_are_never_staler_than_the_bound_and_each_prompt_is_trained_once(tmp_path: Path) -> None:
    """A generator dies on the way, and its requests go to others."""
    config = configured(algorithm__mode="asynchronous", algorithm__staleness=2)
    killer = Killer({3: ("generator", 9), 7: ("trainer", 9)})
    run(config, tmp_path, killer)
    assert len(killer.struck) == 2
    steps = [event for event in RunDirectory(tmp_path).events() if isinstance(event, StepTrained)]
    assert [event.step for event in steps] == list(range(STEPS))
    assert max(behind for event in steps for behind in event.staleness) <= 2
    numbers = [group.number for group in RunDirectory(tmp_path).groups()]
    assert len(numbers) == len(set(numbers)) == 8 * STEPS


def test_a_run_that_has_ended_goes_on_to_more_steps_with_the_same_bits(tmp_path: Path, undisturbed: str) -> None:
    """After its last step the trainers meet once more, to publish: that is no step, and has no checkpoint."""
    alone = {"trainer__replicas": 1, "trainer__spares": 0, "evaluation__every": 0}
    ended = run(configured(**alone, steps=4), tmp_path)
    saved = SavedVersions(configured(**alone), RunDirectory(tmp_path))
    assert saved.find("latest") == 4 and weights_digest(saved.model(4).state_dict()) == ended.digest
    assert run(configured(**alone), tmp_path).digest == undisturbed
    trained = [event.step for event in RunDirectory(tmp_path).events() if isinstance(event, StepTrained)]
    assert trained == list(range(STEPS))


@pytest.mark.thorough
def test_a_run_whose_processes_die_again_and_again_fails_with_the_reason(tmp_path: Path) -> None:
    def kill_trainers(event: Event) -> None:
        if isinstance(event, ProcessStarted) and event.role == "trainer":
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
    assert len(killer.struck) == 3 and set(killer.struck) <= killer.lost
    trained = [event.step for event in RunDirectory(tmp_path / "killed").events() if isinstance(event, StepTrained)]
    assert trained == list(range(6)), "no step is lost, and none is trained twice"
    assert result.digest == quiet.digest


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_on_a_gpu_that_is_not_there_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelMisfit, match="sees no GPU"):
        run(configured(**FEW), tmp_path)
