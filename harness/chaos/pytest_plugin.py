"""The pytest plugin of holdfast: the fixture `chaos`, and the option `--chaos-seed`.

Light to import: every pytest of an environment with holdfast loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Chaos:
    """The fixture's value: all of `holdfast.harness.chaos`, with the seed of the pytest session.

    A run with an unexpected outcome leaves its report in the test's `tmp_path`, and says how to repeat it.
    """

    def __init__(self, seed: int, nodeid: str, folder: Path) -> None:
        self.seed, self._nodeid, self._folder = seed, nodeid, folder

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """See `holdfast.harness.chaos.run`."""
        from holdfast.harness.chaos import api

        quoted = "'" + self._nodeid.replace("'", "'\"'\"'") + "'"
        repeat = f"pytest {quoted} --chaos-seed {self.seed}"
        result = api.run(fn, *args, **{"seed": self.seed, "repeat": repeat, **options})
        if not result.passed:
            result.write(self._folder / "chaos")
        return result

    def __getattr__(self, name: str) -> Any:
        from holdfast.harness import chaos

        return getattr(chaos, name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("holdfast").addoption(
        "--chaos-seed", type=int, default=0, help="decides what the faults of `chaos` leave to chance (default: 0)"
    )


@pytest.fixture
def chaos(request: pytest.FixtureRequest, tmp_path: Path) -> Chaos:
    """Run training functions under faults: `chaos.run(fn, ..., faults=[chaos.kill(1, step=40)]).check()`."""
    return Chaos(request.config.getoption("--chaos-seed"), request.node.nodeid, tmp_path)
