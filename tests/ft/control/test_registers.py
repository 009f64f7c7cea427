"""Registers: one suite for all of them, then tests of single kinds."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import etcd3gw
import pytest
import requests
from msgspec import structs

from holdfast.comms.errors import CorruptData, UsedAfterFork
from holdfast.comms.plugins.spec import hookimpl
from holdfast.ft.membership.view import View
from holdfast.ft.node.register import Register
from holdfast.ft.registers import Cell, RegisterAway, open_cell, schemes, tcp
from holdfast.ft.registers import etcd as etcd_register
from holdfast.ft.registers.etcd import Unauthorised
from holdfast.harness.testbed.etcd import Certificates, EtcdCluster
from support.children import Child
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
            seen = in_threads(4, lambda _, version=version: yours.wait(version, PATIENCE))
            assert seen == [(version + 1, b"%d" % version)] * 4
            writer.join()


def test_a_closed_handle_is_away_and_its_waiters_wake(url: str) -> None:
    cell = open_cell(url, "view")
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(cell.wait, 0, timeout=30.0)
        time.sleep(0.05)
        cell.close()
        cell.close()
        with pytest.raises(RegisterAway):
            waiter.result(5.0)
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


def test_writers_in_threads_are_linearizable(url: str) -> None:
    """Each of two handles has two users."""
    with cells(url, "view", "view") as handles:
        users = [OperationRecorder(handles[number % 2]) for number in range(4)]
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
        "etcds://a:1/x?cacert=",
        "etcds://a:1/x?cacert=/a&cacert=/b",
        "etcds://a:1/x?verify=no",
        "etcds://a:1/x#y",
        "etcd://a:1/x?cacert=/a",
    ],
    "holds a password": ["etcds://user:secret@a:1/x", "etcd://user:secret@a:1/x"],
    "a user and a password_file go together": ["etcds://user@a:1/x", "etcds://a:1/x?password_file=/p"],
    "cert and key go together": ["etcds://a:1/x?cert=/c"],
    "relative paths": ["etcds://a:1/x?cacert=relative"],
    "twice": ["etcd://a:1,a:1/job"],
}


@pytest.mark.parametrize("words", BAD_URLS)
def test_a_url_that_names_no_register_is_refused_with_what_it_must_be_and_tells_no_secret(words: str) -> None:
    for bad in BAD_URLS[words]:
        with pytest.raises(ValueError, match=words) as caught:
            open_cell(bad, "view")
        assert "secret" not in str(caught.value)


def test_a_url_of_etcd_gives_user_password_and_files() -> None:
    access = etcd_register.parse("etcds://me%40home@a:1,[::1]:2/job?cacert=/ca&cert=/c&key=/k&password_file=/p%23")
    assert (access.user, access.endpoints, access.name) == ("me@home", (("a", 1), ("::1", 2)), "job")
    assert (access.cacert, access.client_certificate, access.password_file) == ("/ca", ("/c", "/k"), "/p#")


def test_a_cell_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        open_cell("memory://job", "")


def test_a_plugin_adds_a_scheme_and_a_broken_plugin_is_left_out() -> None:
    def broken() -> Mapping[str, Callable[[str, str], Cell]]:
        raise RuntimeError("no stamps")

    offers = {"postcard": lambda url, name: open_cell(url.replace("postcard", "memory"), name)}
    whole, without = (SimpleNamespace(holdfast_registers=hookimpl(each)) for each in (lambda: offers, broken))
    with registered(whole), registered(without):
        assert {"memory", "sqlite", "postcard"} <= set(schemes())
        with cells("postcard://home", "view") as [cell]:
            assert cell.compare_and_set(0, b"wish you were here")
    assert "postcard" not in schemes()


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


def test_a_missing_server_and_one_of_another_kind_are_reported(
    etcd: EtcdCluster, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_register, "PATIENCE", 0.5)
    with tcp.serving() as other:
        monkeypatch.setattr(tcp, "PATIENCE", 1.0)
        for url in (other.replace("tcp", "etcd"), f"tcp://{etcd.endpoints[0]}"):
            with pytest.raises(RegisterAway, match="is away"):
                open_cell(f"{url}/job", "view")
    with pytest.raises(RegisterAway, match="cannot be reached"):  # a tcp register on this machine would be begun
        open_cell(f"etcd://127.0.0.1:{port}/job", "view")


def test_the_first_process_serves_a_tcp_register_while_it_has_it_open_and_warns_that_it_is_open_to_all(
    port: int, start: Callable[..., Child], caplog: pytest.LogCaptureFixture
) -> None:
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
        assert caplog.text.count("whoever can reach this port") == 1
        child = start(body)
        assert child.hear() == (1, b"first")
        first.close()
        child.tell("go")
        assert child.hear()
        assert second.read() == (2, b"second")
    child.tell("its server is gone")
    assert "does not answer" in child.hear()
    child.end()


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


def test_an_etcd_that_is_away_can_return_and_one_of_another_cluster_does_not_take_its_place(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    with EtcdCluster(1, tmp_path) as node, cells(f"{node.url}/job", "view") as [cell]:
        with cells(f"etcd://{node.endpoints[0]},{etcd.endpoints[0]}/two", "view") as [mixed]:
            assert cell.compare_and_set(0, b"first") and mixed.compare_and_set(0, b"first")
            node.kill(0)
            with pytest.raises(RegisterAway, match="belongs to another cluster"):
                mixed.read()
        with pytest.raises(RegisterAway, match="cannot be reached"):
            cell.compare_and_set(1, b"second")
        node.start(0)
        node.leader()
        assert cell.compare_and_set(1, b"second")


# An etcd with certificates, a user and a password.


CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def authority(folder: Path, name: str) -> tuple[Path, Path]:
    """The certificate and key of a new certificate authority."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    openssl("req", "-x509", *CURVE, "-keyout", key, "-out", cert, "-subj", f"/CN={name}", "-days", "2")
    return cert, key


def issued(folder: Path, name: str, by: tuple[Path, Path]) -> Certificates:
    """A certificate for 127.0.0.1, for servers and clients."""
    key, request, cert, more = (folder / f"{name}.{end}" for end in ("key", "csr", "pem", "ext"))
    more.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl("req", *CURVE, "-keyout", key, "-out", request, "-subj", f"/O={name}")
    signing = ("-CA", by[0], "-CAkey", by[1], "-CAcreateserial", "-days", "2", "-extfile", more)
    openssl("x509", "-req", "-in", request, "-out", cert, *signing)
    return Certificates(by[0], cert, key)


class Guarded:
    """A real etcd with TLS and the users root and holdfast; the key space belongs to holdfast."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        ours, theirs = authority(folder, "ours"), authority(folder, "theirs")
        self.client, self.stranger = issued(folder, "client", ours), issued(folder, "stranger", theirs)
        self.cluster = EtcdCluster(1, folder / "etcd", tls=issued(folder, "server", ours))
        self.password, self.wrong = folder / "password", folder / "wrong"
        self.password.write_text("correct horse\n")
        self.wrong.write_text("battery staple\n")

    def url(self, client: Certificates, *, ca: Path | None = None, password: Path | None = None) -> str:
        host = self.cluster.endpoints[0]
        user = "holdfast@" if password else ""
        more = f"&password_file={password}" if password else ""
        cert = f"&cert={client.cert}&key={client.key}"
        return f"etcds://{user}{host}/job?cacert={ca or self.client.ca}{cert}{more}"

    def ask(self, what: str, **said: object) -> dict[str, str]:
        """A request to etcd's own interface."""
        with requests.Session() as session:
            session.trust_env, session.verify = False, str(self.client.ca)
            session.cert = (str(self.client.cert), str(self.client.key))
            answer = session.post(f"https://{self.cluster.endpoints[0]}/v3/{what}", json=said, timeout=10)
            answer.raise_for_status()
            return dict(answer.json())

    def begin_to_ask_for_passwords(self) -> None:
        self.ask("auth/user/add", name="root", password="root")
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/user/add", name="holdfast", password="correct horse")
        self.ask("auth/role/add", name="jobs")
        everything = {"key": "AA==", "range_end": "AA==", "permType": "READWRITE"}
        self.ask("auth/role/grant", name="jobs", perm=everything)
        self.ask("auth/user/grant", user="holdfast", role="jobs")
        self.ask("auth/enable")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    server = Guarded(tmp_path_factory.mktemp("guarded"))
    with server.cluster, pytest.MonkeyPatch.context() as patched:
        patched.setattr(etcd_register, "ANSWER_SECONDS", PATIENCE)  # it takes etcd long to check a password
        server.begin_to_ask_for_passwords()
        yield server


def test_certificates_a_user_and_a_password_open_the_register(guarded: Guarded) -> None:
    """A token that has expired is replaced."""
    with cells(guarded.url(guarded.client, password=guarded.password), "view") as [cell]:
        assert cell.compare_and_set(0, b"first")
        assert cell.read() == (1, b"first")
        assert cell.wait(1, 0.2) is None
        cell._session.headers["Authorization"] = "of.before"  # type: ignore[attr-defined]
        assert cell.compare_and_set(1, b"second")


def test_what_is_wrong_is_reported(guarded: Guarded, tmp_path: Path) -> None:
    """A password, the user, an authority, a client's certificate, no TLS; files that are missing, and that are none."""
    spoilt = Certificates(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    with pytest.raises(Unauthorised, match=r"cert .*/cert cannot be read"):
        open_cell(guarded.url(spoilt, password=guarded.password), "view")
    spoilt.cert.write_text("nonsense")
    spoilt.key.write_text("nonsense")
    client, password, untrusted = guarded.client, guarded.password, "its certificate is not trusted; check cacert"
    for url, error, words in (
        (guarded.url(client, password=guarded.wrong), Unauthorised, "authentication failed"),
        (guarded.url(client), Unauthorised, "user name is empty"),
        (guarded.url(client, ca=guarded.stranger.ca, password=password), Unauthorised, untrusted),
        (guarded.url(guarded.stranger, password=password), RegisterAway, "check cert and key|cannot be reached"),
        (f"etcd://{guarded.cluster.endpoints[0]}/job", RegisterAway, None),
        (guarded.url(spoilt, password=password), RegisterAway, None),
    ):
        with pytest.raises(error, match=words):
            open_cell(url, "view")
