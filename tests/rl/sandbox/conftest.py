"""One warm sandbox for the tests of a module. They are skipped, with the reason, where its walls are not allowed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.rl.environments.sandbox import Sandbox, SandboxUnavailable


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        started = Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with started:
        yield started
