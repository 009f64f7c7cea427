"""The benches of reinforcement learning, small: what each measures is there and makes sense."""

from __future__ import annotations

import pytest

from holdfast.harness.bench.rl import modes, updates
from support.rl.started_monarch import start_monarch_once

TINY = {**updates.MEDIUM_LLAMA, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def monarch() -> None:
    """Start what Monarch keeps open to the end of a process."""
    start_monarch_once()


@pytest.mark.thorough
def test_both_loops_train_the_same_episodes_and_are_compared() -> None:
    found = [modes.measure(mode, 12, every=4) for mode in modes.MODES]
    assert [each.mode for each in found] == ["synchronous", "asynchronous"]
    assert all(each.rate > 0 and 0 <= each.reward <= 1 for each in found)
    ratio = found[1].rate / found[0].rate
    assert modes.lines(found)[-1] == f"asynchronous over synchronous: {ratio:.2f}"


@pytest.mark.thorough
def test_each_version_is_timed_until_the_last_generator_serves_it() -> None:
    found = updates.measure(12, TINY)
    assert len(found) == 12 - updates.WARM and all(0 < each < 60 for each in found)
    assert f"of {len(found)}" in updates.line(found)
