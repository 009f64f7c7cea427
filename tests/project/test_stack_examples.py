"""The examples of systems with an environment of their own: what they are pinned to, and that they run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.source_tree import ROOT

STACK = ROOT / "examples" / "stack"
REQUIREMENTS = sorted(STACK.glob("*/requirements.txt"))


def pins(path: Path) -> dict[str, str]:
    """The versions in a file of requirements, by name."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+-]+", line)], "every version is pinned"
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in (each.partition("==") for each in lines)
    }


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.parent.name)
def test_every_version_is_pinned_and_torch_is_ours(path: Path) -> None:
    assert pins(path)["torch"] == pins(ROOT / "constraints.txt")["torch"]


@pytest.mark.parametrize("path", sorted(STACK.rglob("*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


def show(extra: str, *arguments: str) -> None:
    """Run a system's examples in its own environment; they compare what must be equal."""
    python = ROOT / ".venv" / "extras" / extra / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{extra} is not installed: make extra-{extra}")
    command = [python, STACK / extra / "show.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_trl_is_equal_over_holdfast_and_gloo_and_after_a_kill() -> None:
    show("trl", "grpo.py")


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_openenv_validates_our_environments_and_plays_them() -> None:
    show("openenv")
