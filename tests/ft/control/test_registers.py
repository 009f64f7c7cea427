"""Registers: one suite for all of them, then tests of single kinds."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import etcd3gw
import pytest
from msgspec import structs

from holdfast.comms.errors import CorruptData, UsedAfterFork
from holdfast.comms.plugins.spec import hookimpl
from holdfast.ft.membership.view import View
from holdfast.ft.node.register import Register
from holdfast.ft.registers import Cell, RegisterAway, open_cell, schemes, sqlite, tcp
from holdfast.ft.registers import etcd as etcd_register
from holdfast.harness.testbed.etcd import EtcdCluster
from support.children import Child, children
from support.comms.meeting import in_threads, registered
from support.linearizability import OperationRecorder, RegisterOperation, unexplained
from support.views import view_of
from support.waiting import PATIENCE, eventually


@pytest.fixture(scope="module", autouse=True)
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One node for all tests of this process; each test uses a name of its own."""
    with EtcdCluster(1, tmp_path_factory.mktemp("etcd")) as node:
        yield node


@pytest.fixture(params=["memory", "sqlite", "tcp", "etcd"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A fresh register of each kind; on a busy machine etcd may take long to answer."""
    for limit in ("PATIENCE", "ANSWER_SECONDS"):
        monkeypatch.setattr(etcd_register, limit, PATIENCE)
    if request.param == "tcp":
        with tcp.serving() as server:
            yield f"{server}/{tmp_path.name}"
    elif request.param == "etcd":
        yield f"{etcd.url}/{tmp_path.name}"
    else:
        yield f"memory://{tmp_path.name}" if request.param == "memory" else f"sqlite://{tmp_path}/job.sqlite"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.sqlite"


@contextlib.contextmanager
def cells(url: str, *names: str) -> Iterator[list[Cell]]:
    """Open cells, all closed on leaving."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(open_cell(url, name))) for name in names]


# All registers.


def test_a_cell_is_replaced_version_by_version_and_shared_by_its_handles(url: str) -> None:
    with cells(url, "view", "view", "store") as [mine, yours, other]:
        assert mine.read() == (0, b"")
        for version, value in enumerate([b"first", b"", b"\0", bytes(range(256)), bytes(3 << 20)]):
            for wrong in {0, 1, version - 1, version + 1, 10**6} - {version, -1}:
                assert not yours.compare_and_set(wrong, b"early or late")
            assert yours.read()[0] == version
            with cells(url, "view") as [third]:
                assert third.compare_and_set(version, value)
            assert mine.read() == yours.read() == (version + 1, value), "it outlives the handle that wrote it"
        assert other.read() == (0, b"")


def test_wait_returns_at_once_what_is_already_newer_and_gives_up_after_its_timeout(url: str) -> None:
    with cells(url, "view") as [cell]:
        started = time.monotonic()
        assert cell.wait(0, timeout=0.2) is None
        assert 0.2 <= time.monotonic() - started < PATIENCE
        assert cell.wait(0, timeout=0.0) is None
        cell.compare_and_set(0, b"here")
        assert cell.wait(0, timeout=5.0) == (1, b"here")


def test_all_threads_that_wait_on_a_handle_are_woken_by_a_write_through_another_handle(url: str) -> None:
    with cells(url, "view", "view") as [mine, yours]:
        for version in range(20):
            writer = threading.Timer(0.005, mine.compare_and_set, (version, b"%d" % version))
            writer.start()
            seen = in_threads(4, lambda _, version=version: yours.wait(version, 5.0))
            assert seen == [(version + 1, b"%d" % version)] * 4
            writer.join()


def test_a_closed_handle_is_away_and_its_waiters_wake(url: str) -> None:
    cell = open_cell(url, "view")
    errors: list[RegisterAway] = []

    def wait() -> None:
        try:
            cell.wait(0, timeout=30.0)
        except RegisterAway as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    cell.close()
    cell.close()
    waiter.join(5.0)
    assert len(errors) == 1
    for use in (cell.read, lambda: cell.compare_and_set(0, b""), lambda: cell.wait(0, 1.0)):
        with pytest.raises(RegisterAway, match="closed"):
            use()


def test_a_handle_is_refused_in_a_forked_child(url: str, start: Callable[..., Child]) -> None:
    def body(pipe: Connection, cell: Cell) -> None:
        try:
            cell.read()
        except UsedAfterFork as error:
            pipe.send(str(error))

    with cells(url, "view") as [cell]:
        child = start(body, cell)
        assert "fork" in child.hear()
        child.end()


# Linearizability: the operations of each user, with their beginnings and ends.


@pytest.mark.parametrize("own_handles", [True, False], ids=["own handles", "one handle"])
def test_writers_in_threads_are_linearizable(url: str, own_handles: bool) -> None:
    with cells(url, *["view"] * 4) as handles:
        users = [OperationRecorder(handles[number if own_handles else 0]) for number in range(4)]
        in_threads(4, lambda number: users[number].work(f"thread{number}", 0.25))
        users[0].read()
    assert all(user.history for user in users)
    assert unexplained([each for user in users for each in user.history]) is None


@pytest.mark.parametrize("url", ["sqlite", "tcp", "etcd"], indirect=True)
def test_writers_in_processes_are_linearizable(url: str, start: Callable[..., Child]) -> None:
    def body(pipe: Connection, number: int) -> None:
        with cells(url, "view") as [cell]:
            pipe.send("ready")
            pipe.recv()
            user = OperationRecorder(cell)
            user.work(f"process{number}", 0.3)
            pipe.send(user.history)

    writers = [start(body, number) for number in range(4)]
    for writer in writers:
        assert writer.hear() == "ready"
    for writer in writers:
        writer.tell("go")
    histories = [writer.hear() for writer in writers]
    for writer in writers:
        writer.end()
    with cells(url, "view") as [cell]:
        end = OperationRecorder(cell)
        end.read()
    assert all(histories)
    assert unexplained([each for history in [*histories, end.history] for each in history]) is None


def test_etcd_stays_linearizable_while_its_leaders_die(tmp_path: Path) -> None:
    """Three nodes; the leader is killed, the next one stopped, both return. Unanswered writes may count."""
    with EtcdCluster(3, tmp_path) as nodes, cells(f"{nodes.url}/job", *["view"] * 3) as handles:
        users, over = [OperationRecorder(handle) for handle in handles], threading.Event()
        threads = [
            threading.Thread(target=user.work, args=(f"thread{number}", 2 * PATIENCE, 2000, over))
            for number, user in enumerate(users)
        ]

        def writes(count: int) -> None:
            """Wait until so many more writes are done."""
            wanted = count + sum(map(written, users))
            eventually(lambda: sum(map(written, users)) >= wanted)

        def written(user: OperationRecorder) -> int:
            return sum(each.kind == "write" and each.done is True for each in user.history.copy())

        for thread in threads:
            thread.start()
        writes(10)
        first = nodes.leader()
        nodes.kill(first)
        second = nodes.leader()
        writes(10)
        nodes.start(first)
        nodes.pause(second)
        writes(10)
        nodes.resume(second)
        writes(10)
        over.set()
        for thread in threads:
            thread.join()
        users[0].read()
    history = [each for user in users for each in user.history]
    assert unexplained(history) is None


# The checker itself.


@pytest.mark.parametrize(
    "second",
    [
        RegisterOperation("read", 0, b"", 2, 3),
        RegisterOperation("read", 1, b"other", 2, 3),
        RegisterOperation("write", 0, b"again", 2, 3, True),
        RegisterOperation("write", 1, b"next", 2, 3, False),
    ],
    ids=["stale read", "never written", "written twice", "refused without a reason"],
)
def test_the_checker_finds_histories_that_are_not_linearizable(second: RegisterOperation) -> None:
    assert unexplained([RegisterOperation("write", 0, b"first", 0, 1), second]) is second


# URLs.


BAD_URLS = {
    r"memory://.*sqlite://": ["", "job.sqlite", "/tmp/job.sqlite", "nosuch://x", "sqlite:relative"],
    "sqlite:///absolute/path": ["sqlite://host/x", "sqlite://", "sqlite:///", "sqlite:///x/", "sqlite:///x?mode=ro"],
    "is not a tcp register": ["tcp://", "tcp://host", "tcp://host:0/x", "tcp://host:99999", "tcp://h:1/x?y=1"],
    "is not an etcd register": [
        "etcd://",
        "etcd://host",
        "etcd://a:1,b/x",
        "etcd://a:1,,b:2",
        "etcd://u@a:1",
        "etcd://a:1/x?y",
    ],
    "twice": ["etcd://a:1,a:1/job"],
}


@pytest.mark.parametrize("words", BAD_URLS)
def test_a_url_that_names_no_register_is_refused_with_what_it_must_be(words: str) -> None:
    for bad in BAD_URLS[words]:
        with pytest.raises(ValueError, match=words):
            open_cell(bad, "view")


def test_a_cell_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        open_cell("memory://job", "")


def plugin(offers: Callable[[], Mapping[str, Callable[[str, str], Cell]]]) -> Any:
    return SimpleNamespace(holdfast_registers=hookimpl(offers))


def test_a_plugin_adds_a_scheme_and_a_broken_plugin_is_left_out() -> None:
    def broken() -> Mapping[str, Callable[[str, str], Cell]]:
        raise RuntimeError("no stamps")

    offers = {"postcard": lambda url, name: open_cell(url.replace("postcard", "memory"), name)}
    with registered(plugin(lambda: offers)), registered(plugin(broken)):
        assert {"memory", "sqlite", "postcard"} <= set(schemes())
        with cells("postcard://home", "view") as [cell]:
            assert cell.compare_and_set(0, b"wish you were here")
    assert "postcard" not in schemes()


# Registers in a file.


def test_the_file_is_the_owners_alone_and_nothing_else_stays(file: Path) -> None:
    """Files of a killed creator are removed."""
    file.with_name(f".{file.name}.12345.67.new").write_bytes(b"half a templ")
    with cells(f"sqlite://{file}", "view") as [cell]:
        cell.compare_and_set(0, b"x")
        assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}
    assert list(file.parent.iterdir()) == [file]


def test_many_processes_may_create_it_at_the_same_moment(file: Path, start: Callable[..., Child]) -> None:
    def body(pipe: Connection) -> None:
        pipe.send("ready")
        pipe.recv()
        with cells(f"sqlite://{file}", "view") as [cell]:
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


@pytest.mark.parametrize("reopen", [False, True], ids=["one handle", "a handle a write"])
def test_killing_writers_at_any_moment_loses_no_write_and_leaves_a_good_file(file: Path, reopen: bool) -> None:
    def body(pipe: Connection) -> None:
        while True:
            with cells(f"sqlite://{file}", "view") as [cell]:
                while True:
                    version, _ = cell.read()
                    if cell.compare_and_set(version, b"%d" % (version + 1)):
                        pipe.send(version + 1)
                    if reopen:
                        break

    survived = 0
    for round_ in range(20):
        with children() as start:
            writers = [start(body), start(body)]
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
        with cells(f"sqlite://{file}", "view") as [cell]:
            survived, value = cell.read()
            assert survived >= reported, "a write that was confirmed is lost"
            assert value == b"%d" % survived
            assert cell.compare_and_set(survived, b"%d" % (survived + 1))
            survived += 1
    with contextlib.closing(sqlite3.connect(file)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def other_database(path: Path, journal: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA journal_mode={journal}")
        database.execute("CREATE TABLE cell(somebody, elses)")


def newer_register(path: Path) -> None:
    open_cell(f"sqlite://{path}", "view").close()
    with contextlib.closing(sqlite3.connect(path)) as database:
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
    file: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 2 * PATIENCE)
    make, error, words = BAD_FILES[kind]
    make(file)
    if file.is_file():
        file.chmod(0o600)
    before = state_of(file.parent)
    started = time.monotonic()
    with pytest.raises(error, match=words):
        open_cell(f"sqlite://{file}", "view")
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


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("suffix", sqlite._SUFFIXES[1:])
def test_a_file_beside_the_register_that_is_not_ours_alone_is_refused_before_it_is_read(
    file: Path, suffix: str, forgery: str
) -> None:
    make, error, words = FORGERIES[forgery]
    open_cell(f"sqlite://{file}", "view").close()
    beside = file.with_name(file.name + suffix)
    beside.write_bytes(b"forged")
    beside.chmod(0o600)
    make(beside)
    before = state_of(file.parent)
    with pytest.raises(error, match=words):
        open_cell(f"sqlite://{file}", "view")
    assert state_of(file.parent) == before, "nothing has read it, or written to it"


@pytest.mark.parametrize("forgery", ["others can read it", "another user's"])
def test_a_register_that_is_not_ours_alone_is_refused(file: Path, forgery: str) -> None:
    make, error, words = FORGERIES[forgery]
    open_cell(f"sqlite://{file}", "view").close()
    make(file)
    with pytest.raises(error, match=words):
        open_cell(f"sqlite://{file}", "view")


def test_a_file_that_another_user_slips_in_while_it_is_opened_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite.SqliteCell._connect

    def late(cell: sqlite.SqliteCell) -> sqlite3.Connection:
        database = connect(cell)
        file.with_name(file.name + "-wal").chmod(0o666)
        return database

    monkeypatch.setattr(sqlite.SqliteCell, "_connect", late)
    with pytest.raises(RegisterAway, match="mode 0666"):
        open_cell(f"sqlite://{file}", "view")


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o772, 0])
def test_a_folder_in_which_others_can_put_files_or_of_another_user_is_refused(file: Path, mode: int) -> None:
    words = f"others can put files into its folder .*mode {mode:04o}.*of your own" if mode else "owner 65534"
    file.parent.chmod(mode) if mode else belongs_to_another_user(file.parent)
    with pytest.raises(RegisterAway, match=words):
        open_cell(f"sqlite://{file}", "view")
    assert not list(file.parent.iterdir())


def test_a_folder_of_a_group_is_refused_unless_the_group_is_the_users_own(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.chmod(0o775)
    name = pwd.getpwuid(os.geteuid()).pw_name
    for members, private in [([], True), (["somebody"], False)]:
        group = grp.struct_group((name, "x", 0, members))
        monkeypatch.setattr(grp, "getgrgid", {file.parent.stat().st_gid: group}.__getitem__)
        with contextlib.nullcontext() if private else pytest.raises(RegisterAway, match="mode 0775"):
            open_cell(f"sqlite://{file}", "view").close()


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_file_removed_during_a_job_never_makes_two_registers(file: Path, replaced: bool) -> None:
    with cells(f"sqlite://{file}", "view") as [cell]:
        cell.compare_and_set(0, b"ours")
        for path in file.parent.iterdir():
            path.unlink()
        if replaced:
            open_cell(f"sqlite://{file}", "view").close()
        for use in (cell.read, lambda: cell.compare_and_set(1, b"alone"), lambda: cell.wait(1, 1.0)):
            with pytest.raises(RegisterAway, match=r"gone|replaced"):
                use()


# The register of views.


def view(epoch: int, reason: str = "test") -> View:
    return structs.replace(view_of("h", epoch), reason=reason)


def test_the_view_of_each_epoch_replaces_the_one_before(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    with Register.open(url) as mine, Register.open(url) as yours:
        assert mine.read() is None
        assert mine.compare_and_set(0, view(1))
        assert not yours.compare_and_set(0, view(1, "too late"))
        assert yours.compare_and_set(1, view(2))
        assert mine.read() == view(2)
        assert mine.watch(1, timeout=5.0) == view(2)
        assert mine.watch(2, timeout=0.05) is None
        with pytest.raises(ValueError, match="epoch 3"):
            mine.compare_and_set(2, view(4))
        assert mine.read() == view(2)


NO_TEXT = view(1, "reason").encode().replace(b"reason", b"\xff" * 6)


@pytest.mark.parametrize("value", [b"", b"junk", view(7).encode(), view(1).encode() + b"more", NO_TEXT])
def test_a_value_that_is_no_view_is_corrupt(tmp_path: Path, value: bytes) -> None:
    url = f"memory://{tmp_path.name}"
    with cells(url, "view") as [cell], Register.open(url) as views:
        cell.compare_and_set(0, value)
        with pytest.raises(CorruptData):
            views.read()
        with pytest.raises(CorruptData):
            views.watch(0, timeout=1.0)


# Registers in a server.


@pytest.mark.parametrize("scheme", ["tcp", "etcd"])
def test_a_missing_server_and_one_of_another_kind_are_reported(
    scheme: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_register, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        answering = threading.Thread(target=_answer_rudely, args=(other,))
        answering.start()
        try:
            with pytest.raises(RegisterAway, match="is away"):
                open_cell(f"{scheme}://127.0.0.1:{taken}/job", "view")
        finally:
            other.shutdown(socket.SHUT_RDWR)
            answering.join()
    if scheme == "etcd":  # a tcp register on this machine would be begun
        with pytest.raises(RegisterAway, match="cannot be reached"):
            open_cell(f"etcd://127.0.0.1:{port}/job", "view")


def _answer_rudely(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")


def test_the_first_process_serves_a_tcp_register_while_it_has_it_open(port: int, start: Callable[..., Child]) -> None:
    url = f"tcp://127.0.0.1:{port}/job"

    def body(pipe: Connection) -> None:
        with cells(url, "view") as [cell]:
            pipe.send(cell.read())
            pipe.recv()
            pipe.send(cell.compare_and_set(1, b"second"))
            pipe.recv()
            try:
                cell.read()
            except RegisterAway as error:
                pipe.send(str(error))

    with cells(url, "view", "view") as [first, second]:
        assert first.compare_and_set(0, b"first")
        child = start(body)
        assert child.hear() == (1, b"first")
        first.close()
        child.tell("go")
        assert child.hear()
        assert second.read() == (2, b"second")
    child.tell("its server is gone")
    assert "does not answer" in child.hear()
    child.end()


def test_the_server_of_a_tcp_register_warns_that_it_is_open_to_all(caplog: pytest.LogCaptureFixture) -> None:
    with tcp.serving() as url, cells(f"{url}/job", "view"):
        assert [record.getMessage().count("whoever can reach this port") for record in caplog.records] == [1]


def test_calls_to_a_tcp_server_that_is_stopped_end_in_time_and_one_that_was_restarted_is_refused(
    port: int, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Child]
) -> None:
    monkeypatch.setattr(tcp, "PATIENCE", 1.0)

    def serve(pipe: Connection) -> None:
        with tcp.serving(port=port):
            pipe.send("ready")
            pipe.recv()

    server = start(serve)
    server.hear()
    with cells(f"tcp://127.0.0.1:{port}/job", "view") as [cell]:
        assert cell.compare_and_set(0, b"first")
        server.stop()
        with pytest.raises(RegisterAway, match="does not answer"):
            cell.read()
        monkeypatch.undo()
        server.resume()
        assert cell.read() == (1, b"first")
        server.kill()
        with pytest.raises(RegisterAway, match="does not answer"):
            cell.read()
        start(serve).hear()
        with pytest.raises(RegisterAway, match="another store is at its address"):
            cell.read()


@pytest.fixture
def client(etcd: EtcdCluster) -> Iterator[etcd3gw.Etcd3Client]:
    host, port = etcd.endpoints[0].split(":")
    opened = etcd3gw.Etcd3Client(host, int(port), api_path="/v3/")
    yield opened
    opened.session.close()


@pytest.mark.parametrize(
    ("value", "words"), [(b"hello", "not a register's"), (b"HF?9" + bytes(20), "schema")], ids=["other", "newer"]
)
def test_a_key_with_foreign_content_is_refused_and_left_as_it_is(
    etcd: EtcdCluster, client: etcd3gw.Etcd3Client, value: bytes, words: str
) -> None:
    name = f"other-{value.hex()}"
    value = value.replace(b"?", b"E")
    client.put(f"holdfast/{name}/view", value)
    with pytest.raises(CorruptData, match=words):
        open_cell(f"{etcd.url}/{name}", "view")
    assert client.get(f"holdfast/{name}/view") == [value]


def test_a_key_deleted_during_a_job_never_makes_two_registers(etcd: EtcdCluster, client: etcd3gw.Etcd3Client) -> None:
    with cells(f"{etcd.url}/deleted", "view") as [cell]:
        assert cell.compare_and_set(0, b"first")
        assert cell.read() == (1, b"first")
        client.delete("holdfast/deleted/view")
        with pytest.raises(RegisterAway, match="deleted while in use"):
            cell.read()
        with cells(f"{etcd.url}/deleted", "view") as [other]:
            assert other.compare_and_set(0, b"another")
            assert not cell.compare_and_set(1, b"second")
            with pytest.raises(RegisterAway, match="made anew"):
                cell.read()


def test_an_answer_from_before_the_key_was_made_is_no_deletion(etcd: EtcdCluster) -> None:
    """Regression: a thread that waits was answered after another one had seen the first value."""
    with cells(f"{etcd.url}/before", "view", "view") as [cell, writer]:
        opened: Any = cell
        ask = opened._ask

        def late(request: Callable[..., Any]) -> Any:
            answer = ask(request)
            opened._ask = ask
            assert writer.compare_and_set(0, b"first") and cell.read() == (1, b"first")
            return answer

        opened._ask = late
        assert cell.read() == (0, b"")


def test_endpoints_of_two_clusters_are_refused(etcd: EtcdCluster, tmp_path: Path) -> None:
    with EtcdCluster(1, tmp_path) as another:
        first, second = another.endpoints[0], etcd.endpoints[0]
        with cells(f"etcd://{first},{second}/two", "view") as [cell]:
            assert cell.compare_and_set(0, b"first")
            another.kill(0)
            with pytest.raises(RegisterAway, match="belongs to another cluster"):
                cell.read()


def test_an_etcd_that_is_away_raises_register_away_and_can_return(tmp_path: Path) -> None:
    with EtcdCluster(1, tmp_path) as node, cells(f"{node.url}/job", "view") as [cell]:
        assert cell.compare_and_set(0, b"first")
        node.kill(0)
        with pytest.raises(RegisterAway, match="cannot be reached"):
            cell.compare_and_set(1, b"second")
        node.start(0)
        node.leader()
        assert cell.compare_and_set(1, b"second")
