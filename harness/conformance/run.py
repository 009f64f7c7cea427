"""Runs the suite on one backend: a pytest plugin selects the checks that apply, and records their outcomes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.comms.errors import BackendUnavailable, Unsupported
from holdfast.comms.plugins.registry import registry


def _applies_always() -> None:
    """Stands for the function of a pytest item without one: its module is no part of the suite."""


KIT: pytest.StashKey[Conformance] = pytest.StashKey()
"""The key under which the suite's fixtures find their run."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one check: "passed", "failed" or "skipped", its seconds, and the reason if it did not pass."""

    check: str
    outcome: str
    seconds: float
    why: str


class Conformance:
    """One run of the suite on one backend. `outcomes` grows as checks end."""

    def __init__(self, backend: str, ranks: int) -> None:
        self.outcomes: list[CheckOutcome] = []
        self.backend, self.size = backend, ranks

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[KIT] = self

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect checks of windows, atomics, memory planes and communicators that the backend does not have."""
        kept = [item for item in items if self._applies(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def _applies(self, item: pytest.Item) -> bool:
        info = registry().backend(self.backend).info
        able = info.capabilities
        part = getattr(item, "function", _applies_always).__module__.rpartition(".")[2]
        if part == "planes":
            return able.memory_plane
        if part == "windows":
            atomic = "fetch_add" in item.name or "compare_swap" in item.name
            return able.windows and (able.atomics or not atomic)
        return info.connect is not None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            name = report.nodeid.split("::")[-1].removeprefix("test_")
            why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
            self.outcomes.append(CheckOutcome(name, report.outcome, round(report.duration, 3), why))


_CHECKS = ("collectives", "reductions", "failures", "windows", "planes", "helpers")


def run(backend: str, ranks: int = 2, select: str = "", quiet: bool = False) -> tuple[bool, list[CheckOutcome]]:
    """Whether `backend` passes with `ranks` ranks on this machine, and the outcome of each check.

    `select` is a pytest expression (-k) for some of the checks. Raises `BackendUnavailable` for a backend that is
    unknown or cannot run here. Windows, atomics, a memory plane and communicators are checked only where the backend
    says that it has them.
    """
    if (missing := registry().backend(backend).missing) is not None:
        raise BackendUnavailable(backend, missing.reason, missing.install_hint)
    if registry().backend(backend).info.capabilities.peerless:
        raise Unsupported(
            f"conformance of {backend!r}", "it has no other ranks and moves nothing: there is no check of it"
        )
    pytest.register_assert_rewrite(*(f"holdfast.harness.conformance.{name}" for name in _CHECKS))
    os.environ["HOLDFAST_CHECK"] = "1"
    suite = Path(__file__).with_name("suite.py")
    arguments = [
        str(suite),
        f"--rootdir={suite.parent}",
        f"--confcutdir={suite.parent}",
        "-c",
        os.devnull,
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-q",
        *(["-k", select] if select else []),
    ]
    kit = Conformance(backend, ranks)
    with _silence() if quiet else nullcontext():
        status = pytest.main(arguments, plugins=[kit])
    return status == pytest.ExitCode.OK and bool(kit.outcomes), kit.outcomes


def _silence() -> AbstractContextManager[object]:
    return redirect_stdout(Path(os.devnull).open("w"))
