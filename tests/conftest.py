"""Fixtures and checks of all tests: agreement checks are on, ranks on each backend, no leaks.

After each test this process must have no new children (but the zygote, which serves them all) and no new threads; after
the session also no new sockets, pipes or shared memory. A session that leaks fails and names the leak.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HOLDFAST_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A TCPStore that torch itself makes asks the name server for the name of 127.0.0.1: no answer must not cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

import pytest
import torch.distributed as dist
from hypothesis import settings

from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.ft.processes import zygote_client as processes
from holdfast.ft.processes.zygote_start import OPTIMIZERS, start_early
from holdfast.harness import LocalCluster
from support.children import Child, children
from support.comms.ranks import MPI
from support.event_loop import run
from support.leaks import Snapshot, restore_signals, settle

pytest_plugins = ["support.run_record"]

restore_signals()
pytest.register_assert_rewrite("holdfast.harness.conformance")
# A slow machine is no failure. `--hypothesis-profile thorough` chooses the other: see CONTRIBUTING.md.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")

_leaks: list[str] = []
_start: list[Snapshot] = []
_stderr: list[int] = []


SECONDS = 300.0
"""What a test may take that has no mark `timeout`."""


def _limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else SECONDS


def pytest_configure() -> None:
    _stderr.append(os.dup(2))  # before pytest captures it


def _end_worker_unless_over(item: pytest.Item) -> None:
    """End this process, with its stacks, if the test is not over long after its limit.

    pytest-timeout interrupts a test by a signal, which does nothing to one that waits in C. xdist names that test as
    failed, and starts another worker.
    """
    faulthandler.dump_traceback_later(_limit(item) * 1.2, file=_stderr[0], exit=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _end_worker_unless_over(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _end_worker_unless_over(item)  # again: pytest ends the first wait when a test has failed


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own; it fails if it leaves a task behind."""
    test, seconds = pyfuncitem.obj, _limit(pyfuncitem) - 10
    if inspect.iscoroutinefunction(test):
        names = inspect.signature(test).parameters
        run(test(**{name: pyfuncitem.funcargs[name] for name in names}), seconds)
        return True
    property_ = getattr(test, "hypothesis", None)
    if property_ is not None and inspect.iscoroutinefunction(body := property_.inner_test):
        property_.inner_test = lambda *args, **kwargs: run(body(*args, **kwargs), seconds)
    return None


@pytest.fixture(params=["inproc", "shm", "gloo", "ucx", MPI])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    return str(request.param)


@pytest.fixture(params=["shm", "gloo", "ucx", MPI])
def process_backend(request: pytest.FixtureRequest) -> str:
    """Each backend with processes as ranks, so that they can be killed."""
    return str(request.param)


@pytest.fixture
def cluster(backend: str) -> Iterator[LocalCluster]:
    """Two ranks on each backend."""
    with LocalCluster(2, backend, timeout=30.0) as ranks:
        yield ranks


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """A function that starts child processes; kills all that are left after the test."""
    with children() as starter:
        yield starter


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else takes while the test lasts: a server of the test can listen there."""
    with ReservedPort("127.0.0.1") as reserved:
        yield reserved.number


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder with a short path: the name of a socket in there has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A register that several processes can reach."""
    return f"sqlite://{tmp_path}/job.sqlite"


@pytest.fixture
def fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checks of agreement, so that communicators made by the test take the fast paths."""
    monkeypatch.setenv("HOLDFAST_CHECK", "0")


@pytest.fixture(autouse=True)
def _nothing_stays_alive() -> Iterator[None]:
    before = Snapshot.take()
    yield
    zygote = processes.zygote_pid()

    def others() -> list[str]:
        return [line for line in before.living() if not line.startswith(f"process {zygote}:")]

    if left := settle(others, patience=3.0):
        before.kill_children(but=zygote)
        pytest.fail("left behind by this test: " + "; ".join(left))


def pytest_addoption(parser: pytest.Parser) -> None:
    # Monarch holds the pipes of a killed process for 10 s.
    parser.addini("leak_patience", "seconds that what still ends has at the end of a session", default="15")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave properties of the first tier with their own number of examples out of the second: they would repeat."""
    if config.getoption("--hypothesis-profile", None) != "thorough":
        return
    every = settings.get_profile("thorough").max_examples

    def repeats(item: pytest.Item) -> bool:
        own = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
        return own is not None and own.max_examples != every and item.get_closest_marker("thorough") is None

    if again := [item for item in items if repeats(item)]:
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if not repeats(item)]


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what is imported by now: that takes an eighth of the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    # for the first TCPStore of a process libuv opens a pipe for good
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if hasattr(session.config, "workerinput"):  # a worker of xdist, which will fork many ranks that import these
        start_early("pytest", OPTIMIZERS)
    _start.append(Snapshot.take())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for leaks. An xdist worker reports its own to the main process, which checks files last."""
    processes.shut_down()
    patience = float(session.config.getini("leak_patience"))
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["leaks"] = _start[0].left_behind(patience)
        if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()) is not None:
            measured.save()  # xdist kills a worker that takes ten seconds to end
        return
    if not session.config.pluginmanager.has_plugin("dsession"):
        _leaks.extend(_start[0].left_behind(patience))
    _leaks.extend(_start[0].files_left_behind())
    ended = "LEAKS" if _leaks else pytest.ExitCode(session.exitstatus).name
    if _leaks:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if folder := session.config.getoption("--record"):
        Path(folder, "ended").write_text(ended)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the leaks of an xdist worker that has ended."""
    worker = node.gateway.id
    _leaks.extend(f"{worker}: {line}" for line in getattr(node, "workeroutput", {}).get("leaks", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what leaked."""
    if _leaks:
        terminalreporter.section("left behind by the session", red=True)
        for line in _leaks:
            terminalreporter.line(line)
