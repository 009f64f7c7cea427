"""The studies of docs/experiments: each is listed, and runs, for a moment here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from holdfast.store.catalog.fan_out import AT_ONCE, SEEDS
from support.programs.forked_programs import run_forked
from support.source_tree import ROOT

FOLDER = ROOT / "docs" / "experiments"
PROGRAMS = sorted(FOLDER.glob("*.py"))


def run(name: str, *arguments: str, timeout: float = 100.0) -> str:
    """What a study prints; it must end with status 0."""
    program = FOLDER / f"{name}.py"
    done = run_forked(program.read_text(), [str(program), *arguments], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_each_study_is_listed_with_the_command_that_it_names(program: Path) -> None:
    command = f"python docs/experiments/{program.name}"
    assert command in (FOLDER / "README.md").read_text()
    assert command in run(program.stem, "--help")


def test_slow_ranks_on_too_few_cores_are_not_evicted() -> None:
    found = json.loads(run("evictions", "--seconds", "4", "--ranks", "4", "--suspect", "0.3", "--json"))
    assert (found["evictions"], found["epochs"]) == ([], 1)
    assert found["rounds"] > 0 and sum(found["hogs"].values()) > 0


def test_a_version_reaches_a_thousand_readers_while_a_replica_sends_few_copies() -> None:
    found = json.loads(run("fan_out", "--readers", "1000"))
    assert found["publisher_copies"] <= SEEDS
    assert found["reader_copies"] <= 4 and found["at_once"] <= 2 * AT_ONCE
    assert found["seconds"] < 6 * found["alone"] < found["direct"] / 10
    assert found["catalog_bytes"] < 100_000 and found["group_bytes"] < 100_000


def test_the_messages_of_an_exchange_grow_slower_than_the_job(tmp_path: Path) -> None:
    """Eight times the members: no member handles twice the messages."""
    said = run("growth", str(tmp_path), "--sizes", "256", "2048", "--hours", "100")
    found = json.loads((tmp_path / "simulate.json").read_text())
    small, large = found["exchanges"]
    assert large["messages_max"] < 2 * small["messages_max"] and large["messages_mean"] < 2 * small["messages_mean"]
    assert large["depth"] <= small["depth"] + 2
    assert "0 false evictions" in said and len(list(tmp_path.glob("*.svg"))) == 5


@pytest.mark.thorough
def test_a_quantised_all_reduce_moves_a_quarter_of_the_bytes_within_its_bound() -> None:
    (cost,) = json.loads(
        run("quantised", "--backends", "inproc", "--sizes", str(1 << 20), "--ranks", "3", "--rounds", "1")
    )["costs"]
    assert 0.25 < cost["quantised_bytes"] / cost["plain_bytes"] < 0.27
    assert 0.0 < cost["error"] < 1.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("recovery_bound --ranks 2 --kills 1", r"holdfast [\d.]+ ms, the least [\d.]+ ms: .*medians of 1"),
        ("service_kills --engines local --kills 3", "local: 3 kills under 6 clients, .*none lost"),
        ("rl_modes --steps 12 --seeds 1", r"asynchronous over synchronous: [\d.]+"),
        ("rl_updates --steps 12 --hidden-size 32", r"median [\d.]+ ms, .*, of 8"),
    ],
    ids=lambda text: text.split()[0],
)
def test_a_study_prints_its_figure(arguments: str, result: str) -> None:
    assert re.search(result, run(*arguments.split()))
