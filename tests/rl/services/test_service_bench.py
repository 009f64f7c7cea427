"""The bench of kills, small."""

from __future__ import annotations

import asyncio

from holdfast.harness.bench.rl.kills import lines, run


def test_the_bench_kills_and_counts() -> None:
    found = asyncio.run(run("local", 3))
    assert found.kills == len(found.rerouted) == len(found.replaced) == len(found.descriptors) == 3
    assert found.calls > 0 and all(0 < each < 60 for each in (*found.rerouted, *found.replaced))
    assert lines(found)[0].startswith("local: 3 kills under 6 clients")
