"""Files of this process: descriptors that others close, paths of any form, reads and writes that fall short."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.common.process_memory import MOST_BYTES, read_process, write_process
from holdfast.comms import Communicator
from holdfast.comms.algorithms.message_passing import tuning
from holdfast.comms.system import files
from holdfast.comms.system.files import OwnedDescriptor, path_of, url_of
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import Liveness, start_time, this_host, this_process
from holdfast.ft.registers import open_cell
from holdfast.harness import LocalCluster
from support.comms.ranks import on_ranks, second_tier
from support.programs.forked_programs import ForkedProgram, run_python
from support.source_tree import ROOT, modules
from support.waiting import PROGRAM_SECONDS

KINDS: dict[str, Callable[[], int]] = {
    "file": lambda: os.open(os.devnull, os.O_RDONLY),
    "memory": lambda: os.memfd_create("test"),
    "eventfd": lambda: os.eventfd(0),
    "pidfd": lambda: os.pidfd_open(os.getpid()),
    "socket": lambda: socket.socket().detach(),
}
OTHERS: dict[str, Callable[[], int]] = KINDS | {
    "file": lambda: os.memfd_create("users"),
    "pidfd": lambda: os.pidfd_open(os.getppid()),
}


def reused(number: int, other: str) -> int:
    """Close `number` behind its owner's back, and open another file under it."""
    opened = OTHERS[other]()
    os.dup2(opened, number)
    os.close(opened)
    return number


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_names_another_file_is_neither_closed_nor_woken(kind: str, other: str) -> None:
    owned = OwnedDescriptor(KINDS[kind]())
    assert owned.ours
    number = reused(owned, other)
    assert not owned.ours
    owned.wake()
    owned.close()
    os.fstat(number)
    if other == "eventfd":
        os.set_blocking(number, False)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(number)
    os.close(number)


def test_close_closes_once() -> None:
    owned = OwnedDescriptor(KINDS["file"]())
    owned.close()
    again = KINDS["file"]()
    assert again == owned, "the number is free"
    owned.close()
    os.close(again)


@pytest.mark.parametrize("other", [*OTHERS, "nothing"])
def test_a_living_process_is_not_dead_because_its_pidfd_was_closed(other: str) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        liveness = Liveness([this_process(), Peer(this_host(), child.pid, start_time(child.pid))], rank=0)
        assert liveness.dead() == ()
        (pidfd,) = liveness._ranks
        if other == "nothing":
            os.close(pidfd)
        else:
            reused(pidfd, other)
        assert liveness.dead() == ()
        wake = OwnedDescriptor(os.eventfd(0))
        assert liveness.wait(wake, 0.01) and liveness.dead() == ()
        child.kill()
        child.wait()
        assert liveness.wait(wake, 10.0) and liveness.dead() == (1,)
        liveness.close()
        wake.close()
        if other != "nothing":
            os.close(pidfd)


DAEMON = """
import os, sys
import torch
from holdfast import comms

rank, backend, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = comms.connect(backend, rank=rank, size=2, rendezvous=f"file://{folder}/meet", timeout=20)
comm.all_reduce(torch.ones(4))
comm.barrier()
if rank == 0:
    os.closerange(3, 4096)
files = [open(f"{folder}/{rank}.{number}", "w+b") for number in range(60)]
try:
    comm.all_reduce(torch.ones(300_000), timeout=20)
except comms.HoldfastError as error:
    assert rank == 1 or "the process is gone" not in str(error), error
comm.close()
for file in files:
    assert os.fstat(file.fileno()).st_size == 0
    file.write(b"x")
    file.close()
"""


@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_a_program_that_closes_all_numbers_keeps_its_own_files(backend: str, tmp_path: Path) -> None:
    """The communicator goes on, or ends with an error that blames no living rank; the process ends well."""
    with contextlib.ExitStack() as stack:
        arguments = [["daemon.py", str(rank), backend, str(tmp_path)] for rank in range(2)]
        ranks = [stack.enter_context(ForkedProgram(DAEMON, each, None, os.environ)) for each in arguments]
        for program in ranks:
            done = program.communicate(PROGRAM_SECONDS)
            assert done.returncode == 0, done.stderr


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
        files.bind_unix(door, folder / "socket")
        door.listen()
        files.connect_unix(line, folder / "socket")
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


@pytest.mark.parametrize("backend", ["shm", *second_tier("gloo", "ucx", "mpi")])
def test_a_job_runs_without_a_home_in_a_temporary_folder_with_an_odd_and_long_name(
    tmp_path: Path, backend: str
) -> None:
    folder = tmp_path / ODD / LONG / LONG
    folder.mkdir(parents=True)
    script = folder / "job.py"
    script.write_text(JOB)
    command = f"-m holdfast.harness.cli.app run -n 2 --backend {backend}"
    environ = {**os.environ, "TMPDIR": str(folder), "HOME": str(folder / "nowhere")}
    run_python(*command.split(), script, environ=environ)


def test_a_cluster_runs_in_a_temporary_folder_with_an_odd_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ODD).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ODD))
    with LocalCluster(2, "shm") as cluster:
        assert cluster.run(lambda comm: comm.size) == [2, 2]


@pytest.mark.parametrize("home", ["missing", "file", "unset", "unreadable"])
def test_a_job_runs_with_a_home_that_cannot_hold_the_optional_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    def refuse(path: object = None) -> Any:
        raise RuntimeError("no home") if home == "unset" else PermissionError(13, "Permission denied", str(path))

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    if home == "unreadable":
        monkeypatch.setattr(Path, "read_bytes", refuse)
    if home == "unset":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(Path, "home", refuse)
    assert tuning.load() == tuning.Tuning()


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_a_partial_copy_is_continued(pieces: list[bytes], most: int) -> None:
    sources = [ctypes.create_string_buffer(piece, len(piece) or 1) for piece in pieces]
    for copy in (read_process, write_process):
        targets, addresses = [ctypes.create_string_buffer(len(piece) or 1) for piece in pieces], list[int]()
        for source, target, piece in zip(sources, targets, pieces, strict=True):
            local, remote = (target, source) if copy is read_process else (source, target)
            addresses += ctypes.addressof(local), ctypes.addressof(remote), len(piece)
        assert copy(os.getpid(), *addresses, most=most) == sum(map(len, pieces))
        assert [target.raw[: len(piece)] for target, piece in zip(targets, pieces, strict=True)] == pieces


def test_a_copy_stops_at_inaccessible_memory_and_returns_its_length() -> None:
    page = 4096
    memory = torch.empty(4 * page, dtype=torch.uint8)
    hole = memory.data_ptr() // page * page + 2 * page
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(hole), ctypes.c_size_t(page), 0) == 0
    try:
        into = torch.empty(2 * page, dtype=torch.uint8)
        for most in (MOST_BYTES, 1000, page):
            assert read_process(os.getpid(), into.data_ptr(), hole - page, 2 * page, most=most) == page
        with pytest.raises(OSError, match="Bad address"):
            read_process(os.getpid(), into.data_ptr(), hole, page)
    finally:
        libc.mprotect(ctypes.c_void_p(hole), ctypes.c_size_t(page), 3)


@given(st.binary(max_size=100), st.integers(1, 30), st.integers(0, 110), st.integers(0, 110))
def test_files_are_read_and_written_whole(data: bytes, at_once: int, offset: int, nbytes: int) -> None:
    fd = os.memfd_create("short-results")
    try:
        files.write_all(fd, data, at_once)
        assert files.read_at(fd, nbytes, offset, at_once) == data[offset : offset + nbytes]
        os.lseek(fd, 0, os.SEEK_SET)
        assert files.read_all(fd, at_once) == data
    finally:
        os.close(fd)


@pytest.mark.thorough
@on_ranks(2, "shm", "ucx", timeout=120.0)
def test_sums_messages_and_windows_of_more_than_2_gib_are_whole(comm: Communicator) -> None:
    """Each rank has one tensor, for machines with little memory."""
    nbytes = (1 << 31) + (1 << 20)
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    ends = tensor[:3], tensor[-3:], tensor[MOST_BYTES - 1 : MOST_BYTES + 2]
    for end in ends:
        end.fill_(1 + comm.rank)
    comm.all_reduce(tensor)
    assert all(bool((end == 3).all()) for end in ends)
    if comm.rank == 0:
        tensor[-1] = 7
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)
        assert int(tensor[-1]) == 7
        assert int(tensor[:-1].count_nonzero()) == 8
    with comm.window(tensor if comm.rank == 0 else tensor[:1]) as window:
        if comm.rank == 1:
            window.put(tensor.fill_(3), 0, timeout=60.0)
            window.get(tensor.zero_(), 0, timeout=60.0)
            assert int(tensor.count_nonzero()) == nbytes
        comm.barrier()


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (6, 9), reason="Linux 6.9 gives pidfds inodes")
def test_pidfds_are_told_apart_without_a_look_into_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank checks those of all its peers over and over."""
    pidfd = OwnedDescriptor(os.pidfd_open(os.getpid()))
    monkeypatch.delattr(Path, "read_text")
    assert pidfd.ours
    number = reused(pidfd, "pidfd")
    assert not pidfd.ours
    os.close(number)
