"""Write a Python function in one turn, rewarded by the share of hidden tests that it passes in the sandbox.

    holdfast rl train examples/rl/coder.toml --set model.path=FOLDER
    holdfast rl environment serve "python:examples/rl/coder.py:CoderEnvironment?tests=8"

The problems are families of small functions, each with a number that the seed chooses.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.sandbox import CallTest, Limits, Sandbox, SolutionResult, run_tests
from holdfast.rl.environments.sandbox.limits import MEBIBYTE
from holdfast.rl.errors import EpisodeOver, UnknownEnvironment


class CodingProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A task in words, tests that its answer must pass, and a solution that does, for demonstrations."""

    family: str
    prompt: str
    tests: tuple[CallTest, ...]
    solution: str


Inputs = Callable[[random.Random], tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class ProblemFamily:
    """What the function does, with `{k}` for the number; how it is written; arguments for tests."""

    signature: str
    task: str
    body: str
    inputs: Inputs


def _numbers(source: random.Random) -> tuple[object, ...]:
    return ([source.randint(-30, 30) for _ in range(source.randint(0, 12))],)


def _number(source: random.Random) -> tuple[object, ...]:
    return (source.randint(0, 10 ** source.randint(1, 6)),)


def _words(source: random.Random) -> tuple[object, ...]:
    return (" ".join("".join(source.choices("abcxyz", k=source.randint(1, 12))) for _ in range(source.randint(1, 8))),)


def _runs(source: random.Random) -> tuple[object, ...]:
    return ("".join(source.choice("abc") * source.randint(1, 12) for _ in range(source.randint(0, 6))),)


FAMILIES = {
    "multiples": ProblemFamily(
        "numbers", "the sum of the numbers that {k} divides", "sum(n for n in numbers if n % {k} == 0)", _numbers
    ),
    "rotated": ProblemFamily(
        "numbers",
        "the list rotated to the left by {k} places",
        "[numbers[(i + {k}) % len(numbers)] for i in range(len(numbers))]",
        _numbers,
    ),
    "chunks": ProblemFamily(
        "numbers",
        "a list of lists: the numbers in pieces of {k}, the last one perhaps shorter",
        "[numbers[i:i + {k}] for i in range(0, len(numbers), {k})]",
        _numbers,
    ),
    "clamped": ProblemFamily(
        "numbers",
        "the list with each number below -{k} replaced by -{k} and each above {k} by {k}",
        "[max(-{k}, min({k}, n)) for n in numbers]",
        _numbers,
    ),
    "largest": ProblemFamily(
        "numbers",
        "the {k} largest numbers in descending order; all of them if there are fewer",
        "sorted(numbers, reverse=True)[:{k}]",
        _numbers,
    ),
    "remainders": ProblemFamily(
        "numbers",
        "a dict from each remainder modulo {k} that occurs to the list of the numbers with it, in their order",
        "{{r: [n for n in numbers if n % {k} == r] for r in {{n % {k} for n in numbers}}}}",
        _numbers,
    ),
    "digits": ProblemFamily(
        "number", "the sum of its decimal digits, times {k}", "{k} * sum(map(int, str(number)))", _number
    ),
    "powers": ProblemFamily(
        "number",
        "the largest power of {k} that is at most the number, or 0 for 0",
        "max(({k} ** i for i in range(21) if {k} ** i <= number), default=0)",
        _number,
    ),
    "long_words": ProblemFamily(
        "text", "how many of its words have more than {k} letters", "sum(len(w) > {k} for w in text.split())", _words
    ),
    "shifted": ProblemFamily(
        "text",
        "the text with each letter moved on by {k} in the alphabet, z being followed by a; spaces stay",
        "''.join(chr((ord(c) - 97 + {k}) % 26 + 97) if c != ' ' else c for c in text)",
        _words,
    ),
    "long_runs": ProblemFamily(
        "text",
        "a list of the characters that begin a run of at least {k} equal ones, in order",
        "[c for c, run in __import__('itertools').groupby(text) if len(list(run)) >= {k}]",
        _runs,
    ),
    "every": ProblemFamily("text", "every {k}th character, beginning with the first", "text[::{k}]", _runs),
}
"""Each with the numbers 2 to 9: some hundred tasks, and any number of tests of each."""


def coding_problem(seed: int, tests: int = 8) -> CodingProblem:
    """The problem of a seed: the same wherever it is made."""
    source = random.Random(seed)
    name = source.choice(sorted(FAMILIES))
    family, number = FAMILIES[name], source.randint(2, 9)
    body, function = family.body.format(k=number), f"{name}_{number}"
    solve = eval(f"lambda {family.signature}: {body}")
    cases = [family.inputs(source) for _ in range(tests + 1)]
    checked = tuple(CallTest(function, arguments, solve(*arguments)) for arguments in cases)
    example = checked[0]
    call = f"{function}({', '.join(map(repr, example.arguments))})"
    task = family.task.format(k=number)
    return CodingProblem(
        family=name,
        prompt=f"Write a Python function `{function}({family.signature})` that returns {task}.\n"
        f"For example, `{call}` is `{example.expected!r}`.\nAnswer with one block of code.\n",
        tests=checked[1:],
        solution=f"def {function}({family.signature}):\n    return {body}\n",
    )


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
