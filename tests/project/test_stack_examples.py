"""The examples of systems with an environment of their own: what they are pinned to, and that they run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
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


def run(extra: str, *command: str | Path) -> str:
    """The output of a program in a system's own environment."""
    python = ROOT / ".venv" / "extras" / extra / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{extra} is not installed: make {'vllm-newest' if extra == 'vllm-0.33' else f'extra-{extra}'}")
    done = subprocess.run([python, *command], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


JOBS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import restarted_job as jobs
jobs.STEPS = 6
print(json.dumps([jobs.job(*sys.argv[2:], "gloo"), jobs.job(*sys.argv[2:], "holdfast", 5)]))
"""


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("system", "example"), [("trl", "grpo"), ("lightning", "lightning")])
def test_a_trainer_over_holdfast_is_equal_to_gloo_though_a_rank_is_killed(system: str, example: str) -> None:
    gloo, killed = json.loads(run(system, "-c", JOBS, STACK, system, example))
    assert killed["backend"].startswith("holdfast.") and not gloo["backend"].startswith("holdfast.")
    assert len({*killed["weights"], *gloo["weights"]}) == 1
    assert (killed["restarts"], gloo["restarts"]) == (1, 0) and len(gloo["losses"]) == 6
    if system == "trl":
        assert killed["losses"] == gloo["losses"]
    else:
        assert 0 < len(killed["losses"]) < 6, "it went on from a checkpoint"
        assert killed["losses"] == gloo["losses"][-len(killed["losses"]) :]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("system", "command"),
    [
        *((system, "show.py") for system in ("openenv", "ray", "torchft", "verl")),
        ("vllm", "in_one_process.py"),
        ("vllm-0.33", "in_one_process.py"),
        ("torchft", "own_tests.py process_group_test"),
    ],
)
def test_the_example_of_a_system_finds_what_the_table_says(system: str, command: str) -> None:
    program, *arguments = command.split()
    run(system, STACK / system.partition("-")[0] / program, *arguments)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_torchtitan_with_torchft_goes_on_when_a_group_is_killed_and_comes_back() -> None:
    if not list((ROOT / ".venv" / "extras" / "titan").glob("lib/*/site-packages/torchft")):
        pytest.skip("torchft is not installed beside torchtitan: make extra-titan")
    assert "equal: True" in run("titan", STACK / "titan" / "two_groups.py", "each step, 2 ranks")


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")
def test_memory_between_actors_of_monarch_is_faster_than_monarchs_over_tcp() -> None:
    program = [sys.executable, STACK / "monarch" / "rdma.py", "16", "3"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
