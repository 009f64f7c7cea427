"""A selection of torch's own distributed tests over holdfast; `make torch-suite` runs all of them."""

from __future__ import annotations

import tomllib

import pytest

from support.programs.torch_suite import TABLE, TRANSPORTS, Report, outcomes

SELECTION: list[str] = tomllib.loads(TABLE.read_text())["selection"]["tests"]


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_passes_over_plain_gloo_passes_over_holdfast(transport: str) -> None:
    """Runs all of the selection over shm, and one test in four over each other transport."""
    names = SELECTION if transport == "shm" else SELECTION[TRANSPORTS.index(transport) :: 4]
    report = Report.of(names, outcomes("holdfast", transport, names))
    assert not report.failed
    assert report.passed > 0.7 * len(names), report


def test_what_torch_skips_by_the_backends_name_is_told_apart_from_what_fails() -> None:
    ended = {
        "a": {"outcome": "passed", "why": ""},
        "b": {"outcome": "skipped", "why": "a rank's output\nTest requires backend holdfast to be one of {'nccl'}"},
        "c": {"outcome": "failed", "why": "wrong sum"},
    }
    report = Report.of(["a", "b", "c", "d"], ended)
    assert (report.passed, list(report.skipped), report.failed) == (1, ["b"], {"c": "wrong sum", "d": "did not end"})
    assert str(report).splitlines() == [
        "1 of 4 pass, 2 fail, torch skips 1",
        "  failed: c: wrong sum",
        "  failed: d: did not end",
        "  skipped by torch: b: Test requires backend holdfast to be one of {'nccl'}",
    ]
