"""Directories that are held while their owner lives, and then removed by the next owner."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.ft.launch import held_directory
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.local_launcher import LaunchPlan, launch, python_command
from holdfast.harness import LocalCluster
from support.children import Child, children


@contextmanager
def owner(where: Path) -> Iterator[tuple[Child, Path]]:
    """Another process with a held directory, and that directory. The process closes it when it is told to."""

    def body(pipe: Connection) -> None:
        with HeldDirectory("job-", where) as folder:
            (folder.path / "segment").write_bytes(b"memory")
            pipe.send(folder.path)
            pipe.recv()

    with children() as start:
        process = start(body)
        yield process, process.hear()


def test_a_held_folder_is_for_its_owner_alone_and_gone_when_closed(tmp_path: Path) -> None:
    with HeldDirectory("job-", tmp_path) as folder:
        assert folder.path.parent == tmp_path
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "segment").write_bytes(b"memory")
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_a_new_folder_that_another_process_looks_at_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, looking = tempfile.mkdtemp, list[int]()

    def seen_at_once(**where: object) -> str:
        path = make(**where)  # type: ignore[call-overload]
        if not looking:
            looking.append(os.open(path, os.O_RDONLY))
            fcntl.flock(looking[0], fcntl.LOCK_EX)
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", seen_at_once)
    with HeldDirectory("job-", tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours.path] and (ours.path / held_directory.MARKER).exists()
    os.close(looking[0])


def test_a_new_folder_leaves_folders_that_are_held(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, theirs), HeldDirectory("job-", tmp_path) as ours:
        assert {theirs, ours.path} == set(tmp_path.iterdir())
        process.tell("close it")
        process.end()
        assert list(tmp_path.iterdir()) == [ours.path], "its owner closed it"


def test_a_new_folder_removes_what_a_killed_owner_left_and_nothing_else(tmp_path: Path) -> None:
    """A folder of the user's own stays whatever its name, and a link is not followed."""
    kept = {"another's", "job-mybackup", "job-file", "elsewhere", "job-link"}
    for name in ("another's", "job-mybackup", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "job-mybackup" / "precious").touch()
    (tmp_path / "job-file").touch()
    with owner(tmp_path) as (process, left), owner(tmp_path / "elsewhere") as (other, linked):
        (tmp_path / "job-link").symlink_to(linked)
        process.kill()
        other.kill()
        assert (left / "segment").exists()
        with HeldDirectory("job-", tmp_path) as ours:
            assert {path.name for path in tmp_path.iterdir()} == {*kept, ours.path.name}
        assert (tmp_path / "job-mybackup" / "precious").exists() and (linked / "segment").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("of_another", ["folder", "marker"])
def test_root_leaves_folders_of_other_users(tmp_path: Path, of_another: str) -> None:
    with owner(tmp_path) as (process, left):
        process.kill()
        os.chown(left if of_another == "folder" else left / held_directory.MARKER, 1234, 1234)
        with HeldDirectory("job-", tmp_path):
            pass
        assert (left / "segment").exists()


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_nothing_that_a_job_writes_is_for_others_whatever_the_umask(tmp_path: Path, no_umask: None) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text("from holdfast import ft\nwith ft.Session() as session:\n    list(session.steps(0))\n")
    launch(LaunchPlan(python_command(str(script), []), 1), logs)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (logs, *logs.iterdir())}
    assert len(modes) > 1
    assert not [name for name, mode in modes.items() if mode & 0o077], modes


def test_the_output_of_a_clusters_ranks_is_for_their_owner_alone(no_umask: None) -> None:
    with LocalCluster(1, "shm") as cluster:
        cluster.run(lambda comm: None)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in cluster.logs.iterdir()}
    assert modes
    assert not [name for name, mode in modes.items() if mode & 0o077], modes


def test_a_folder_that_is_removed_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = held_directory._lock, list[Path]()

    def late(folder: Path, how: int) -> int:
        taken.append(folder)
        if len(taken) == 1:
            folder.rmdir()
        return lock(folder, how)

    monkeypatch.setattr(held_directory, "_lock", late)
    with HeldDirectory("job-", tmp_path) as ours:
        assert ours.path.is_dir()
        assert taken[0] != ours.path
