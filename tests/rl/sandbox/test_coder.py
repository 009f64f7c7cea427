"""The example of a coder environment: problems by seed, rewards by hidden tests, over a session too."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rl.config.named_code import load_code
from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.registry import open_session
from holdfast.rl.environments.sandbox import Sandbox
from holdfast.rl.errors import EpisodeOver
from support.source_tree import ROOT

NAME = f"python:{ROOT / 'examples' / 'rl' / 'coder.py'}:CoderEnvironment"
example: Any = sys.modules[load_code(NAME.removeprefix("python:")).__module__]
FAMILIES, coding_problem, judge = example.FAMILIES, example.coding_problem, example.judge


@pytest.fixture
def coder(sandbox: Sandbox) -> Iterator[Any]:
    """`sandbox` is asked for only to skip where there is none."""
    environment = example.CoderEnvironment(tests=3)
    yield environment
    environment.close()


def test_a_seed_is_a_problem_and_there_are_hundreds_of_every_family() -> None:
    problems = [coding_problem(seed) for seed in range(500)]
    assert problems == [coding_problem(seed) for seed in range(500)]
    assert {problem.family for problem in problems} == set(FAMILIES)
    assert len({problem.prompt for problem in problems}) > 450
    assert len(coding_problem(2**63, 5).tests) == 5


def test_the_solution_of_every_family_passes_all_tests_and_an_empty_answer_none(sandbox: Sandbox) -> None:
    problems = {problem.family: problem for problem in map(coding_problem, range(300))}
    assert problems.keys() == FAMILIES.keys()
    for problem in problems.values():
        assert judge(problem, f"So:\n```python\n{problem.solution}```\n", sandbox).fraction == 1.0
        assert judge(problem, "I cannot.", sandbox).fraction == 0.0


def test_an_episode_is_one_turn(coder: Any) -> None:
    observation = coder.reset(7)
    assert "Write a Python function" in observation.text
    over = coder.step(Action(coding_problem(7, 3).solution))
    assert (over.reward, over.done, over.text) == (1.0, True, "3 of 3 tests passed")
    with pytest.raises(EpisodeOver):
        coder.step(Action("more"))


def test_a_wrong_answer_hears_what_failed(coder: Any) -> None:
    coder.reset(7)
    name = coding_problem(7).tests[0].function
    over = coder.step(Action(f"```python\ndef {name}(x): return 1 / 0\n```"))
    assert (over.reward, over.done) == (0.0, True)
    assert over.text == "0 of 3 tests passed; the first that failed: ZeroDivisionError: division by zero"


def test_it_is_an_environment_by_name(sandbox: Sandbox) -> None:
    async def episode() -> float | None:
        async with open_session(f"{NAME}?tests=2") as session:
            await session.reset(11)
            return (await session.step(Action(coding_problem(11, 2).solution))).reward

    assert asyncio.run(episode()) == 1.0


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("first\n```\na\n```\nbetter\n```py\nb\n```\nend", "b\n"),
        ("a = 1", "a = 1"),
        ("```python\na\n", "```python\na\n"),
        ("```json\n{}\n```\n```python\na\n```", "a\n"),
        ("x" * 200_000, ""),
    ],
)
def test_the_last_block_of_python_is_the_answer(answer: str, code: str) -> None:
    assert example.extract_code(answer) == code


@given(st.text(alphabet="`python\n ax"))
def test_every_answer_gives_some_code(answer: str) -> None:
    assert isinstance(example.extract_code(answer), str)
