"""Each test is in one tier, and needs no fast machine (CONTRIBUTING.md).

A property takes the number of its examples from the tier. A busy machine takes more than few seconds, and nothing is
wrong: what is asserted instead is an event, an order, a ratio, or a bound of `support.waiting.PATIENCE` beside a
timeout of twice that, which only the fault would wait for.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from support.source_tree import ROOT, TESTS, parsed
from support.waiting import PATIENCE

FILES = [path.relative_to(ROOT) for path in sorted(TESTS.rglob("*.py"))]
FEWEST = 30
"""Examples of a property in the first tier."""


def calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Every call of a function of this name in the tests."""
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                yield path, node


def test_the_two_targets_run_every_test() -> None:
    """With one mark a test has it or not: another one for time would stand beside it."""
    makefile = (ROOT / "Makefile").read_text()
    chosen = re.findall(r'\$\(PYTEST\) -m "([^"]*)"', makefile)
    assert chosen == ["not thorough", "thorough or hypothesis"]
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert [mark.partition(":")[0] for mark in marks] == ["thorough", "gpu", "root"]


def test_a_property_takes_its_number_of_examples_from_the_tier() -> None:
    wrong = [
        f"{path}:{call.lineno}: leave out {keyword.arg}"
        for path, call in calls("settings")
        for keyword in call.keywords
        if (keyword.arg == "max_examples" and ast.literal_eval(keyword.value) >= FEWEST) or keyword.arg == "deadline"
    ]
    assert not wrong, "\n".join(wrong)


# Limits of time

CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns"}


def is_clock(node: ast.AST) -> bool:
    """Whether it reads a clock: `time.monotonic()`, or the time of an event or an outcome."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("time"), attr=name), args=[]):
            return name in CLOCKS
        case ast.Subscript(slice=ast.Constant("time")) | ast.Attribute(attr="time"):
            return True
    return False


def assigned(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each name that a function assigns, with its value."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                yield name, value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                yield from (
                    (name.id, value) for name, value in zip(names, values, strict=True) if isinstance(name, ast.Name)
                )


def tight(function: ast.AST) -> Iterator[ast.Compare]:
    """The assertions of a function that a time is below a number of seconds that is too small."""
    starts = {name for name, value in assigned(function) if is_clock(value)}

    def is_time(node: ast.AST) -> bool:
        return is_clock(node) or (isinstance(node, ast.Name) and node.id in starts)

    def is_elapsed(node: ast.AST) -> bool:
        match node:
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return any(is_time(each) for side in (left, right) for each in ast.walk(side))
        return False

    spans = {name for name, value in assigned(function) if any(map(is_elapsed, ast.walk(value)))}
    for check in ast.walk(function):
        if not isinstance(check, ast.Assert):
            continue
        for compared in ast.walk(check.test):
            if isinstance(compared, ast.Compare):
                sides = [compared.left, *compared.comparators]
                for less, operator, more in zip(sides, compared.ops, sides[1:], strict=False):
                    if isinstance(operator, ast.Gt | ast.GtE):
                        less, more = more, less
                    match more:
                        case ast.Constant(value=int() | float() as seconds) if seconds < PATIENCE:
                            if any(is_elapsed(each) for each in ast.walk(less)) or getattr(less, "id", None) in spans:
                                yield compared


def test_no_assertion_needs_a_fast_machine() -> None:
    wrong = {
        f"{path}:{compared.lineno}: {ast.unparse(compared)}"
        for path in FILES
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for compared in tight(function)
    }
    assert not wrong, "wait for an event, or compare with PATIENCE:\n" + "\n".join(sorted(wrong))


def test_a_tight_limit_is_found() -> None:
    body = "def f():\n    began = time.monotonic()\n    g()\n    assert time.monotonic() - began < {}\n"
    assert len(list(tight(ast.parse(body.format("2.0"))))) == 1
    assert not list(tight(ast.parse(body.format("PATIENCE"))))
