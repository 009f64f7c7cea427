"""The tests themselves: a session that leaks fails, each test is in one tier, and none needs a fast machine.

`conftest.py` names the leak, and restores signals that a shell ignores. A property takes the number of its examples
from the tier (CONTRIBUTING.md). A busy machine takes more than few seconds, and nothing is wrong: what is asserted
instead is an event, an order, a ratio, or a bound of `support.waiting.PATIENCE` beside a timeout of twice that, which
only the fault would wait for.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.ft.launch.held_directory import MARKER
from support.leaks import Snapshot, restore_signals, shared_memory
from support.programs.forked_programs import run_program
from support.source_tree import ROOT, TESTS, parsed
from support.waiting import PATIENCE, PROGRAM_SECONDS, next_line

LEAKING = """
    import os, socket, subprocess, threading, time

    KEPT = []

    def test_process():
        KEPT.append(subprocess.Popen(["sleep", "30"]))

    def test_that_the_process_is_dead():
        assert KEPT[0].wait(10.0) == -9

    def test_thread():
        threading.Thread(target=time.sleep, args=(60,), name="holdfast-left", daemon=True).start()

    def test_socket():
        KEPT.append(socket.create_server(("127.0.0.1", 0)))

    def test_shared_file():
        open("/dev/shm/{mine}", "w").close()

    def test_mapping():
        KEPT.append(os.memfd_create("left"))
"""


MINE = f"left-by-a-test-{os.getpid()}"


def session(tmp_path: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a test session with our `conftest.py` and one file of tests.

    Of shared memory it counts `MINE` alone: what other tests leave, and remove later, is not its own.
    """
    shutil.copy(TESTS / "conftest.py", tmp_path)
    shutil.copytree(TESTS / "support", tmp_path / "support")
    leaks = tmp_path / "support" / "leaks.py"
    counting, replaced = re.subn(r"(?m)^OURS = .*", f"OURS = ({MINE!r},)", leaks.read_text())
    assert replaced == 1
    leaks.write_text(counting)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nleak_patience = 1\n")
    (tmp_path / "test_one.py").write_text(textwrap.dedent(source))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        cwd=tmp_path,
        env=environ,
    )


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_session_that_leaves_something_behind_fails_and_says_what(tmp_path: Path, workers: int) -> None:
    shared = Path("/dev/shm", MINE)
    try:
        done = session(tmp_path, LEAKING.replace("{mine}", MINE), "-n", str(workers), "--record", "record")
    finally:
        shared.unlink(missing_ok=True)
    assert done.returncode == 1, done.stdout
    assert "6 passed, 2 errors" in done.stdout, "processes and threads are blamed on their test"
    assert "sleep 30" in done.stdout
    _, found, end = done.stdout.partition("left behind by the session")
    assert found, done.stdout
    for name in ("thread holdfast-left", "socket:", str(shared), "memfd:left"):
        assert name in end
    assert ("gw0: " in end) == (workers == 1)
    assert (tmp_path / "record" / "ended").read_text() == "LEAKS"


def test_a_clean_session_passes_and_counts_its_skips(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        import pytest

        @pytest.mark.parametrize("n", range(3))
        def test_gpu(n):
            pytest.skip("there is no GPU")

        def test_cluster():
            from holdfast.harness import LocalCluster
            with LocalCluster(2) as cluster:
                cluster.run(lambda comm: comm.barrier())
        """,
        "-rs",
        "--record",
        "record",
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "record" / "ended").read_text() == "OK"
    assert re.search(r"SKIPPED \[3\] .*: there is no GPU", done.stdout)


@pytest.mark.thorough
def test_a_test_that_no_signal_ends_fails_with_its_stack_and_the_next_one_runs(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        import ctypes

        import pytest

        @pytest.mark.timeout(2)
        def test_deadlock():
            lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
            libc.pthread_mutex_lock(lock)
            libc.pthread_mutex_lock(lock)

        def test_next():
            pass
        """,
        "-n",
        "1",
        "--record",
        "record",
    )
    assert (tmp_path / "record" / "ended").read_text() == "TESTS_FAILED"
    assert "worker 'gw0' crashed while running 'test_one.py::test_deadlock'" in done.stdout
    assert "1 failed, 1 passed" in done.stdout and "in test_deadlock" in done.stderr


SEMAPHORE = """
import multiprocessing
made = multiprocessing.get_context("spawn").Semaphore()
print(made._semlock.name, flush=True)
input()
"""


def test_what_programs_of_other_sessions_have_in_shared_memory_is_no_leak() -> None:
    """One uses a semaphore; another was killed, and the next program removes the folder that it held."""
    before = Snapshot.take()
    with subprocess.Popen([sys.executable, "-c", SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        semaphore = Path(f"/dev/shm/sem.{next_line(other.stdout).strip().removeprefix('/')}")
        folder = Path(tempfile.mkdtemp(prefix="holdfast-ranks-", dir="/dev/shm"))
        try:
            (folder / MARKER).touch()
            assert {semaphore, folder} <= shared_memory() - before.shared_memory
            found = before.files_left_behind(patience=0.0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            other.communicate(b"\n", timeout=PROGRAM_SECONDS)
    assert not [line for line in found if str(semaphore) in line or str(folder) in line]


def test_children_of_tests_in_the_background_start_with_default_dispositions() -> None:
    """A shell ignores SIGINT for its background jobs (`make test &`); children must not inherit that."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)}
    try:
        restore_signals()
        ignored = int(run_program("grep", "SigIgn", "/proc/self/status").split()[1], 16)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not ignored & (1 << 1 | 1 << 2 | 1 << 0), "SIGINT is 2, SIGQUIT 3, SIGHUP 1"


PROPERTIES = """
    from hypothesis import given, settings, strategies as st

    @given(st.booleans())
    def test_of_both_tiers(_):
        pass

    @settings(max_examples=5)
    @given(st.booleans())
    def test_of_the_first(_):
        pass
"""


@pytest.mark.thorough
def test_the_second_tier_leaves_out_properties_that_state_their_number_of_examples(tmp_path: Path) -> None:
    done = session(tmp_path, PROPERTIES, "--hypothesis-profile", "thorough", "--collect-only", "-q")
    assert "test_of_both_tiers" in done.stdout and "1 deselected" in done.stdout, done.stdout


# -- tiers

FILES = [path.relative_to(ROOT) for path in sorted(TESTS.rglob("*.py"))]
FEWEST = 30
"""Examples of a property in the first tier."""


def test_the_two_targets_run_every_test() -> None:
    """With one mark a test has it or not: another one for time would stand beside it."""
    makefile = (ROOT / "Makefile").read_text()
    chosen = re.findall(r'\$\(PYTEST\) -m "([^"]*)"', makefile)
    assert chosen == ["not thorough", "thorough or hypothesis"]
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert [mark.partition(":")[0] for mark in marks] == ["thorough", "gpu", "root"]


def test_a_property_takes_its_number_of_examples_from_the_tier() -> None:
    wrong = [
        f"{path}:{call.lineno}: leave out {keyword.arg}"
        for path in FILES
        for call in ast.walk(parsed(path))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) == "settings"
        for keyword in call.keywords
        if (keyword.arg == "max_examples" and ast.literal_eval(keyword.value) >= FEWEST) or keyword.arg == "deadline"
    ]
    assert not wrong, "\n".join(wrong)


# -- limits of time

CLOCK = re.compile(r"time\.(monotonic|perf_counter|time)(_ns)?\(\)|.*(\['time'\]|\.time)")
"""A reading of a clock, or the time of an event or an outcome."""


def assigned(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each name that a function assigns, with its value."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                yield name, value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                yield from (
                    (name.id, value) for name, value in zip(names, values, strict=True) if isinstance(name, ast.Name)
                )


def tight(function: ast.AST) -> Iterator[ast.Compare]:
    """The assertions of a function that a time is below a number of seconds that is too small."""
    starts = {name for name, value in assigned(function) if CLOCK.fullmatch(ast.unparse(value))}

    def is_elapsed(node: ast.AST) -> bool:
        differences = [each for each in ast.walk(node) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub)]
        texts = {ast.unparse(part) for each in differences for part in ast.walk(each) if isinstance(part, ast.expr)}
        return bool(texts & starts) or any(map(CLOCK.fullmatch, texts))

    spans = {name for name, value in assigned(function) if is_elapsed(value)}
    asserts = [node.test for node in ast.walk(function) if isinstance(node, ast.Assert)]
    for compared in (node for test in asserts for node in ast.walk(test) if isinstance(node, ast.Compare)):
        sides = [compared.left, *compared.comparators]
        for less, operator, more in zip(sides, compared.ops, sides[1:], strict=False):
            if isinstance(operator, ast.Gt | ast.GtE):
                less, more = more, less
            match more:
                case ast.Constant(value=int() | float() as seconds) if seconds < PATIENCE:
                    if is_elapsed(less) or ast.unparse(less) in spans:
                        yield compared


def test_no_assertion_needs_a_fast_machine() -> None:
    wrong = {
        f"{path}:{compared.lineno}: {ast.unparse(compared)}"
        for path in FILES
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for compared in tight(function)
    }
    assert not wrong, "wait for an event, or compare with PATIENCE:\n" + "\n".join(sorted(wrong))


def hurried(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that run a program, or wait for its end, with a number of seconds that is too small."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            limit = next((each.value for each in call.keywords if each.arg == "timeout"), None)
            short = isinstance(limit, ast.Constant) and limit.value < PROGRAM_SECONDS
            if short and re.search(
                r"^subprocess\.(run|check_\w+)$|\bcommunicate$|^call_in_fork$", ast.unparse(call.func)
            ):
                yield call


def test_a_program_may_take_long_to_end() -> None:
    wrong = [f"{path}:{call.lineno}: {ast.unparse(call)}" for path in FILES for call in hurried(parsed(path))]
    assert not wrong, "its timeout is PROGRAM_SECONDS:\n" + "\n".join(wrong)


def test_a_tight_limit_is_found() -> None:
    body = "def f():\n    began = time.monotonic()\n    g()\n    assert time.monotonic() - began < {}\n"
    assert len(list(tight(ast.parse(body.format("2.0"))))) == 1
    assert not list(tight(ast.parse(body.format("PATIENCE"))))
    waits = "subprocess.run(words, timeout={0})\nself.process.communicate(timeout={0})"
    assert len(list(hurried(ast.parse(waits.format("60"))))) == 2
    assert not list(hurried(ast.parse(waits.format("PROGRAM_SECONDS"))))
