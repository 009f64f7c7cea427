"""Unit tests of untrusted code. The code cannot forge the verdict, because it never meets the expected result.

Each test is a run of its own. The code gets the input of that test and says what it makes of it; the comparison is
done outside. Whatever else it does (it exits, patches `assert`, searches the memory of its process), no test passes
without the right answer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from holdfast.rl.environments.sandbox.limits import Limits, Reason, SandboxError, SandboxLost, SandboxResult
from holdfast.rl.environments.sandbox.sandbox import Sandbox, program_of
from holdfast.rl.environments.sandbox.values import equals, is_plain

_TIMEOUTS = 2
"""After so many tests that ran out of time the others count as failed: an endless loop costs no more than these."""

_TRIES = 3
"""How often a test is run whose run was lost with the sandbox's own process."""


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
    solution: str, tests: Sequence[CodeTest], limits: Limits | None = None, *, sandbox: Sandbox | None = None
) -> SolutionResult:
    """Run each test with the limits given, one after the other. Without a sandbox, in a new one.

    A run that is lost with the sandbox's own process is run again. Raises `SandboxLost` if all tries are lost: the
    grader failed, not the solution.
    """
    if not tests:
        raise SandboxError("run_tests got no test: the reward of such a task would be undefined; give at least one")
    if sandbox is None:
        with Sandbox() as new:
            return run_tests(solution, tests, limits, sandbox=new)
    verdicts = list[Verdict]()
    timeouts = 0
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
            result = sandbox.run_program(program_of(solution, test.function, test.arguments), "", limits)
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
    return Verdict(right and result.reason == "ok", result.reason, "" if right else _last_line(result))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _last_line(result: SandboxResult) -> str:
    return result.stderr.rstrip().rpartition("\n")[2][:200]


def parse_asserts(source: str) -> tuple[CallTest, ...]:
    """Turn lines such as `assert f(1, [2]) == 3` into tests, as data sets of tasks have them.

    Raises SandboxError, with the line, for any other: an assertion that runs beside the code proves nothing.
    """
    return tuple(_from_assert(node, source) for node in _statements(source))


def _statements(source: str) -> Iterable[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError as error:
        raise SandboxError(f"line {error.lineno} of the tests is no Python: {error.msg}; correct it") from error


def _from_assert(node: ast.stmt, source: str) -> CallTest:
    expression, expected = node.test if isinstance(node, ast.Assert) else node, "True"
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        expression, expected = expression.operand, "False"
    elif isinstance(expression, ast.Compare) and [type(op) for op in expression.ops] in ([ast.Eq], [ast.Is]):
        left, right = expression.left, expression.comparators[0]
        expression, literal = (left, right) if isinstance(left, ast.Call) else (right, left)
        expected = ast.unparse(literal)
    plain = isinstance(node, ast.Assert) and isinstance(expression, ast.Call) and not expression.keywords
    if plain and isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name):
        with suppress(ValueError):
            arguments = tuple(ast.literal_eval(argument) for argument in expression.args)
            return CallTest(expression.func.id, arguments, ast.literal_eval(expected))
    raise SandboxError(
        f"line {node.lineno} of the tests cannot be judged from outside: {ast.get_source_segment(source, node)!r}; "
        "write `assert function(literals) == literal`"
    )
