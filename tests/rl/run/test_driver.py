"""What the driver of a run imports and when, and how many calls of Python an episode costs it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from holdfast.rl.config.run_config import Objective, Sampling
from holdfast.rl.config.toml import resolved
from holdfast.rl.data.episode import Completion, Group, SamplingRequest
from holdfast.rl.data.prompts import CharacterTokenizer, PromptSource, arithmetic_training
from holdfast.rl.data.replay_buffer import ReplayBuffer, StalenessRule
from holdfast.rl.grpo.batch import BatchColumns, EncodedBatch, collate
from holdfast.rl.grpo.loop import generate_episode, together
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.rewards.reward import Criterion, ExactMatch, Rubric
from holdfast.rl.run.generation import BatchedRequests
from support.rl.training_runs import configured

RUN = """
import sys
from pathlib import Path
from holdfast.harness.training.driver import train_here
from holdfast.rl.config.toml import load_config
train_here(load_config(Path("run.toml")), Path("run"))
print("transformers" in sys.modules)
"""

COMMAND = """
import sys
from holdfast.ft.processes import zygote_start
from holdfast.harness.cli.app import app

def started(*modules):
    print("transformers.models.llama.modeling_llama" in modules, "torch" in sys.modules, end=" ")
    raise SystemExit(5)

zygote_start.start_early = started
for command in sys.argv[1:]:
    try:
        app(command.split())
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.thorough
def test_the_driver_of_a_whole_run_does_not_import_transformers(tmp_path: Path) -> None:
    """Its model is read, warmed up, and kept when it is the best, without the seconds that this import takes."""
    (tmp_path / "run.toml").write_text(
        resolved(configured(steps=1, model__warmup_steps=1, evaluation__every=1, evaluation__prompts=4))
    )
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.split() == ["False"], done.stdout + done.stderr
    assert (tmp_path / "run" / "policy" / "config.json").is_file()
    best = next((tmp_path / "run" / "best").glob("*/config.json"))
    assert best.read_bytes() == (tmp_path / "run" / "policy" / "config.json").read_bytes()


def test_a_command_starts_its_zygote_before_it_imports_torch(tmp_path: Path) -> None:
    """In one interpreter: none of these commands goes further than that, and the last one starts no process."""
    begun = {
        "rl train nothing.toml": "True False 5",
        "rl resume nothing": "True False 5",
        "demo": "True False 5",
        "chaos run rl-demo": "False False 5",
        "rl train nothing.toml --dry-run": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *begun], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.splitlines() == list(begun.values()), done.stdout + done.stderr


GROUPS, GROUP = 32, 8
EPISODES = GROUPS * GROUP

MOST_CALLS_AN_EPISODE = 25
"""A quarter more than it takes, and less than half of what it took, which also grew with the tokens."""


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the calls of Python functions in the block."""
    found = [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        found[0] += event == "call"

    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)


class Drawing:
    """A policy with completions that are made before the count begins."""

    def __init__(self, tokens: int) -> None:
        self._drawn = [
            Completion(
                tokens=tuple((place + each) % 10 for each in range(tokens)),
                logprobs=(-0.5,) * tokens,
                versions=(0,) * tokens,
                finish="length",
            )
            for place in range(EPISODES)
        ]
        self.generate = BatchedRequests(self._route, 16)

    async def _route(self, request: SamplingRequest) -> Sequence[Completion]:
        await asyncio.sleep(0)
        return self._drawn[: len(request.seeds)]


def batch_of(tokens: int) -> tuple[tuple[Group, ...], int]:
    """The groups of one batch, and the calls that it took to make, judge, store and take them."""
    judge = Judge(Rubric([Criterion("exact", 1.0, ExactMatch())]), CharacterTokenizer())
    source = PromptSource(arithmetic_training(), CharacterTokenizer(), seed=0)
    sampling = Sampling(group=GROUP, batch=16, max_new_tokens=tokens)
    buffer = ReplayBuffer(StalenessRule(groups=GROUPS))
    policy = Drawing(tokens)
    source.prompt(0)

    async def episode() -> None:
        prompt = source.prompt((await buffer.admit()).number)
        await generate_episode(prompt, policy.generate, judge.evaluate, buffer, sampling, 0)

    async def body() -> tuple[tuple[Group, ...], int]:
        with counting() as calls:
            await together(*[episode] * GROUPS)
            batch = await buffer.take(0)
            EncodedBatch.of(batch, saved=False)
        return batch.groups, calls[0]

    return asyncio.run(body())


def test_an_episode_takes_few_calls_and_a_token_none() -> None:
    groups, short = batch_of(2)
    _, long = batch_of(200)
    print(f"\n{short / EPISODES:.1f} calls an episode of 2 tokens, {long / EPISODES:.1f} of 200")
    assert sum(len(each.episodes) for each in groups) == EPISODES
    assert short < MOST_CALLS_AN_EPISODE * EPISODES
    assert long - short < EPISODES * 198 / 10, "198 tokens more are no calls; a late timer is some"


@pytest.mark.parametrize("tokens", [2, 200])
def test_a_trainer_takes_no_call_for_an_episode(tokens: int) -> None:
    groups, _ = batch_of(tokens)

    def calls(groups: Sequence[Group]) -> int:
        columns = BatchColumns.of(groups)
        collate(columns, Objective())
        with counting() as found:
            collate(columns, Objective())
        return found[0]

    one, all_of_them = calls(groups[:1]), calls(groups)
    assert all_of_them - one < 12 * (GROUPS - 1), "only the advantages are computed by group"
