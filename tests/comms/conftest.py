"""Ranks that the tests of a module share, on each backend in turn: every run connects them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.comms import Communicator
from holdfast.harness import LocalCluster
from support.comms.meeting import alone
from support.comms.ranks import MPI, running

BACKENDS = ["inproc", "shm", "gloo", "ucx", MPI]


@pytest.fixture(scope="module")
def checks(request: pytest.FixtureRequest) -> str:
    """Whether the ranks compare ops before they run them: "1", unless a test has this parameter."""
    return str(getattr(request, "param", "1"))


@pytest.fixture(scope="module", params=BACKENDS)
def two_ranks(request: pytest.FixtureRequest, checks: str) -> Iterator[LocalCluster]:
    with running(2, request.param, checks) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=BACKENDS)
def three_ranks(request: pytest.FixtureRequest, checks: str) -> Iterator[LocalCluster]:
    with running(3, request.param, checks) as cluster:
        yield cluster


@pytest.fixture
def comm(tmp_path: Path) -> Iterator[Communicator]:
    """A communicator of one rank over shared memory."""
    with alone(tmp_path) as made:
        yield made
