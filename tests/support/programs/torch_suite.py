"""Runs torch's own distributed tests, which ship inside torch: `torch_suite.py BACKEND [NAME ...]`, or `compare`.

BACKEND is gloo, or holdfast over the transport that HOLDFAST_BACKEND names. Prints one line of JSON a test: its name,
outcome (passed, failed, skipped) and seconds. torch's tests ask which backend they run on and skip what it is not known
for; they are told "gloo", and every group that they then make under that name is made under BACKEND. Ranks are forked
from a process that has torch imported: spawning them would take ten times as long; over mpi they take the places of
processes that mpirun has started. `compare` runs all tests over plain gloo, then over holdfast on each of TRANSPORTS,
and fails if one that passes over plain gloo fails over holdfast, unless `torch_suite.toml` says why it cannot. What
torch skips over holdfast and not over gloo it skips by the backend's name: that is reported apart, with torch's reason.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import unittest
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.ft.launch.launcher import MpiJob

WORLD_SIZE = 3
TRANSPORTS = ("shm", "gloo", "ucx", "mpi")
TABLE = Path(__file__).with_name("torch_suite.toml")


def suite(backend: str) -> type[unittest.TestCase]:
    """torch's test class, with its ranks forked and its groups over `backend`."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), OMP_NUM_THREADS="1")
    folder = tempfile.mkdtemp(prefix="torch-suite-")
    atexit.register(_remove, folder, os.getpid())
    tempfile.tempdir = os.environ["TEMP_DIR"] = folder  # each test of torch leaves a file
    os.environ["INIT_METHOD"] = f"file://{folder}/shared_init_file"
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    if backend != "gloo":
        import holdfast.comms.torchdist  # noqa: F401  # registers the name

        _rename("gloo", backend, dist)

    class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def _spawn_processes(self) -> None:
            fork = torch.multiprocessing.get_context("fork").Process
            if os.environ.get("HOLDFAST_BACKEND") != "mpi":
                self._start_processes(fork)
                return
            job = MpiJob(WORLD_SIZE)
            self.addCleanup(job.close)

            def placed(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return fork(target=_in_place, name=name, args=(job.environ(args[0]), target, *args), kwargs=kwargs)

            self._start_processes(placed)
            for rank, process in enumerate(self.processes):
                pidfd = os.pidfd_open(process.pid)
                job.attach(rank, pidfd)
                os.close(pidfd)

    return TorchSuite


def _in_place(environ: dict[str, str], target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run one rank of a test in a process that mpirun has started."""
    os.environ.update(environ)
    target(*args, **kwargs)


def _remove(folder: str, owner: int) -> None:
    """Remove a folder at the end of the process that made it; the forked ranks end too."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _rename(known: str, backend: str, dist: Any) -> None:
    """Make groups that are asked for as `known` over `backend`."""
    from torch.distributed import distributed_c10d as c10d

    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)

        def renamed(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if kwargs.get("backend") == known:
                kwargs["backend"] = backend
            args = tuple(backend if arg == known and isinstance(arg, str) else arg for arg in args)
            return _original(*args, **kwargs)

        setattr(c10d, name, renamed)
        setattr(dist, name, renamed)


def run(backend: str, names: Sequence[str]) -> bool:
    """Run the tests called `names` (all, if there are none); True if none failed."""
    case = suite(backend)
    passed = True
    for name in names or unittest.TestLoader().getTestCaseNames(case):
        result = unittest.TestResult()
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", buffering=1) as output:
            with redirect_stdout(output), redirect_stderr(output):
                case(name).run(result)
            output.seek(0)
            said = output.read()
        outcome = "failed" if result.failures or result.errors else "skipped" if result.skipped else "passed"
        why = "".join(text for _, text in [*result.failures, *result.errors, *result.skipped])
        line = {"test": name, "outcome": outcome, "seconds": round(time.monotonic() - began, 2)}
        print(json.dumps(line | {"why": why and said[-3000:] + why[-600:]}), flush=True)
        passed = passed and outcome != "failed"
    return passed


def outcomes(backend: str, transport: str, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The outcome of each test, run in a process of its own over `backend`."""
    command, environ = [sys.executable, __file__, backend, *names], {**os.environ, "HOLDFAST_BACKEND": transport}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    finished = subprocess.run(command, env=environ, **pipes, text=True, timeout=1800)
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"test"')]
    return {line["test"]: line for line in lines}


def cannot() -> dict[str, str]:
    """The tests that pass over plain gloo and cannot over holdfast, with the reason."""
    return tomllib.loads(TABLE.read_text())["cannot"]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of tests that pass over plain gloo: how many pass, and why the others were skipped or failed."""

    passed: int
    skipped: dict[str, str]
    failed: dict[str, str]

    @classmethod
    def of(cls, names: Sequence[str], ended: Mapping[str, Mapping[str, Any]]) -> Report:
        lines = {name: ended.get(name, {"outcome": "failed", "why": "did not end"}) for name in names}

        def reasons(outcome: str) -> dict[str, str]:
            return {name: str(line["why"]) for name, line in lines.items() if line["outcome"] == outcome}

        return cls(len(reasons("passed")), reasons("skipped"), reasons("failed"))

    def __str__(self) -> str:
        count = self.passed + len(self.skipped) + len(self.failed)
        lines = [f"{self.passed} of {count} pass, {len(self.failed)} fail, torch skips {len(self.skipped)}"]
        lines += [f"  failed: {name}: {why}" for name, why in self.failed.items()]
        lines += [f"  skipped by torch: {name}: {why.splitlines()[-1]}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def compare() -> bool:
    """Whether no test that passes over plain gloo fails over holdfast; prints those that fail, or that torch skips."""
    plain = [name for name, line in outcomes("gloo", "").items() if line["outcome"] == "passed"]
    print(f"gloo: {len(plain)} tests pass")
    expected = [name for name in plain if name not in cannot()]
    good = bool(expected)
    for transport in TRANSPORTS:
        report = Report.of(expected, outcomes("holdfast", transport, expected))
        print(f"holdfast over {transport}: {report}")
        good = good and not report.failed
    for name, reason in cannot().items():
        print(f"cannot: {name}: {reason}")
    return good


if __name__ == "__main__":
    sys.exit(0 if (compare() if sys.argv[1] == "compare" else run(sys.argv[1], sys.argv[2:])) else 1)
