"""The register in a file: what it accepts, its lock held by another process, and its use in forked children."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import itertools
import os
import pwd
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.errors import CorruptData
from holdfast.ft import Timeouts, faultpoints
from holdfast.ft.membership.events import CasFailed, CasWon, ViewRead
from holdfast.ft.node.register import Register, RegisterClient, RegisterThreads
from holdfast.ft.registers import RegisterAway, RegisterBusy, open_cell, sqlite
from holdfast.harness import LocalCluster
from support.children import Child, children, register_lock
from support.event_loop import until
from support.samples.tally import QUICK, SHARDS, assert_exact, start_with_spares, tally_up
from support.views import view_of
from support.waiting import PATIENCE

VIEW = view_of("h", 1, "forming")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where `url` has the register."""
    return tmp_path / "job.sqlite"


def test_the_file_is_the_owners_alone_and_nothing_else_stays(file: Path, url: str) -> None:
    """Files of a killed creator are removed."""
    file.with_name(f".{file.name}.12345.67.new").write_bytes(b"half a templ")
    with closing(open_cell(url, "view")) as cell:
        cell.compare_and_set(0, b"x")
        assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}
    assert list(file.parent.iterdir()) == [file]


def test_many_processes_may_create_it_at_the_same_moment(file: Path, url: str, start: Callable[..., Child]) -> None:
    def body(pipe: Connection) -> None:
        pipe.send("ready")
        pipe.recv()
        with closing(open_cell(url, "view")) as cell:
            pipe.send(cell.compare_and_set(0, str(os.getpid()).encode()))
            pipe.recv()

    for _ in range(3):
        openers = [start(body) for _ in range(8)]
        for opener in openers:
            assert opener.hear() == "ready"
        for opener in openers:
            opener.tell("go")
        assert sorted(opener.hear() for opener in openers) == [False] * 7 + [True]
        for opener in openers:
            opener.tell("done")
            opener.end()
        assert list(file.parent.iterdir()) == [file]
        file.unlink()


def test_killing_writers_at_any_moment_loses_no_write_and_leaves_a_good_file(file: Path, url: str) -> None:
    """One writer keeps its handle, the other one opens it anew for each write."""

    def body(pipe: Connection, reopen: bool) -> None:
        while True:
            with closing(open_cell(url, "view")) as cell:
                while True:
                    version, _ = cell.read()
                    if cell.compare_and_set(version, b"%d" % (version + 1)):
                        pipe.send(version + 1)
                    if reopen:
                        break

    survived = 0
    for round_ in range(20):
        with children() as start:
            writers = [start(body, False), start(body, True)]
            for writer in writers:
                writer.hear()
            time.sleep(0.001 * (round_ % 7))
            for writer in writers:
                writer.kill()
            reported = survived
            for writer in writers:
                while writer.pipe.poll():
                    try:
                        reported = max(reported, writer.pipe.recv())
                    except EOFError:
                        break
        with closing(open_cell(url, "view")) as cell:
            survived, value = cell.read()
            assert survived >= reported, "a write that was confirmed is lost"
            assert value == b"%d" % survived
            assert cell.compare_and_set(survived, b"%d" % (survived + 1))
            survived += 1
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def other_database(path: Path, journal: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA journal_mode={journal}")
        database.execute("CREATE TABLE cell(somebody, elses)")


def newer_register(path: Path) -> None:
    open_cell(f"sqlite://{path}", "view").close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=99")


BAD_FILES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "text": (lambda path: path.write_text("steps: 17\n" * 50), CorruptData, "not an sqlite file"),
    "empty": (lambda path: path.write_bytes(b""), CorruptData, "not an sqlite file"),
    "other database": (lambda path: other_database(path, "delete"), CorruptData, "not a register"),
    "other database in WAL mode": (lambda path: other_database(path, "wal"), CorruptData, "not a register"),
    "newer": (newer_register, CorruptData, "schema 99"),
    "folder": (Path.mkdir, CorruptData, "regular file"),
    "shorn": (lambda path: path.write_bytes(sqlite._template()[:300]), CorruptData, "damaged"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_register_is_refused_at_once_and_left_as_it_is(
    file: Path, url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 2 * PATIENCE)
    make, error, words = BAD_FILES[kind]
    make(file)
    if file.is_file():
        file.chmod(0o600)
    before = state_of(file.parent)
    started = time.monotonic()
    with pytest.raises(error, match=words):
        open_cell(url, "view")
    assert time.monotonic() - started < PATIENCE
    assert state_of(file.parent) == before


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns) for path in folder.iterdir()
    }


def belongs_to_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("root alone can give files away")
    os.chown(path, 65534, 65534)


def is_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def is_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


FORGERIES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "others can read it": (lambda path: path.chmod(0o644), RegisterAway, "mode 0644"),
    "others can write to it": (lambda path: path.chmod(0o666), RegisterAway, "mode 0666"),
    "another user's": (belongs_to_another_user, RegisterAway, "owner 65534"),
    "a link": (is_a_link, CorruptData, "regular file"),
    "a FIFO": (is_a_fifo, CorruptData, "regular file"),
}


@pytest.mark.parametrize(
    ("suffix", "forgery"),
    [pair for pair in itertools.product(sqlite._SUFFIXES, FORGERIES) if pair != ("", "a link")],
)
def test_a_register_or_a_file_beside_it_that_is_not_ours_alone_is_refused_before_it_is_read(
    file: Path, url: str, suffix: str, forgery: str
) -> None:
    make, error, words = FORGERIES[forgery]
    open_cell(url, "view").close()
    forged = file.with_name(file.name + suffix)
    if suffix:
        forged.write_bytes(b"forged")
        forged.chmod(0o600)
    make(forged)
    before = state_of(file.parent)
    with pytest.raises(error, match=words):
        open_cell(url, "view")
    assert state_of(file.parent) == before, "nothing has read it, or written to it"


def test_a_file_that_another_user_slips_in_while_it_is_opened_is_refused(
    file: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite.SqliteCell._connect

    def late(cell: sqlite.SqliteCell) -> sqlite3.Connection:
        database = connect(cell)
        file.with_name(file.name + "-wal").chmod(0o666)
        return database

    monkeypatch.setattr(sqlite.SqliteCell, "_connect", late)
    with pytest.raises(RegisterAway, match="mode 0666"):
        open_cell(url, "view")


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o772, 0])
def test_a_folder_in_which_others_can_put_files_or_of_another_user_is_refused(file: Path, url: str, mode: int) -> None:
    words = f"others can put files into its folder .*mode {mode:04o}.*of your own" if mode else "owner 65534"
    file.parent.chmod(mode) if mode else belongs_to_another_user(file.parent)
    with pytest.raises(RegisterAway, match=words):
        open_cell(url, "view")
    assert not list(file.parent.iterdir())


def test_a_folder_of_a_group_is_refused_unless_the_group_is_the_users_own(
    file: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.chmod(0o775)
    name = pwd.getpwuid(os.geteuid()).pw_name
    for members, private in [([], True), (["somebody"], False)]:
        group = grp.struct_group((name, "x", 0, members))
        monkeypatch.setattr(grp, "getgrgid", {file.parent.stat().st_gid: group}.__getitem__)
        with contextlib.nullcontext() if private else pytest.raises(RegisterAway, match="mode 0775"):
            open_cell(url, "view").close()


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_file_removed_during_a_job_never_makes_two_registers(file: Path, url: str, replaced: bool) -> None:
    with closing(open_cell(url, "view")) as cell:
        cell.compare_and_set(0, b"ours")
        for path in file.parent.iterdir():
            path.unlink()
        if replaced:
            open_cell(url, "view").close()
        for use in (cell.read, lambda: cell.compare_and_set(1, b"alone"), lambda: cell.wait(1, 1.0)):
            with pytest.raises(RegisterAway, match=r"gone|replaced"):
                use()


# -- another process holds its lock


@pytest.fixture
def register(url: str) -> Iterator[Register]:
    with Register.open(url) as opened:
        yield opened


def test_a_lock_that_is_held_delays_writers_for_a_limited_time_and_readers_not_at_all(
    register: Register, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that must not wait gets an error at once."""
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.3)
    with register_lock(url):
        assert register.read() is None
        with pytest.raises(RegisterAway, match="lock"):
            register.compare_and_set(0, VIEW)
        with pytest.raises(RegisterBusy, match="another process holds its lock"):
            register.compare_and_set(0, VIEW, at_once=True)
        assert register.read(at_once=True) is None, "readers never wait"
    assert register.compare_and_set(0, VIEW, at_once=True)
    assert register.read(at_once=True) == VIEW


@contextmanager
def asking(url: str, patience: float, answers: list[Any]) -> Iterator[RegisterClient]:
    """A client of the register, in the running event loop."""
    loop = asyncio.get_running_loop()
    threads = RegisterThreads(url, loop)
    client = RegisterClient(
        threads, loop, Timeouts(heartbeat=0.05, suspect=0.1, rebuild=patience), answers.append, answers.append
    )
    try:
        yield client
    finally:
        client.end()
        threads.close()


async def test_an_event_loop_is_not_blocked_while_the_register_is_busy(register: Register, url: str) -> None:
    answers: list[Any] = []
    with asking(url, 10.0, answers) as client:
        with register_lock(url):
            client.propose(0, VIEW)
            for _ in range(10):
                await asyncio.sleep(0.01)
                assert answers == []
        await until(lambda: answers)
    assert answers == [CasWon(VIEW)]


async def test_a_request_to_a_busy_register_fails_in_time(register: Register, url: str) -> None:
    answers: list[Any] = []
    with asking(url, 0.2, answers) as client, register_lock(url):
        client.propose(0, VIEW)
        await until(lambda: answers)
    assert [type(answer) for answer in answers] == [CasFailed]
    assert "did not answer within 0.2 s" in answers[0].reason


async def test_a_view_that_another_process_writes_is_shown_at_once_while_the_job_is_formed(
    register: Register, url: str
) -> None:
    shown: list[Any] = []
    with asking(url, 10.0, shown) as client:
        client.follow()
        assert register.compare_and_set(0, VIEW)
        await until(lambda: shown)
    assert shown == [ViewRead(VIEW)]


def stop_in_the_lock() -> None:
    """Arm this process: the first one that is about to propose a view stops, holding the register's lock."""
    sqlite.BUSY_SECONDS = 2 * PATIENCE  # if a member waited for the lock, it would take that long
    directory = Path(os.environ["HOLDFAST_LOG_DIR"]).parent

    def fault(point: str, step: int, rank: int, epoch: int) -> None:
        if point != "rebuild.before_propose" or step < 2:
            return
        try:
            (directory / "stopped").touch(exist_ok=False)
        except FileExistsError:
            return
        with register_lock(f"sqlite://{directory}/register.sqlite"):
            (directory / "stopped").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60.0)  # a process of several threads may run on for a moment

    faultpoints.arm(fault)


def test_a_member_stopped_while_it_holds_the_lock_is_fenced_and_the_others_continue() -> None:
    options = {"timeouts": QUICK, "shards": SHARDS}
    with LocalCluster(4, session=options, prepare=stop_in_the_lock) as ranks:
        job = start_with_spares(ranks, tally_up, strike=lambda job: job.kill(3))
        assert_exact(job, job.results(), 2)
        events = job.events()
        stopped = float((job.directory / "stopped").read_text())
    fenced = [event for event in events if event["kind"] == "fenced"]
    assert len({event["member"] for event in fenced}) == 1, "nobody else was silent"
    resumed = min(event["time"] for event in events if event["kind"] == "committed" and event["time"] > stopped)
    assert resumed - stopped < PATIENCE


# -- forks


def a_reader(pipe: Connection, url: str) -> None:
    """Report the content of the register, each change of it, and the number of descriptors."""
    for _ in range(2):
        cell = open_cell(url, "job")
        version, value = cell.read()
        pipe.send((version, value))
        while pipe.recv() == "look":
            found = cell.wait(version, 5.0)
            if found is not None:
                version = found[0]
            pipe.send(found)
        cell.close()


def a_parent(pipe: Connection, url: str) -> None:
    """Open the register and fork a reader, which continues when this process is killed."""
    cell = open_cell(url, "job")
    ours, theirs = os.pipe()
    if os.fork() == 0:
        a_reader(pipe, url)
        os._exit(0)
    cell.read()
    os.close(theirs)
    os.read(ours, 1)


@pytest.mark.parametrize("ancestors", ["closed it", "were killed"])
def test_a_fork_can_use_a_register_after_its_ancestors(ancestors: str, url: str, start: Callable[..., Child]) -> None:
    """Closing the parent's last handle would remove the WAL, and the child would see no change any more."""

    def write(version: int, value: bytes) -> None:
        with closing(open_cell(url, "job")) as cell:
            assert cell.compare_and_set(version, value)
        child.tell("look")
        assert child.hear() == (version + 1, value)

    cell = open_cell(url, "job")
    cell.compare_and_set(0, b"first")
    child = start(a_reader if ancestors == "closed it" else a_parent, url)
    assert child.hear() == (1, b"first")
    cell.close()
    if ancestors == "were killed":
        child.kill()
    for version, value in ((1, b"second"), (2, b"third")):
        write(version, value)
    child.tell("open it again")
    assert child.hear() == (3, b"third")
    write(3, b"fourth")
    child.tell("end")
    if ancestors == "closed it":
        child.end()


def test_children_forked_amid_writes_can_write(url: str, start: Callable[..., Child]) -> None:
    """Regression: a child forked within a transaction of another thread, which may just have opened, never left it."""

    def write() -> None:
        for number in itertools.count():
            with closing(open_cell(url, f"busy {number}")) as cell:
                for version in range(3):
                    cell.compare_and_set(version, bytes(20_000))
            if over.is_set():
                return

    def a_writer(pipe: Connection, number: int) -> None:
        pipe.send(open_cell(url, f"cell {number}").compare_and_set(0, b"mine"))

    over = threading.Event()
    open_cell(url, "job").close()
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(30):
            assert start(a_writer, number).hear()
    finally:
        over.set()
        thread.join()


def test_a_child_forked_in_the_middle_of_a_write_is_refused_a_register(
    url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that the disk held up outlasted the fork's patience; the child waited for SQLite's locks for ever."""
    monkeypatch.setattr(sqlite, "FORK_SECONDS", 0.05)

    def refused(pipe: Connection) -> None:
        with pytest.raises(RegisterAway, match="forked while another thread had been writing"):
            open_cell(url, "job")
        pipe.send("refused")

    with closing(open_cell(url, "busy")) as cell:
        with cell.lock:  # type: ignore[attr-defined]
            child = start(refused)
        assert child.hear() == "refused"
        assert cell.compare_and_set(0, b"the parent goes on")
        assert start(lambda pipe: pipe.send(open_cell(url, "other").read())).hear() == (0, b"")
