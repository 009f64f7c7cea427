"""Any path that the system accepts works: in URLs, for Unix sockets, for a whole job."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.comms.algorithms.message_passing import tuning
from holdfast.comms.system.files import bind_unix, connect_unix, path_of, url_of
from holdfast.ft.registers import open_cell
from holdfast.harness import LocalCluster
from support.source_tree import ROOT, modules

ODD = "a#b?c %41 d"
"""A folder name that a URL would change if it were not quoted."""

LONG = "x" * 60
"""Twice this length exceeds the 107 bytes of a Unix socket's address."""

names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=20)


@given(
    st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4),
    st.sampled_from(["sqlite", "file"]),
)
def test_the_url_of_a_path_names_that_path(parts: list[str], scheme: str) -> None:
    path = Path("/", *parts)
    assert path_of(url_of(scheme, path), scheme, "") == path


@given(st.text(max_size=30))
def test_a_malformed_url_of_a_path_is_refused(text: str) -> None:
    try:
        path = path_of(f"file://{text}", "file", "file:///path")
    except ValueError as error:
        assert "write file:///path" in str(error)
    else:
        assert path.is_absolute() and path_of(url_of("file", path), "file", "") == path


@pytest.mark.parametrize("url", ["file:///a/x#1", "file:///a/x?1", "file:///a/x#", "file:///a/x%", "file:///a/x%00"])
def test_a_file_url_with_a_fragment_query_or_bad_escape_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="file:///path"):
        comms.connect("inproc", rank=0, size=1, rendezvous=url)


def test_a_register_whose_name_is_a_pattern_leaves_others_alone(tmp_path: Path) -> None:
    (tmp_path / ".job1.5.5.new").write_text("another register, which is being made")
    open_cell(url_of("sqlite", tmp_path / "job[1]"), "view").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".job1.5.5.new", "job[1]"]


def test_four_slashes_are_an_absolute_path_too(tmp_path: Path) -> None:
    """SQLAlchemy writes absolute paths this way."""
    four = open_cell(f"sqlite:///{tmp_path}/job.sqlite", "view")
    three = open_cell(f"sqlite://{tmp_path}/job.sqlite", "view")
    assert four.compare_and_set(0, b"said")
    assert three.read() == (1, b"said")
    four.close()
    three.close()


def test_a_unix_socket_may_be_at_a_path_of_any_length(tmp_path: Path) -> None:
    folder = tmp_path / LONG / LONG / ODD
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as line:
        bind_unix(door, folder / "socket")
        door.listen()
        connect_unix(line, folder / "socket")
    assert (folder / "socket").is_socket()


def test_only_one_helper_makes_the_addresses_of_unix_sockets_and_the_urls_of_files() -> None:
    wrong = []
    for path in modules():
        text = (ROOT / path).read_text()
        if re.search(r"""f["'](sqlite|file)://""", text):
            wrong.append(f"{path}: use holdfast.comms.system.files.url_of")
        if "AF_UNIX" in text and re.search(r"\.(bind|connect)\((str\(|address|path|self\._path)", text):
            wrong.append(f"{path}: use holdfast.comms.system.files.bind_unix and connect_unix")
    assert not wrong, "\n".join(wrong)


JOB = """
import torch
from holdfast import ft

with ft.Session() as session:
    for attempt in session.steps(3):
        with attempt:
            attempt.comm.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    "backend", ["shm", "ucx", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gloo", "mpi"))]
)
def test_a_job_runs_without_a_home_in_a_temporary_folder_with_an_odd_and_long_name(
    tmp_path: Path, backend: str
) -> None:
    folder = tmp_path / ODD / LONG / LONG
    folder.mkdir(parents=True)
    script = folder / "job.py"
    script.write_text(JOB)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "holdfast.harness.cli.app",
            "run",
            "-n",
            "2",
            "--backend",
            backend,
            str(script),
        ],
        env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder / "nowhere")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cluster_runs_in_a_temporary_folder_with_an_odd_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ODD).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ODD))
    with LocalCluster(2, "shm") as cluster:
        assert cluster.run(lambda comm: comm.size) == [2, 2]


def refuse(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize("home", ["missing", "file", "unset", "unreadable"])
def test_a_job_runs_with_a_home_that_cannot_hold_the_optional_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    if home == "unreadable":
        monkeypatch.setattr(Path, "read_bytes", refuse)
    if home == "unset":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert tuning.load() == tuning.Tuning()
