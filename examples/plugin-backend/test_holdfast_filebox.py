"""The conformance kit of holdfast on the backend `filebox`, on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PARTS = ["all_reduce", "killed or stopped", "not (all_reduce or killed or stopped)"]
"""Expressions for `holdfast conformance -k`. Together they select every check."""


@pytest.mark.parametrize("checks", PARTS)
def test_backend_conforms(checks: str) -> None:
    kit = [sys.executable, "-m", "holdfast", "conformance", "--backend", "filebox", "-n", "2", "--json"]
    done = subprocess.run([*kit, "-k", checks], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    outcomes = json.loads(done.stdout)["checks"]
    failed = [f"{each['check']}: {each['why']}" for each in outcomes if each["outcome"] == "failed"]
    assert not failed, "\n\n".join(failed)
