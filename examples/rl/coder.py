"""Write a Python function in one turn, rewarded by the share of hidden tests that it passes in the sandbox.

    holdfast rl train examples/rl/coder.toml --set model.path=FOLDER
    holdfast rl environment serve "python:examples/rl/coder.py:CoderEnvironment?tests=8"

The problems are families of small functions, each with a number that the seed chooses. `run_tests` judges solutions of
any problems: copy it for yours.

The code cannot forge the verdict, because it never meets the expected result. Each test is a run of its own. The code
gets the input of that test and says what it makes of it; the comparison is done outside, as Python's `==` does it, with
a tolerance for floats. Whatever else the code does (it exits, patches `assert`, searches the memory of its process), no
test passes without the right answer. That stops objects that equal everything, and values that are built to keep the
comparison busy.
"""

import inspect
import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.sandbox import Limits, Sandbox, SandboxError
from holdfast.rl.environments.sandbox.limits import MEBIBYTE, Reason
from holdfast.rl.errors import EpisodeOver, UnknownEnvironment

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Two floats that differ by no more than these are equal, and NaN equals NaN.

Compared exactly are an int and a float, elements of sets, and keys.
"""

_DEEPEST = 100
"""Of nested containers: a value that is deeper equals nothing."""

_MOST_IN_KEY = 1000
"""Elements of a container within a set or a key: the code may choose them so that their hashes collide."""

_SCALARS = (bool, int, float, str, bytes, type(None))


def encode(value: Any) -> Any:
    """Plain data as JSON that keeps the types apart; any other value as its type's name.

    A value of a subclass, such as `Counter`, a named tuple or `IntEnum`, is what its plain type says that it is.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item) for item in kind.__iter__(value)]]
    return ["object", type(value).__name__]


def decode(encoded: Any) -> Any:
    """Plain data from what `encode` makes of it. Raises for any other text."""
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {decode(key): decode(item) for key, item in content}
    make: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return make(map(decode, content))


_CALL = f"""
from __future__ import annotations
import json, os, sys, types
{inspect.getsource(encode)}
{inspect.getsource(decode)}
def call(code, function, arguments):
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(code, "<solution>", "exec"), module.__dict__)
    encoded = json.dumps(encode(getattr(module, function)(*decode(arguments)))).encode()
    while encoded:
        encoded = encoded[os.write(3, encoded) :]
"""
"""What runs beside the solution, and writes what a call of it gives on descriptor 3."""


def equals(encoded: bytes, expected: object) -> bool:
    """True if a run's encoded value equals plain data. Any text may come as `encoded`."""
    with suppress(ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return _same(json.loads(encoded), expected, _DEEPEST)
    return False


def is_plain(value: object, depth: int = _DEEPEST) -> bool:
    """True if a value survives the way into a run and out of it."""
    if type(value) in _SCALARS:
        return True
    if not depth or type(value) not in (dict, list, tuple, set, frozenset):
        return False
    inner = itertools.chain(*value.items()) if isinstance(value, dict) else value
    return all(is_plain(each, depth - 1) for each in inner)


def _same(got: Any, wanted: Any, depth: int) -> bool:
    """Whether an encoded value equals a plain one. Nothing larger than `wanted` is decoded."""
    if not depth:
        return False
    if isinstance(wanted, _SCALARS):
        return _is_scalar(got) and _equal(decode(got), wanted)
    kind, items = got
    if not isinstance(items, list) or len(items) != len(wanted):
        return False
    if isinstance(wanted, dict):
        found = {_key(key): item for key, item in items}
        same = kind == "dict" and found.keys() == wanted.keys()
        return same and all(_same(found[key], wanted[key], depth - 1) for key in wanted)
    if isinstance(wanted, set | frozenset):
        return kind in ("set", "frozenset") and frozenset(map(_key, items)) == wanted
    return bool(kind == type(wanted).__name__) and all(
        _same(mine, yours, depth - 1) for mine, yours in zip(items, wanted, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether scalars are equal, but for the rounding of floats."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (one != one and other != other)
    return bool(one == other)


def _is_scalar(encoded: Any) -> bool:
    return not isinstance(encoded, list | dict) or (
        isinstance(encoded, list) and encoded[0] in ("int", "float", "bytes")
    )


def _key(encoded: Any) -> Hashable:
    """The hashable value behind a text. Raises ValueError for one that is none, or too large."""
    if _is_scalar(encoded):
        return decode(encoded)
    kind, items = encoded
    if kind not in ("tuple", "frozenset") or len(items) > _MOST_IN_KEY:
        raise ValueError("not hashable")
    return tuple(map(_key, items)) if kind == "tuple" else frozenset(map(_key, items))


_TIMEOUTS = 2
"""After so many tests that ran out of time the others count as failed: an endless loop costs no more than these."""

_TRIES = 3
"""How often a test is run whose run was lost with the sandbox's own process."""


class SandboxLost(SandboxError):
    """The sandbox's own process was killed, again and again, while code was judged: nothing is known of that code."""

    def __init__(self, tries: int) -> None:
        self.tries = tries
        super().__init__(
            f"the sandbox's own process was killed in each of {tries} tries to run a test: the code has no score; look "
            "for what kills it, such as the kernel's OOM killer"
        )


class CallTest(msgspec.Struct, frozen=True):
    """`function(*arguments)` must give `expected`. All are plain data: numbers, texts, and containers of these."""

    function: str
    arguments: tuple[object, ...]
    expected: object

    def __post_init__(self) -> None:
        for value in (self.arguments, self.expected):
            if not is_plain(value):
                raise SandboxError(
                    f"a test of {self.function!r} has {value!r}, which cannot be compared from outside: "
                    "give None, bools, numbers, texts, bytes, and lists, tuples, sets and dicts of these"
                )


class OutputTest(msgspec.Struct, frozen=True):
    """The program reads `stdin` and must print `expected`; space at the ends of lines does not count."""

    stdin: str
    expected: str


CodeTest = CallTest | OutputTest


class Verdict(msgspec.Struct, frozen=True):
    """What one test found. `reason` is None if the test was not run any more."""

    passed: bool
    reason: Reason | None
    message: str = ""


class SolutionResult(msgspec.Struct, frozen=True):
    """The verdicts in the order of the tests."""

    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> int:
        return sum(verdict.passed for verdict in self.verdicts)

    @property
    def fraction(self) -> float:
        """The share of the tests that passed: from 0 to 1."""
        return self.passed / len(self.verdicts)


def run_tests(
    solution: str, tests: Sequence[CodeTest], limits: Limits | None = None, *, sandbox: Sandbox
) -> SolutionResult:
    """Run each test with the limits given, one after the other.

    A run that is lost with the sandbox's own process is run again. Raises `SandboxLost` if all tries are lost: the
    grader failed, not the solution.
    """
    if not tests:
        raise SandboxError("run_tests got no test: the reward of such a task would be undefined; give at least one")
    verdicts, timeouts = list[Verdict](), 0
    for test in tests:
        if timeouts == _TIMEOUTS:
            verdicts.append(Verdict(False, None, f"not run: {_TIMEOUTS} tests before it ran out of time"))
            continue
        verdicts.append(_run(solution, test, limits or Limits(), sandbox))
        timeouts += verdicts[-1].reason == "timeout"
    return SolutionResult(tuple(verdicts))


def _run(solution: str, test: CodeTest, limits: Limits, sandbox: Sandbox) -> Verdict:
    for _ in range(_TRIES):
        if isinstance(test, CallTest):
            call = json.dumps([solution, test.function, encode(test.arguments)])
            result = sandbox.run(f"{_CALL}\ncall(*json.loads({call!r}))", "", limits)
        else:
            result = sandbox.run(solution, test.stdin, limits)
        if result.reason != "lost":
            break
    else:
        raise SandboxLost(_TRIES)
    if isinstance(test, CallTest):
        right = equals(result.value, test.expected)
    else:
        right = _lines(result.stdout) == _lines(test.expected)
    message = "" if right else result.stderr.rstrip().rpartition("\n")[2][:200]
    return Verdict(right and result.reason == "ok", result.reason, message)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


# -- problems


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
            self._shared = CoderEnvironment._sandbox = CoderEnvironment._sandbox or Sandbox()
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
        if failed := [verdict for verdict in result.verdicts if not verdict.passed]:
            text += f"; the first that failed: {failed[0].message or failed[0].reason}"
        return Observation(text=text, fields={"passed": result.passed}, reward=result.fraction, done=True)

    def close(self) -> None:
        with CoderEnvironment._lock:
            CoderEnvironment._users -= 1
            if CoderEnvironment._users == 0 and CoderEnvironment._sandbox is not None:
                CoderEnvironment._sandbox.close()
                CoderEnvironment._sandbox = None
