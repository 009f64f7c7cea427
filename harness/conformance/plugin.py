"""The pytest plugin of the suite: selects the checks that apply to a backend, and records their outcomes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

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
        if part in ("windows", "window_calls", "window_ends"):
            atomic = "fetch_add" in item.name or "compare_swap" in item.name
            return able.windows and (able.atomics or not atomic)
        return info.connect is not None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            name = report.nodeid.split("::")[-1].removeprefix("test_")
            why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
            self.outcomes.append(CheckOutcome(name, report.outcome, round(report.duration, 3), why))
