"""The leak check of `conftest.py`, on test sessions that leak: it must fail them, and name what leaked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

LEAKS = {
    "a process": ("import subprocess; KEPT.append(subprocess.Popen(['sleep', '30']))", "sleep 30", 1),
    "a thread": ("import threading, time; threading.Thread(target=time.sleep, args=(9,)).start()", "thread Thread", 1),
    "a socket": ("import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); KEPT.append(s)", "socket:", 0),
    "a shared file": ("open('/dev/shm/holdfast-left-{pid}', 'w').close()", "/dev/shm/holdfast-left-{pid}", 0),
    "a mapping": ("import os; KEPT.append(os.memfd_create('left'))", "memfd:left", 0),
}


def session(tmp_path: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a test session with our `conftest.py` and one test."""
    for name in ("conftest.py", "leaks.py"):
        shutil.copy(TESTS / name, tmp_path / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text(f"KEPT = []\n\ndef test_one():\n    {source}\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        capture_output=True,
        text=True,
        timeout=100.0,
        cwd=tmp_path,
        env=environ,
    )


@pytest.mark.parametrize("what", LEAKS)
def test_a_session_that_leaves_something_behind_fails_and_says_what(tmp_path: Path, what: str) -> None:
    source, name, errors = LEAKS[what]
    own = {"pid": str(os.getpid())}
    done = session(tmp_path, source.format(**own))
    Path(f"/dev/shm/holdfast-left-{os.getpid()}").unlink(missing_ok=True)
    assert done.returncode == 1, done.stdout
    assert "left behind by the session" in done.stdout
    assert name.format(**own) in done.stdout.partition("left behind by the session")[2]
    assert ("1 error" in done.stdout) == bool(errors), "processes and threads are blamed on their test"


def test_the_workers_of_a_parallel_session_are_checked_too(tmp_path: Path) -> None:
    done = session(tmp_path, LEAKS["a socket"][0], "-n", "1")
    assert done.returncode == 1, done.stdout
    assert "gw0: descriptor" in done.stdout


def test_a_clean_session_passes_and_counts_its_skips(tmp_path: Path) -> None:
    source = """
        import pytest

        @pytest.mark.parametrize("n", range(3))
        def test_gpu(n):
            pytest.skip("there is no GPU")

        def test_cluster():
            from holdfast.harness import LocalCluster
            with LocalCluster(2) as cluster:
                cluster.run(lambda comm: comm.barrier())
    """
    (tmp_path / "test_two.py").write_text(textwrap.dedent(source))
    done = session(tmp_path, "pass")
    assert done.returncode == 0, done.stdout
    assert "3 skipped: there is no GPU" in done.stdout
