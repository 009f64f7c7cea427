"""Each test is in one tier, and a property takes the number of its examples from it (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from support.source_tree import ROOT, TESTS, parsed

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
