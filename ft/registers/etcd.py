"""Parses the URL of an etcd register: endpoints, and credentials. Secrets are in files, never in the URL.

`etcd://host1:2379,host2:2379/name`: a register in an etcd cluster, which survives the loss of its leader.

With TLS it is `etcds://user@host:2379,host:2379/name?cacert=/path&cert=/path&key=/path&password_file=/path`: `cacert`
has the trusted certificates (default: the system's), `cert` and `key` are this process's, `password_file` holds the
password of `user`. Without TLS, any process that can reach etcd can read and change the register.

A cell is one key, replaced by one transaction; the version of the key is that of the cell. Reads are linearizable.
Every request goes to one endpoint after the other until one answers. If the answer to a write is lost, the write may
have been done: each carries a mark of its writer, so that the next endpoint can tell. Needs etcd 3.4 or newer (for its
JSON gateway) and `pip install 'holdfast[etcd]'`. etcd takes values of 1.5 MiB at most unless told otherwise
(--max-request-bytes).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import etcd3gw
import requests
from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError, Etcd3Exception

from holdfast.comms.errors import CorruptData
from holdfast.comms.system import forks
from holdfast.ft.registers import Cell, RegisterAway

_FILES = ("cacert", "cert", "key", "password_file")
_PLAIN = "etcd://host:2379,host:2379/name"
_SECURE = "etcds://user@host:2379,host:2379/name?cacert=/path&cert=/path&key=/path&password_file=/path"


class Unauthorised(RegisterAway):
    """etcd rejects this process's certificate, user or password, or this process rejects etcd's certificate."""

    retryable = False


@dataclass(frozen=True, slots=True)
class Access:
    """The endpoints, the prefix of all keys, and the files with certificates and password; "" for none."""

    url: str
    endpoints: tuple[tuple[str, int], ...]
    name: str
    secure: bool = False
    user: str = ""
    cacert: str = ""
    cert: str = ""
    key: str = ""
    password_file: str = ""

    @property
    def client_certificate(self) -> tuple[str, str] | None:
        """This process's certificate, as `requests` takes it."""
        return (self.cert, self.key) if self.cert else None

    def check_files(self) -> None:
        """Raise `Unauthorised` for a file that cannot be read."""
        for what in _FILES:
            path = getattr(self, what)
            if path and not os.access(path, os.R_OK):
                raise Unauthorised(self.url, f"{what} {path} cannot be read")

    def password(self) -> str:
        """The content of the password file, read anew each time. Raises `Unauthorised`."""
        try:
            return Path(self.password_file).read_text().strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise Unauthorised(self.url, f"password_file {self.password_file} cannot be read: {error}") from error


def parse(url: str) -> Access:
    """Parse an `etcd://` or `etcds://` URL; ValueError for anything else."""
    secure = url.startswith("etcds://")
    form = _SECURE if secure else _PLAIN
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ValueError(f"{_without_secrets(url)!r} is not an etcd register: write {form}") from None
    user, at, hosts = parts.netloc.rpartition("@")
    if ":" in user:
        raise ValueError(
            f"{_without_secrets(url)!r} holds a password, which other users can see in the list of processes: put it "
            "into a file, and write ?password_file=/path"
        )
    wrong = ValueError(f"{_without_secrets(url)!r} is not an etcd register: write {form}")
    options = dict(pairs)
    if parts.fragment or len(options) != len(pairs) or not options.keys() <= set(_FILES):
        raise wrong
    if (at and not user) or (not secure and (at or pairs)) or "" in options.values():
        raise wrong
    if not all(Path(path).is_absolute() for path in options.values()):
        raise ValueError(f"{url!r} names files by relative paths: write them from / on")
    if ("cert" in options) != ("key" in options):
        raise ValueError(f"{url!r}: cert and key go together")
    if bool(user) != ("password_file" in options):
        raise ValueError(f"{url!r}: a user and a password_file go together")
    return Access(url, _endpoints(hosts, wrong, url), unquote(parts.path.strip("/")), secure, unquote(user), **options)


def _endpoints(hosts: str, wrong: ValueError, url: str) -> tuple[tuple[str, int], ...]:
    endpoints = []
    for each in hosts.split(","):
        try:
            found = urlsplit(f"//{each}")
            host, port = found.hostname, found.port
        except ValueError:
            raise wrong from None
        if not host or not port:
            raise wrong
        endpoints.append((host, port))
    if len(set(endpoints)) != len(endpoints):
        raise ValueError(f"{url!r} names an endpoint twice")
    return tuple(endpoints)


def _without_secrets(url: str) -> str:
    """The URL without the password in it."""
    scheme, separator, rest = url.partition("://")
    netloc, slash, more = rest.partition("/")
    user, at, hosts = netloc.rpartition("@")
    return f"{scheme}{separator}{user.partition(':')[0]}{':...' if ':' in user else ''}{at}{hosts}{slash}{more}"


ANSWER_SECONDS = 1.0
"""How long one endpoint may take to answer before the next one is asked."""
PATIENCE = 5.0
"""How long to ask the endpoints in turn while one exists but does not answer (a leader is being elected)."""

Answer = Mapping[str, Any]
T = TypeVar("T")

_SCHEMA = b"HFE1"
_MARK_BYTES = 8
_QUIET_SECONDS = 1.0  # after which a `wait` reads again although its watch has reported nothing
_PAUSE = 0.05  # seconds between rounds over the endpoints
_TOKEN_EXPIRED = "invalid auth token"
_COMMON_NAME = "CommonName of client"
_NOT_ALLOWED = ("authentication failed", "permission denied", "user name is empty", _TOKEN_EXPIRED)
_TRANSIENT = ("no leader", "timed out", "leader changed", "unavailable", "too many requests", "stopped")


class OtherCluster(RegisterAway):
    """An endpoint belongs to another etcd cluster, or to one that was restored from an older state."""

    retryable = False


@dataclass(frozen=True, slots=True)
class _Found:
    """The content of a key: its version, first revision, the mark of its last writer, and the value."""

    version: int
    created: int
    mark: bytes
    value: bytes


class EtcdCell(Cell):
    """One cell in etcd. Keeps a connection open to each endpoint that it has asked. A forked child opens its own."""

    pushes = True

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._access = access = parse(url)
        access.check_files()
        self._key = base64.b64encode(f"holdfast/{access.name}/{name}".encode()).decode()
        forks.refuse_in_children(self, f"register {url}")
        self._closed = threading.Event()
        self._session = requests.Session()
        self._session.trust_env = False  # no proxies: these are machines of the job
        self._session.verify, self._session.cert = access.cacert or True, access.client_certificate
        self._clients = [
            etcd3gw.Etcd3Client(
                host,
                port,
                "https" if access.secure else "http",
                timeout=ANSWER_SECONDS,
                api_path="/v3/",
                session=self._session,
            )
            for host, port in access.endpoints
        ]
        self._turn = 0
        self._cluster = ""
        self._revision = self._created = 0
        self._streams: set[requests.Response] = set()
        self._streaming = threading.Lock()
        try:
            self.read()
        except BaseException:
            self.close()
            raise

    # The cell ---------------------------------------------------------------------------------------------------

    def read(self) -> tuple[int, bytes]:
        _, version, value = self._read()
        return version, value

    def _read(self) -> tuple[int, int, bytes]:
        """The revision at which the key was read, its version, and its value."""
        revision, found = self._range()
        return (revision, found.version, found.value) if found else (revision, 0, b"")

    def compare_and_set(self, expected: int, value: bytes) -> bool:
        mark = secrets.token_bytes(_MARK_BYTES)
        text = base64.b64encode(_SCHEMA + mark + value).decode()
        compare: list[dict[str, str]] = [
            {"key": self._key, "target": "VERSION", "result": "EQUAL", "version": str(expected)}
        ]
        if self._created:
            compare.append(
                {"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": str(self._created)}
            )
        write = {"compare": compare, "success": [{"request_put": {"key": self._key, "value": text}}]}
        tries = 0

        def transact(client: etcd3gw.Etcd3Client) -> Answer:
            nonlocal tries
            tries += 1
            return client.post(client.get_url("/kv/txn"), json=write)  # type: ignore[no-any-return]

        if self._ask(transact).get("succeeded"):
            return True
        if tries == 1:
            return False
        _, found = self._range()  # an earlier try may have done it, and its answer was lost
        if found is None or found.version <= expected:
            return False
        if found.version == expected + 1:
            return found.mark == mark
        raise RegisterAway(self._url, "a write's answer was lost, and others have written since: it may have been done")

    def wait(self, newer_than: int, timeout: float) -> tuple[int, bytes] | None:
        deadline = time.monotonic() + timeout
        while True:
            revision, version, value = self._read()
            if version > newer_than:
                return version, value
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._watch(revision + 1, min(left, _QUIET_SECONDS))

    def close(self) -> None:
        self._closed.set()
        with self._streaming:
            for stream in self._streams:
                _hang_up(stream)
        self._session.close()

    # Requests -----------------------------------------------------------------------------------------------------

    def _range(self) -> tuple[int, _Found | None]:
        """The revision of the answer, and the content of the key; None if it does not exist."""

        def ask(client: etcd3gw.Etcd3Client) -> Answer:
            return client.post(client.get_url("/kv/range"), json={"key": self._key})  # type: ignore[no-any-return]

        known = self._created  # before the request: another thread may see the key made while this one is answered
        answer = self._ask(ask)
        revision, pairs = int(answer["header"]["revision"]), answer.get("kvs", [])
        if not pairs:
            if known:
                raise RegisterAway(self._url, "its key was deleted while in use")
            return revision, None
        found = self._decode(pairs[0])
        if self._created not in (0, found.created):
            raise RegisterAway(self._url, "its key was deleted and made anew while in use")
        self._created = found.created
        return revision, found

    def _decode(self, pair: Answer) -> _Found:
        data = base64.b64decode(pair.get("value", ""))
        if len(data) < len(_SCHEMA) + _MARK_BYTES or data[:3] != _SCHEMA[:3]:
            raise CorruptData(f"what {self._url} holds at its key is not a register's; name another register")
        schema, mark, value = data[:4], data[4 : 4 + _MARK_BYTES], data[4 + _MARK_BYTES :]
        if schema != _SCHEMA:
            raise CorruptData(f"register {self._url} has schema {schema!r}, this version of holdfast knows {_SCHEMA!r}")
        return _Found(int(pair["version"]), int(pair["create_revision"]), mark, value)

    def _ask(self, question: Callable[[etcd3gw.Etcd3Client], Answer]) -> Answer:
        """Send a request to one endpoint after the other until one answers it."""
        deadline = time.monotonic() + PATIENCE
        problems: dict[str, str] = {}
        while True:
            hope = False
            for _ in self._clients:
                self._check_usable()
                client, floor = self._clients[self._turn], self._revision
                try:
                    self._log_in(client)
                    answer = question(client)
                except ConnectionFailedError as error:
                    if (why := _tls_problem(error)) and len(self._clients) == 1:
                        raise Unauthorised(self._url, f"{client.base_url}: {why}") from error
                    problems[client.base_url] = why or "it cannot be reached"
                    hope |= not why and "refused" not in _words(error)
                except ConnectionTimeoutError:
                    problems[client.base_url] = f"no answer within {ANSWER_SECONDS:g} s"
                    hope = True
                except (requests.RequestException, ValueError) as error:
                    problems[client.base_url] = f"it does not speak as etcd does ({type(error).__name__})"
                except Etcd3Exception as error:
                    words = _words(error)
                    if _TOKEN_EXPIRED in words and "Authorization" in self._session.headers:
                        del self._session.headers["Authorization"]
                        hope = True
                        continue
                    if _COMMON_NAME in words:
                        why = "with a user, no certificate may have a common name (CN), etcd's own neither"
                        raise Unauthorised(self._url, f"{client.base_url} refuses: {words}; {why}") from error
                    if any(each in words for each in _NOT_ALLOWED):
                        raise Unauthorised(self._url, f"{client.base_url} refuses: {words}") from error
                    if not any(each in words for each in _TRANSIENT):
                        raise RegisterAway(self._url, f"{client.base_url} refuses: {words}") from error
                    problems[client.base_url] = words
                    hope = True
                else:
                    self._check_cluster(client, answer, floor)
                    return answer
                self._turn = (self._turn + 1) % len(self._clients)
            if not hope or time.monotonic() >= deadline:
                self._check_usable()
                raise RegisterAway(self._url, "; ".join(f"{where}: {why}" for where, why in problems.items()))
            self._closed.wait(_PAUSE)

    def _log_in(self, client: etcd3gw.Etcd3Client) -> None:
        """Get a token for the user, if there is a user and this process has no token."""
        if self._access.user and "Authorization" not in self._session.headers:
            said = {"name": self._access.user, "password": self._access.password()}
            token = client.post(client.get_url("/auth/authenticate"), json=said)["token"]
            self._session.headers["Authorization"] = str(token)

    def _check_usable(self) -> None:
        if self._closed.is_set():
            raise RegisterAway(self._url, "this handle is closed")

    def _check_cluster(self, client: etcd3gw.Etcd3Client, answer: Answer, floor: int) -> None:
        """Check that all endpoints are of one cluster and that its revisions only grow. `floor` is the newest known."""
        try:
            cluster, revision = str(answer["header"]["cluster_id"]), int(answer["header"]["revision"])
        except (KeyError, TypeError, ValueError):
            raise RegisterAway(self._url, f"{client.base_url} does not speak as etcd does") from None
        if self._cluster not in ("", cluster):
            raise OtherCluster(self._url, f"{client.base_url} belongs to another cluster than the other endpoints")
        if revision < floor:
            raise OtherCluster(self._url, f"{client.base_url} went back from revision {floor} to {revision}")
        self._cluster = cluster
        self._revision = max(self._revision, revision)

    # Watches ---------------------------------------------------------------------------------------------------

    def _watch(self, revision: int, seconds: float) -> None:
        """Sleep until the key is written at `revision` or later, for at most `seconds`; shorter if a watch breaks."""
        client = self._clients[self._turn]
        body = {"create_request": {"key": self._key, "start_revision": str(revision)}}
        url = client.get_url("/watch")
        deadline = time.monotonic() + seconds
        try:
            with self._session.post(url, json=body, stream=True, timeout=(ANSWER_SECONDS, seconds)) as stream:
                with self._streaming:
                    self._streams.add(stream)
                try:
                    if not self._closed.is_set():
                        _until_event(stream, deadline)
                finally:
                    with self._streaming:
                        self._streams.discard(stream)
        except (requests.RequestException, OSError, ValueError):
            self._closed.wait(min(_PAUSE, max(0.0, deadline - time.monotonic())))


def _until_event(stream: requests.Response, deadline: float) -> None:
    """Read a watch until it reports an event. Its first line only reports its creation."""
    for chunk in stream.iter_content(chunk_size=None):
        if b'"events"' in chunk or time.monotonic() >= deadline:
            return


def _hang_up(stream: requests.Response) -> None:
    """End a stream that another thread reads."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        each = socket.socket(fileno=os.dup(stream.raw.fileno()))
        with each:
            each.shutdown(socket.SHUT_RDWR)


def _tls_problem(error: BaseException) -> str:
    """What is wrong with either side's certificate, if that is why the connection failed; "" if not."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError | requests.exceptions.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None and not any(each in _words(error) for each in ("SSL", "CERTIFICATE")):
        return ""
    words = _words(error)
    if "CERTIFICATE_VERIFY_FAILED" in words:
        return f"its certificate is not trusted; check cacert ({words})"
    return f"TLS failed; check cert and key ({words})"


def _words(error: BaseException) -> str:
    """The error message of etcd."""
    text = str(getattr(error, "detail_text", "") or error)
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return str(json.loads(text).get("message", text))
    return text
