"""A folder is held as long as its owner lives, and removed by the next one after that (`harness/folders.py`)."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.harness import folders
from holdfast.harness.folders import HeldFolder

OWNER = """
import sys
from pathlib import Path
from holdfast.harness.folders import HeldFolder

folder = HeldFolder("job-", Path(sys.argv[1]))
(folder.path / "segment").write_bytes(b"memory")
print(folder.path, flush=True)
sys.stdin.read()
folder.close()
"""


@contextmanager
def owner(where: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a folder, and that folder. It closes it when its input ends."""
    command = [sys.executable, "-c", OWNER, str(where)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_it_is_for_its_owner_alone_and_gone_when_closed(tmp_path: Path) -> None:
    with HeldFolder("job-", tmp_path) as folder:
        assert folder.path.parent == tmp_path
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "segment").write_bytes(b"memory")
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_the_next_one_leaves_those_that_are_held(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, theirs), HeldFolder("job-", tmp_path) as ours:
        assert {theirs, ours.path} == set(tmp_path.iterdir())
        process.communicate(timeout=30)
        assert list(tmp_path.iterdir()) == [ours.path], "its owner closed it"


def test_the_next_one_removes_what_a_killed_owner_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "another's").mkdir()
    (tmp_path / "job-file").touch()
    with owner(tmp_path) as (process, left):
        process.kill()
        process.wait(30)
        assert (left / "segment").exists()
        with HeldFolder("job-", tmp_path) as ours:
            assert {path.name for path in tmp_path.iterdir()} == {"another's", "job-file", ours.path.name}


def test_one_that_is_swept_before_it_is_held_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, taken = folders._lock, list[Path]()

    def late(folder: Path, how: int) -> int:
        taken.append(folder)
        if len(taken) == 1:
            folder.rmdir()
        return lock(folder, how)

    monkeypatch.setattr(folders, "_lock", late)
    with HeldFolder("job-", tmp_path) as ours:
        assert ours.path.is_dir()
        assert taken[0] != ours.path
