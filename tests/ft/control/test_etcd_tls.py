"""An etcd with certificates, a user and a password, and the error for each that is wrong."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import requests

from holdfast.ft.registers import RegisterAway, etcd, open_cell
from holdfast.ft.registers.etcd import Unauthorised, parse
from holdfast.harness.testbed.etcd import Certificates, EtcdCluster
from support.waiting import PATIENCE

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl: apt-get install openssl")

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
        self.ask("auth/user/add", name="guest", password="guest")
        self.ask("auth/role/add", name="jobs")
        everything = {"key": "AA==", "range_end": "AA==", "permType": "READWRITE"}
        self.ask("auth/role/grant", name="jobs", perm=everything)
        self.ask("auth/user/grant", user="holdfast", role="jobs")
        self.ask("auth/enable")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server = Guarded(tmp_path_factory.mktemp("guarded"))
    with server.cluster, pytest.MonkeyPatch.context() as patched:
        patched.setattr(etcd, "ANSWER_SECONDS", PATIENCE)  # to check a password takes etcd long on a busy machine
        server.begin_to_ask_for_passwords()
        yield server


def test_certificates_a_user_and_a_password_open_the_register(guarded: Guarded) -> None:
    """A token that has expired is replaced."""
    with closing(open_cell(guarded.url(guarded.client, password=guarded.password), "view")) as cell:
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


@pytest.mark.parametrize(
    "url",
    [
        "etcds://user:secret@a:1/x",
        "etcds://user@a:1/x",
        "etcds://a:1/x?password_file=/p",
        "etcds://a:1/x?cert=/c",
        "etcds://a:1/x?cacert=relative",
        "etcds://a:1/x?cacert=",
        "etcds://a:1/x?cacert=/a&cacert=/b",
        "etcds://a:1/x?verify=no",
        "etcds://a:1/x#y",
        "etcd://a:1/x?cacert=/a",
        "etcd://user:secret@a:1/x",
    ],
)
def test_a_malformed_url_is_refused_without_telling_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="etcd") as caught:
        parse(url)
    assert "secret" not in str(caught.value)


def test_a_url_gives_user_password_and_files() -> None:
    access = parse("etcds://me%40home@a:1,[::1]:2/job?cacert=/ca&cert=/c&key=/k&password_file=/p%23")
    assert (access.user, access.endpoints, access.name) == ("me@home", (("a", 1), ("::1", 2)), "job")
    assert (access.cacert, access.client_certificate, access.password_file) == ("/ca", ("/c", "/k"), "/p#")
