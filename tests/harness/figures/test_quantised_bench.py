"""`holdfast bench quantised` measures both ops in one run, and a quarter of the bytes travels."""

from __future__ import annotations

import pytest

from holdfast.harness.bench.overhead.quantised import run


@pytest.mark.thorough
def test_a_quarter_of_the_bytes_travels_within_the_bound() -> None:
    bench = run(["inproc"], [1 << 20], ranks=3, rounds=1)
    (cost,) = bench.costs
    assert cost.plain_ms > 0 < cost.quantised_ms
    assert 0.25 < cost.quantised_bytes / cost.plain_bytes < 0.27
    assert 0.0 < cost.error < 1.0
