"""All checks as one module, which pytest collects by its path, with the fixtures for their backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.conformance.collectives import *  # noqa: F403
from holdfast.harness.conformance.failures import *  # noqa: F403
from holdfast.harness.conformance.helpers import capabilities
from holdfast.harness.conformance.planes import *  # noqa: F403
from holdfast.harness.conformance.reductions import *  # noqa: F403
from holdfast.harness.conformance.run import KIT
from holdfast.harness.conformance.windows import *  # noqa: F403


@pytest.fixture(scope="module")
def ranks(pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """The cluster shared by all checks that break nothing."""
    kit = pytestconfig.stash[KIT]
    with LocalCluster(kit.size, kit.backend, timeout=60.0) as cluster:
        yield cluster


@pytest.fixture
def backend(pytestconfig: pytest.Config) -> str:
    return pytestconfig.stash[KIT].backend


@pytest.fixture
def process_backend(backend: str) -> str:
    if capabilities(backend).one_process:
        pytest.skip("its ranks are threads of one process, which die together")
    return backend


@pytest.fixture
def windowed(backend: str) -> str:
    return backend


@pytest.fixture
def windowed_processes(process_backend: str) -> str:
    return process_backend


@pytest.fixture
def planed(backend: str) -> str:
    return backend


@pytest.fixture
def planed_processes(process_backend: str) -> str:
    return process_backend
