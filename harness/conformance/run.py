"""Runs the suite on one backend."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path

import pytest

from holdfast.comms.errors import BackendUnavailable, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.harness.conformance.plugin import CheckOutcome, Conformance

_CHECKS = ("collectives", "reductions", "failures", "windows", "window_ends", "planes", "aftermath", "capability")


def run(backend: str, ranks: int = 2, select: str = "", quiet: bool = False) -> tuple[bool, list[CheckOutcome]]:
    """Whether `backend` passes with `ranks` ranks on this machine, and the outcome of each check.

    `select` is a pytest expression (-k) for some of the checks. Raises `BackendUnavailable` for a backend that is
    unknown or cannot run here. Windows, atomics, a memory plane and communicators are checked only where the backend
    says that it has them.
    """
    if (missing := registry().backend(backend).missing) is not None:
        raise BackendUnavailable(backend, missing.reason, missing.install_hint)
    if registry().backend(backend).info.capabilities.peerless:
        raise Unsupported(
            f"conformance of {backend!r}", "it has no other ranks and moves nothing: there is no check of it"
        )
    pytest.register_assert_rewrite(*(f"holdfast.harness.conformance.{name}" for name in _CHECKS))
    os.environ["HOLDFAST_CHECK"] = "1"
    suite = Path(__file__).with_name("suite.py")
    arguments = [
        str(suite),
        f"--rootdir={suite.parent}",
        f"--confcutdir={suite.parent}",
        "-c",
        os.devnull,
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-q",
        *(["-k", select] if select else []),
    ]
    kit = Conformance(backend, ranks)
    with _silence() if quiet else nullcontext():
        status = pytest.main(arguments, plugins=[kit])
    return status == pytest.ExitCode.OK and bool(kit.outcomes), kit.outcomes


def _silence() -> AbstractContextManager[object]:
    return redirect_stdout(Path(os.devnull).open("w"))
