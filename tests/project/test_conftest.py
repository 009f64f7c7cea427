"""`conftest.py` fails sessions that leak and names the leak; it restores signals that a shell ignores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from holdfast.ft.launch.held_directory import MARKER
from support.leaks import Snapshot, shared_memory
from support.source_tree import ROOT
from support.waiting import next_line

TESTS = ROOT / "tests"

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
        open("/dev/shm/holdfast-left-{pid}", "w").close()

    def test_mapping():
        KEPT.append(os.memfd_create("left"))
"""


def session(tmp_path: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a test session with our `conftest.py` and one file of tests."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    shutil.copytree(TESTS / "support", tmp_path / "support")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nleak_patience = 1\n")
    (tmp_path / "test_one.py").write_text(textwrap.dedent(source))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        capture_output=True,
        text=True,
        timeout=100.0,
        cwd=tmp_path,
        env=environ,
    )


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_session_that_leaves_something_behind_fails_and_says_what(tmp_path: Path, workers: int) -> None:
    shared = Path(f"/dev/shm/holdfast-left-{os.getpid()}")
    try:
        done = session(tmp_path, LEAKING.replace("{pid}", str(os.getpid())), "-n", str(workers))
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
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"SKIPPED \[3\] .*: there is no GPU", done.stdout)


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
            other.communicate(b"\n", timeout=60.0)
    assert not [line for line in found if str(semaphore) in line or str(folder) in line]


IGNORED = "print(next(line for line in open('/proc/self/status') if line.startswith('SigIgn')).split()[1])"


def test_children_of_tests_in_the_background_start_with_default_dispositions() -> None:
    """A shell ignores SIGINT for its background jobs (`make test &`); children must not inherit that."""
    start = f"subprocess.run([sys.executable, '-c', {IGNORED!r}])"
    body = f"import subprocess, sys; from support.leaks import restore_signals; restore_signals(); {start}"
    command = ["sh", "-c", "trap '' INT QUIT HUP; exec \"$@\"", "sh", sys.executable, "-c", body]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=60.0, check=True)
    ignored = int(done.stdout, 16)
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
