"""Ranks that are slow, and not dead, are not taken for dead. `holdfast bench evictions` tries it for longer."""

from __future__ import annotations

import os

import pytest

from holdfast.harness.bench.recovery.evictions import HOGS, measure


def test_slow_ranks_on_too_few_cores_are_left_alone() -> None:
    cores = min(2, len(os.sched_getaffinity(0)))
    found = measure(4.0, ranks=4, cores=cores, suspect=0.3)
    assert found.evictions == []
    assert found.epochs == 1
    assert set(found.hogs) <= set(HOGS) and sum(found.hogs.values()) > 0
    assert found.rounds > 0


@pytest.mark.parametrize(("options", "words"), [({"cores": 10**6}, "may use"), ({"ranks": 1}, "at least 2")])
def test_what_cannot_be_run_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(1.0, **options)
