"""Unit tests of untrusted code. The code cannot forge the verdict, because it never meets the expected result.

Each test is a run of its own. The code gets the input of that test and says what it makes of it; the comparison is
done outside, as Python's `==` does it, with a tolerance for floats. Whatever else the code does (it exits, patches
`assert`, searches the memory of its process), no test passes without the right answer.

Stops: objects that equal everything, and values that are built to keep the comparison busy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.rl.environments.sandbox.inside.execute import decode
from holdfast.rl.environments.sandbox.limits import Limits, Reason, SandboxError, SandboxLost, SandboxResult
from holdfast.rl.environments.sandbox.sandbox import Sandbox, program_of

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Two floats that differ by no more than these are equal, and NaN equals NaN.

Compared exactly are an int and a float, elements of sets, and keys.
"""

_DEEPEST = 100
"""Of nested containers: a value that is deeper equals nothing."""

_MOST_IN_KEY = 1000
"""Elements of a container within a set or a key: the code may choose them so that their hashes collide."""

_SCALARS = (bool, int, float, str, bytes, type(None))


def equals(encoded: bytes, expected: object) -> bool:
    """True if a run's encoded value equals plain data. Any text may come as `encoded`."""
    with suppress(ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return _same(json.loads(encoded), expected, _DEEPEST)
    return False


def is_plain(value: object, depth: int = _DEEPEST) -> bool:
    """True if a value survives the way into a run and out of it."""
    if type(value) in _SCALARS:
        return True
    if not depth:
        return False
    if isinstance(value, dict) and type(value) is dict:
        return all(is_plain(each, depth - 1) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset) and type(value) in (list, tuple, set, frozenset):
        return all(is_plain(each, depth - 1) for each in value)
    return False


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
        scalar: Hashable = decode(encoded)
        return scalar
    kind, items = encoded
    if kind not in ("tuple", "frozenset") or len(items) > _MOST_IN_KEY:
        raise ValueError("not hashable")
    return tuple(map(_key, items)) if kind == "tuple" else frozenset(map(_key, items))


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
    solution: str, tests: Sequence[CodeTest], limits: Limits | None = None, *, sandbox: Sandbox
) -> SolutionResult:
    """Run each test with the limits given, one after the other.

    A run that is lost with the sandbox's own process is run again. Raises `SandboxLost` if all tries are lost: the
    grader failed, not the solution.
    """
    if not tests:
        raise SandboxError("run_tests got no test: the reward of such a task would be undefined; give at least one")
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
