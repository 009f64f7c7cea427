"""A selection of torch's own distributed tests over holdfast; `make torch-suite` runs all of them."""

from __future__ import annotations

import tomllib

import pytest
from torch_suite import TABLE, outcomes


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_passes_over_plain_gloo_passes_over_holdfast() -> None:
    names = tomllib.loads(TABLE.read_text())["selection"]["tests"]
    ended = outcomes("holdfast", "shm", names)
    assert sorted(ended) == sorted(names)
    failed = {name: line["why"] for name, line in ended.items() if line["outcome"] == "failed"}
    assert not failed
    assert sum(line["outcome"] == "passed" for line in ended.values()) > 20
