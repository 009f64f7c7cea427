"""`coder`: write a Python function in one turn, rewarded by the share of hidden tests that it passes."""

from __future__ import annotations

import threading

from holdfast.rl.environments.builtin.coding_problems import CodingProblem, coding_problem
from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.errors import EpisodeOver, UnknownEnvironment
from holdfast.rl.environments.sandbox import Limits, Sandbox, SolutionResult, run_tests
from holdfast.rl.environments.sandbox.limits import MEBIBYTE

LIMITS = Limits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=128 * MEBIBYTE, output_bytes=64 * 1024, processes=4)
"""Of each test."""

_LONGEST = 100_000
_FENCE = "```"
_LANGUAGES = ("", "py", "python", "python3")


def extract_code(answer: str) -> str:
    """The last fenced block of Python in an answer; without a fence, all of it. Empty if it is too long to be one."""
    if len(answer) > _LONGEST:
        return ""
    found, language, begun = answer, None, list[str]()
    for line in answer.splitlines(keepends=True):
        if not line.strip().startswith(_FENCE):
            begun.append(line)
        elif language is None:
            language, begun = line.strip().removeprefix(_FENCE).strip().lower(), []
        else:
            found = "".join(begun) if language in _LANGUAGES else found
            language = None
    return found


def judge(problem: CodingProblem, answer: str, sandbox: Sandbox) -> SolutionResult:
    """Run the tests of a problem on an answer; `fraction` is the reward."""
    return run_tests(extract_code(answer), problem.tests, LIMITS, sandbox=sandbox)


class CoderEnvironment(Environment):
    """Asks for a function by seed. The environments of a process share one sandbox, which the last one closes.

    Raises SandboxUnavailable, before any episode, where the machine does not allow the sandbox.
    """

    _lock = threading.Lock()
    _users = 0
    _sandbox: Sandbox | None = None

    def __init__(self, tests: int = 8) -> None:
        if not 1 <= tests <= 100:
            raise UnknownEnvironment("coder", f"tests={tests} must be in 1 to 100")
        self._tests = tests
        self._problem: CodingProblem | None = None
        with CoderEnvironment._lock:
            if CoderEnvironment._sandbox is None:
                CoderEnvironment._sandbox = Sandbox()
            self._shared = CoderEnvironment._sandbox
            CoderEnvironment._users += 1

    def reset(self, seed: int) -> Observation:
        self._problem = coding_problem(seed, self._tests)
        return Observation(text=self._problem.prompt, fields={"family": self._problem.family})

    def step(self, action: Action) -> Observation:
        if self._problem is None:
            raise EpisodeOver("coder", "it has one step")
        problem, self._problem = self._problem, None
        result = judge(problem, action.text, self._shared)
        text = f"{result.passed} of {len(result.verdicts)} tests passed"
        failed = next((verdict for verdict in result.verdicts if not verdict.passed), None)
        if failed:
            text += f"; the first that failed: {failed.message or failed.reason}"
        return Observation(text=text, fields={"passed": result.passed}, reward=result.fraction, done=True)

    def close(self) -> None:
        with CoderEnvironment._lock:
            CoderEnvironment._users -= 1
            if CoderEnvironment._users == 0 and CoderEnvironment._sandbox is not None:
                CoderEnvironment._sandbox.close()
                CoderEnvironment._sandbox = None
