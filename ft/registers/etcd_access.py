"""Parses the URL of an etcd register: endpoints, and credentials. Secrets are in files, never in the URL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.ft.registers.cell import RegisterAway

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
