"""`holdfast gate`: its statistics, how a commit becomes importable, and a real slowdown that it finds."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from holdfast.comms import reproducible
from holdfast.harness.gate import gate
from holdfast.harness.gate.pairs import PairLauncher, RunningSide, SideFailed
from holdfast.harness.gate.sides import NoSuchSide, Side, build, differing_pins
from holdfast.harness.measure.stats import paired_ratio, t_cdf, t_quantile
from holdfast.harness.measure.workers import OpFailed, WorkerFailed
from support.programs.forked_programs import said_as_json
from support.source_tree import PACKAGES, ROOT
from support.waiting import PROGRAM_SECONDS, eventually

# The test that decides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [(0.975, 1, 12.706), (0.95, 5, 2.015), (0.99, 10, 2.764), (0.999, 7, 4.785), (0.95, 30, 1.697)],
)
def test_students_quantiles_are_those_of_the_tables(probability: float, degrees: int, quantile: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(quantile, abs=0.001)
    assert t_cdf(quantile, degrees) == pytest.approx(probability, abs=1e-4)


def test_drift_cancels_and_a_disturbed_turn_does_no_harm() -> None:
    drifting = [(1.0 + t, 1.0 + t + 0.01, 1.0 + t + 0.02, 1.0 + t + 0.03) for t in (0.0, 0.1, 0.2, 0.3)]
    assert paired_ratio(drifting) == pytest.approx(0.0, abs=1e-3)
    slower = [(1.0, 1.05, 1.05, 1.0)] * 8
    assert paired_ratio(slower) == pytest.approx(0.0488, abs=1e-4)
    assert paired_ratio([*slower, (1.0, 9.0, 9.0, 1.0)]) == pytest.approx(paired_ratio(slower))


def _verdict(slowdown: float, noise: float, chance: random.Random, workloads: int = 8) -> gate.Verdict:
    """Apply the rule to clusters with normally distributed log ratios."""
    rule, ratios = gate.DecisionRule(), []
    for _ in range(rule.most):
        ratios.append(chance.gauss(slowdown, noise))
        verdict, _ = gate.decide(ratios, rule, workloads)
        if verdict != "unsure":
            return verdict
    return "unsure"


@pytest.mark.parametrize("noise", [0.002, pytest.param(0.01, marks=pytest.mark.thorough), 0.03])
def test_the_rule_keeps_its_error_rates_at_any_noise(noise: float) -> None:
    chance = random.Random(7)
    equal = [_verdict(0.0, noise, chance) for _ in range(1000)]
    slowed = [_verdict(0.0488, noise, chance) for _ in range(1000)]
    assert equal.count("slower") <= 0.01 / 8 * len(equal) + 2
    assert slowed.count("slower") >= 0.95 * len(slowed)
    assert slowed.count("same") <= 0.005 * len(slowed) + 2
    exactly = [0.008 + 0.0001 * (number % 2) for number in range(10)]
    assert gate.decide(exactly, gate.DecisionRule(), 1)[0] == "same", "a certain difference, within the margin"


# The sides -------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, of a package laid out like holdfast."""
    root = tmp_path / "repository"
    (root / "comms").mkdir(parents=True)
    (root / "comms" / "__init__.py").write_text("STATE = 'committed'\n")
    (root / "constraints.txt").write_text("# pins\ntorch==1\n")
    (root / "pyproject.toml").write_text(
        '[project]\nname = "holdfast"\nversion = "7"\n[project.entry-points.holdfast]\nshm = "holdfast.shm"\n'
    )
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(root), *arguments], check=True, timeout=PROGRAM_SECONDS)
    return root


def test_a_commit_is_built_with_its_own_entry_points_and_leaves_no_trace(repository: Path, tmp_path: Path) -> None:
    (repository / "comms" / "__init__.py").write_text("STATE = 'changed'\n")
    side = build("HEAD", repository, tmp_path / "built")
    assert (side.site / "holdfast" / "comms" / "__init__.py").read_text() == "STATE = 'committed'\n"
    assert side.title.endswith("first")
    (found,) = distributions(path=[str(side.site)])
    assert [(point.name, point.value) for point in found.entry_points] == [("shm", "holdfast.shm")]
    worktrees = subprocess.run(["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True)
    assert len(worktrees.stdout.splitlines()) == 1


def test_a_folder_is_a_side_as_it_is_found_from_a_subfolder_too_and_pins_that_differ_are_told(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / "comms")
    (repository / "constraints.txt").write_text("torch==2\n")
    (repository / "comms" / "__init__.py").write_text("STATE = 'changed'\n")
    base, head = (build(name, Path(), tmp_path / f"built {name}") for name in ("HEAD", "."))
    (repository / "comms" / "__init__.py").write_text("STATE = 'changed again'\n")
    assert (head.site / "holdfast" / "comms" / "__init__.py").read_text() == "STATE = 'changed'\n"
    assert differing_pins(base, head) == ("torch==1", "torch==2")


def test_an_unknown_side_is_refused_with_what_to_do(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(NoSuchSide):
        build("no-such-commit", repository, tmp_path / "built")
    with pytest.raises(ValueError, match="no such workload: nosuch; there are call"):
        gate.chosen(["nosuch"])
    with pytest.raises(NoSuchSide, match=r"main is no folder with a pyproject\.toml, and no commit can be looked for"):
        build("main", tmp_path, tmp_path / "no repository")
    shallow = tmp_path / "shallow"
    clone = ["git", "clone", "-q", "--depth", "1", f"file://{repository}", str(shallow)]
    subprocess.run(clone, check=True, timeout=PROGRAM_SECONDS)
    with pytest.raises(NoSuchSide, match="the clone is shallow: git fetch --unshallow"):
        build("HEAD~1", shallow, tmp_path / "older")


def test_two_folders_need_no_repository_and_no_git(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(str(repository), tmp_path, tmp_path / "built").title.endswith("as it is")
    with pytest.raises(NoSuchSide, match="git is not installed: name two folders"):
        build("HEAD", repository, tmp_path / "commit")


@pytest.mark.thorough
def test_sigterm_ends_the_gate_with_nothing_left_behind(repository: Path, tmp_path: Path) -> None:
    own = tmp_path / "temporary"
    own.mkdir()
    (repository / "setup.py").write_text("import time; time.sleep(60)\n")  # it is being compiled when the signal comes
    command = [sys.executable, "-m", "holdfast.harness.cli.app", "gate", str(repository), str(repository)]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(own)}, stderr=subprocess.DEVNULL)
    eventually(lambda: any(own.glob("holdfast-gate-*/base/tree/setup.py")))
    process.terminate()
    assert process.wait(PROGRAM_SECONDS) == 128 + signal.SIGTERM
    assert list(own.iterdir()) == []


def test_the_reproducible_workload_adds_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    add_exactly = reproducible.add_exactly
    monkeypatch.setattr(reproducible, "add_exactly", lambda *args: (called.append(1), add_exactly(*args)))
    (workload,) = gate.chosen(["reproducible"])
    op = workload.make(0, workload.ranks, tmp_path)
    op()
    assert called


# Whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_gate_finds_the_workload_that_became_slower_and_no_other(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, slow / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, slow)
    execution = slow / "comms" / "executor.py"
    code = execution.read_text()
    head = "    def issue("
    assert head in code
    body = code.index('"""', code.index('"""', code.index(head)) + 3) + 3
    execution.write_text(f"{code[:body]}\n        sum(range(2000))\n{code[body:]}")
    only = ["--only", "long-way", "--only", "membership", "--most", "6"]
    findings = said_as_json("gate", ROOT, slow, *only, status=1)["findings"]
    verdicts = {finding["workload"]: finding["verdict"] for finding in findings}
    assert verdicts["long-way"] == "slower"
    assert verdicts["membership"] != "slower"


def test_a_side_that_does_not_run_its_own_code_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "site").mkdir(parents=True)
    sides = [Side("broken", "broken", broken / "site", broken)]
    with PairLauncher() as launcher, pytest.raises(SideFailed, match="is not its code"), launcher.pair(sides):
        pass


def found(workload: str, verdict: str, why: str = "") -> gate.WorkloadResult:
    return gate.WorkloadResult(workload, "an op", 1.0, 1.0, 0.0, -1.0, float("inf"), 0 if why else 7, verdict, why)


def reported(*findings: gate.WorkloadResult) -> gate.GateReport:
    return gate.GateReport("a", "b", findings, gate.DecisionRule(), 1.0, 0.0, ("torch==2",))


def test_workloads_that_base_lacks_are_not_compared() -> None:
    report = reported(found("store", "not compared", "no such module"), found("call", "same"))
    shown = io.StringIO()
    gate.show(report, Console(file=shown, width=200))
    assert "not compared: no such module" in shown.getvalue()
    assert "pinned versions differ" in shown.getvalue()
    assert msgspec.json.decode(msgspec.json.encode(report))["findings"][0]["workload"] == "store"


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ((found("call", "same"), found("store", "not compared", "no module")), 0),
        ((found("call", "same"), found("store", "does not run", "TypeError")), 2),
        ((found("call", "not compared", "no module"),), 2),
        ((found("call", "slower"), found("store", "unsure")), 1),
        ((found("call", "same"), found("store", "unsure")), 3),
        ((found("call", "same"), msgspec.structs.replace(found("store", "unsure"), high=0.049)), 0),
    ],
)
def test_the_status_counts_workloads_that_were_not_compared_or_not_decided(
    findings: tuple[gate.WorkloadResult, ...], status: int
) -> None:
    assert reported(*findings).status == status


@pytest.mark.parametrize(
    ("base", "head", "verdicts"),
    [
        (("store", OpFailed("AttributeError")), ("call", OpFailed("AttributeError")), ["does not run", "not compared"]),
        (("", OpFailed("")), ("call", WorkerFailed("rank 0 ended")), ["does not run", "unsure"]),
    ],
    ids=["it raises", "its processes end, and the others are left to the next pair"],
)
def test_a_workload_that_only_head_cannot_run_is_broken(
    base: tuple[str, Exception], head: tuple[str, Exception], verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side has one rank here: the workload that it cannot run, and how it fails."""

    @contextlib.contextmanager
    def pair(_: PairLauncher, sides: Sequence[Side]) -> Iterator[list[RunningSide]]:
        yield [RunningSide(side, SimpleNamespace(workers=[rank])) for rank in (base, head)]  # type: ignore[arg-type]

    def call(ranks: Sequence[tuple[str, Exception]], _: str, workload: str, *__: object, **___: object) -> list[int]:
        for refused, error in ranks:
            if workload == refused:
                raise error
        return [1] * len(ranks)

    monkeypatch.setattr("holdfast.harness.gate.pairs.call", call)
    monkeypatch.setattr(PairLauncher, "__init__", lambda self: None)
    monkeypatch.setattr(PairLauncher, "pair", pair)
    side = Side("a", "a", Path(), Path())
    states = tuple(gate.ComparisonState(workload) for workload in gate.chosen(["call", "store"]))
    gate.cluster(PairLauncher(), (side, side), 0, states)
    assert [state.finding().verdict for state in states] == verdicts


def test_make_says_with_which_status_the_gate_ended(tmp_path: Path) -> None:
    """make itself ends with 2 whatever has failed, which is another of the gate's statuses than 1, slower."""
    command = tmp_path / "holdfast"
    command.write_text("#!/bin/sh\nexit $GATE_STATUS\n")
    command.chmod(0o700)
    for status in ("0", "1", "74"):
        done = subprocess.run(
            ["make", "--no-print-directory", "gate", f"BIN={tmp_path}", "STAMP="],
            cwd=ROOT,
            env={**os.environ, "GATE_STATUS": status},
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
        )
        assert done.stdout.splitlines()[-1] == f"holdfast gate: exit status {status}", done.stderr
        assert (done.returncode == 0) == (status == "0")
