"""A selection of torch's own distributed tests over holdfast; `make torch-suite` runs all of them."""

from __future__ import annotations

import tomllib

import pytest

from support.torch_suite import TABLE, TRANSPORTS, outcomes

SELECTION: list[str] = tomllib.loads(TABLE.read_text())["selection"]["tests"]


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_passes_over_plain_gloo_passes_over_holdfast(transport: str) -> None:
    """Runs all of the selection over shm, and one test in four over each other transport."""
    names = SELECTION if transport == "shm" else SELECTION[TRANSPORTS.index(transport) :: 4]
    ended = outcomes("holdfast", transport, names)
    assert sorted(ended) == sorted(names)
    failed = {name: line["why"] for name, line in ended.items() if line["outcome"] == "failed"}
    assert not failed
    assert sum(line["outcome"] == "passed" for line in ended.values()) > 0.7 * len(names)
