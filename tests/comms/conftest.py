"""Ranks that the tests of a module share, on each backend in turn: every run connects them anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.harness import LocalCluster

BACKENDS = ["inproc", "shm", "gloo", "ucx", pytest.param("mpi", marks=pytest.mark.thorough)]


@pytest.fixture(scope="module")
def checks(request: pytest.FixtureRequest) -> str:
    """Whether the ranks compare ops before they run them: "1", unless a test has this parameter."""
    return str(getattr(request, "param", "1"))


def _ranks(size: int, backend: str, checks: str) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CHECK", checks)
        with LocalCluster(size, backend, timeout=60.0) as cluster:
            cluster.warm_up()
            yield cluster


@pytest.fixture(scope="module", params=BACKENDS)
def two_ranks(request: pytest.FixtureRequest, checks: str) -> Iterator[LocalCluster]:
    yield from _ranks(2, request.param, checks)


@pytest.fixture(scope="module", params=BACKENDS)
def three_ranks(request: pytest.FixtureRequest, checks: str) -> Iterator[LocalCluster]:
    yield from _ranks(3, request.param, checks)
