"""Mutation testing: do the tests of the first tier notice small changes of what they test?

    PYTHONPATH=tests python -m support.programs.mutation [--mutants 40] [--seed 1] [--only ft/membership]

Each mutant is one change of the syntax tree of one module, made in memory while a fork of this process imports the
module, and then runs the tests that need no other process. A mutant survives if no test fails: what the session finds
left behind at its end may be of other programs. Prints the survivors; the status is 1 if more than one in ten survives.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from support.source_tree import ROOT

SURVIVORS_AT_MOST = 0.1
LINES_OF_FAILURE = 30
NO_PROCESSES = "not shm and not gloo and not ucx and not mpi and not fsdp"


TARGETS = {
    "ft/membership": (
        "ft/membership/*.py",
        "tests/ft/membership tests/ft/session/test_job_environment.py tests/ft/session/test_session_parts.py",
    ),
    "ft/step_protocol": (
        "ft/step_protocol.py",
        "tests/ft/session/test_session_parts.py tests/ft/session/test_step_protocol.py",
    ),
    "store/catalog": (
        "store/catalog/*.py",
        "tests/store/catalog tests/store/fleet/test_fleet_transitions.py tests/store/test_disk.py "
        "tests/store/test_store.py tests/store/test_store_faults.py",
    ),
    "comms": (
        "comms/collectives.py comms/quantities.py comms/tensors/packing.py",
        "tests/comms/calls/test_argument_checks.py tests/comms/ops/test_collectives.py "
        "tests/comms/ops/test_fast_path.py tests/comms/ops/test_native.py tests/comms/memory/test_tensor_memory.py",
    ),
    "rl": (
        "rl/grpo/loss.py rl/grpo/batch.py rl/grpo/token_logprobs.py",
        "tests/rl/grpo/test_losses.py tests/rl/trainers/test_rl_trainer_units.py",
    ),
}
"""By name: modules to change, and the tests that should notice."""

_PAIRS = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = dict([*_PAIRS, *((other, one) for one, other in _PAIRS)])
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


def changes(node: ast.AST) -> Iterator[Callable[[], ast.AST]]:
    """What a node could be instead; each function returns the node to put in its place."""

    def replaced(**fields: object) -> Callable[[], ast.AST]:
        def make() -> ast.AST:
            new = copy.copy(node)
            for name, value in fields.items():
                setattr(new, name, value)
            return new

        return make

    match node:
        case ast.Compare(ops=[operator, *rest]) if type(operator) in COMPARISONS:
            yield replaced(ops=[COMPARISONS[type(operator)](), *rest])
        case ast.BoolOp(op=ast.And()):
            yield replaced(op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield replaced(op=ast.And())
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield replaced(op=OPERATORS[type(operator)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield lambda: operand
        case ast.If(test=test) | ast.IfExp(test=test):
            yield replaced(test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool() as value):
            yield replaced(value=not value)
        case ast.Constant(value=int() as value):
            yield replaced(value=value + 1)
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield replaced(value=ast.Constant(None))


def places(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Every (parent, field, index, node) whose change a test could notice: no annotation, decorator or class header."""
    skipped = {"annotation", "returns", "decorator_list"}
    if isinstance(parent, ast.ClassDef):
        skipped |= {"bases", "keywords"}
    for field, value in ast.iter_fields(parent):
        if field in skipped:
            continue
        for index, part in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(part, ast.AST):
                yield parent, field, index, part
                yield from places(part)


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, Callable[[], ast.AST]]]:
    """Every place of a module with each of its changes."""
    return ((*place, change) for place in places(tree) for change in changes(place[3]))


@dataclass(frozen=True, slots=True)
class Mutant:
    """The `number`-th change of a module."""

    target: str
    path: Path
    number: int

    def apply(self) -> tuple[ast.Module, int, str, str]:
        """The changed tree, with the line, and the source before and after."""
        tree = ast.parse(self.path.read_text())
        parent, field, index, node, change = next(itertools.islice(mutations(tree), self.number, None))
        new, before = ast.copy_location(change(), node), ast.unparse(node)
        if index is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[index] = new
        ast.fix_missing_locations(tree)
        return tree, getattr(node, "lineno", 0), before, ast.unparse(new)

    def __str__(self) -> str:
        _, line, before, after = self.apply()
        return f"{self.path.relative_to(ROOT)}:{line}: {_short(before)}  ->  {_short(after)}"


def _short(text: str) -> str:
    return text.partition("\n")[0][:90]


def mutants(name: str) -> list[Mutant]:
    """Every mutant of a target."""
    paths = [path for pattern in TARGETS[name][0].split() for path in sorted(ROOT.glob(pattern))]
    return [
        Mutant(name, path, number) for path in paths for number, _ in enumerate(mutations(ast.parse(path.read_text())))
    ]


def _import_changed(mutant: Mutant) -> None:
    """Let this process import one module with the changed code."""
    read = SourceFileLoader.get_code

    def code_of(loader: SourceFileLoader, name: str) -> Any:
        changed = Path(loader.path) == mutant.path
        return compile(mutant.apply()[0], loader.path, "exec") if changed else read(loader, name)

    SourceFileLoader.get_code = code_of


class _Failures:
    """A plugin of pytest: whether a test failed, or a module of tests could not be imported."""

    failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed |= report.failed

    pytest_collectreport = pytest_runtest_logreport


def _run_tests(target: str, mutant: Mutant | None, output: int) -> NoReturn:
    """Run the tests in this process, a fork, with its output in a file, and end with their status."""
    status = 99
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if mutant is not None:
            _import_changed(mutant)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not thorough", "-k", NO_PROCESSES]
        tests = _Failures()
        status = int(pytest.main([*options, "--hypothesis-seed=1", *TARGETS[target][1].split()], [tests]))
        if status == pytest.ExitCode.TESTS_FAILED and not tests.failed:
            status = 0
        sys.stdout.flush()
    finally:
        os._exit(status)


def failure(target: str, mutant: Mutant | None, limit: float) -> str | None:
    """The last lines that the tests write if they fail or take longer than `limit` seconds; None if they pass."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _run_tests(target, mutant, output.fileno())
        pidfd = os.pidfd_open(pid)
        try:
            if not select.select([pidfd], [], [], limit)[0]:
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _end_what_is_left(pid)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    return None if status == 0 else "\n".join([*lines[-LINES_OF_FAILURE:], f"status {status}, limit {limit:.0f} s"])


def _end_what_is_left(group: int) -> None:
    """End the processes that tests have left, by the product's own rule, which spares Python's resource trackers.

    A fork imports it: what this process has imported cannot be mutated.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return
    pid = os.fork()
    if pid == 0:
        try:
            from holdfast.ft.processes.process_group import end_group

            end_group(group)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=40, help="how many, divided among the targets by their size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=TARGETS)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    import hypothesis  # noqa: F401
    import torch.distributed  # noqa: F401

    names = [arguments.only] if arguments.only else list(TARGETS)
    every = [mutant for name in names for mutant in mutants(name)]
    chosen = random.Random(arguments.seed).sample(every, min(arguments.mutants, len(every)))
    survivors = []
    for name in names:
        mine = [mutant for mutant in chosen if mutant.target == name]
        if not mine:
            continue
        began = time.monotonic()
        if (lines := failure(name, None, 600.0)) is not None:
            print(f"{name}: the tests fail without a mutant\n{lines}")
            return 2
        limit = 5.0 * (time.monotonic() - began) + 20.0
        print(f"{name}: {len(mine)} mutants, {limit:.0f} s at most each", flush=True)
        for mutant in mine:
            if failure(name, mutant, limit) is None:
                survivors.append(mutant)
                print(f"survived: {mutant}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants were noticed (seed {arguments.seed})")
    return int(len(survivors) > SURVIVORS_AT_MOST * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
