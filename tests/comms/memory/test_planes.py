"""The memory plane checks of the conformance kit, on each built-in plane."""

from __future__ import annotations

import pytest

from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Available, Unavailable
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


def test_nixl_needs_the_library_for_the_cuda_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL takes that of torch's CUDA and no other, whether there is a GPU or not."""
    from holdfast.backends import nixl

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nixl_cu13" else object())
    status = nixl.probe()
    assert isinstance(status, Unavailable)
    assert "nixl-cu13" in status.reason and "pip install --no-deps nixl nixl-cu13" in status.install_hint
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert isinstance(nixl.probe(), Available)
