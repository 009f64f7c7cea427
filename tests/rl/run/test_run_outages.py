"""A run outlives rewards that fail or end their process, a register that is away for seconds, and evicted trainers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.actors.errors import ActorDied, EndpointFailed
from holdfast.rl.actors.service import ServiceOptions, ServiceReplica
from holdfast.rl.errors import RunFailed
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import EpisodeFailed, Event, ProcessLost, StepTrained
from holdfast.rl.run.trainer_processes import ask_trainer
from holdfast.rl.trainers.trainer_actor import TrainerEnded, TrainerLeftOut
from support.rl.training_runs import configured, run
from support.samples.actors import Counter
from support.waiting import PATIENCE

pytestmark = pytest.mark.timeout(300)

STEPS = 12
AWAY_SECONDS = 4.0
"""More than any wait of the roles that is no wait for the register."""

REWARDS = """
import os, sys

def ends(answer):
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
REWARD = '[[reward]]\nkind = "python"\nfunction = "{path}:ends"\n'
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
    config = configured(REWARD.format(path=tmp_path / "rewards.py"), steps=STEPS, **ASYNCHRONOUS)
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
