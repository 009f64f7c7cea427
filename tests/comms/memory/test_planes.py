"""The memory plane checks of the conformance kit, on each built-in plane."""

from __future__ import annotations

import pytest

from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Unavailable
from holdfast.harness.conformance.planes import *  # noqa: F403


@pytest.fixture(params=["inproc", "shm", "ucx", "nixl"])
def planed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shm", "ucx", "nixl"])
def planed_processes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nixl_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.backends import nixl

    assert registry().backend("nixl").available
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status = nixl.probe()
    assert isinstance(status, Unavailable)
    assert "not installed" in status.reason and "pip install --no-deps nixl" in status.install_hint
