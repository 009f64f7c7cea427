"""`meet`: resolves a rendezvous (`env://`, `tcp://`, `file://` or a store) to a `torch.distributed.Store`."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import logging
import os
import socket
import sys
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import torch.distributed as dist

from holdfast.comms import _native
from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.rendezvous import tcp
from holdfast.comms.rendezvous.meeting_store import StoreSilent
from holdfast.comms.system.files import path_of
from holdfast.comms.system.signal_safety import shared_lock

_OWN_PORT_SECONDS = 5.0
"""How long rank 0 waits for a store's answer from a server that already listens at its port."""

_FILE = "file:///path"

log = logging.getLogger("holdfast.comms")


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """A rank, the number of ranks, and the store they share.

    `key` is equal for equal places in this process. `where` names the place in messages. `file` is set if the store is
    a file, which outlives its ranks. `served`: this process serves the store. `by_rank_0`: rank 0 serves it, and it
    ends with that process. `scope` tells apart the runs that meet in one store, one after another.
    """

    rank: int
    size: int
    store: dist.Store
    key: str
    where: str
    file: Path | None = None
    served: bool = False
    by_rank_0: bool = False
    scope: str = ""


class SharedByRuns(dist.PrefixStore):
    """A store in which ranks of several runs of torchrun meet: its prefix alone says which of them belong together."""


_lock = shared_lock()
_numbers: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


def meet(rendezvous: str | dist.Store, rank: int | None, size: int | None, timeout: float) -> MeetingPlace:
    """Resolve a rendezvous: `env://`, `tcp://host:port`, `file:///path`, or a store.

    `rank` and `size` default to the environment's RANK and WORLD_SIZE. Raises ValueError for a malformed rendezvous,
    `OpTimeout` when the store's server does not answer in `timeout` seconds, `HoldfastError` for a place that cannot be
    used here.
    """
    rank, size = rank_and_size(rank, size)
    place = _place(rendezvous, rank, size, timeout)
    return place if isinstance(rendezvous, SharedByRuns) else replace(place, scope=_run_scope())


def _place(rendezvous: str | dist.Store, rank: int, size: int, timeout: float) -> MeetingPlace:
    if isinstance(rendezvous, dist.Store):
        return MeetingPlace(rank, size, rendezvous, f"store:{_number_of(rendezvous)}", type(rendezvous).__name__)
    scheme = rendezvous.partition("://")[0]
    if scheme == "env":
        host = os.environ.get("MASTER_ADDR")
        port = os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ValueError(
                "rendezvous env:// needs MASTER_ADDR and MASTER_PORT in the environment (torchrun sets them); "
                "or pass rendezvous='tcp://host:port' or 'file:///path'"
            )
        return _at_port(host, int(port), rank, size, timeout)
    if scheme == "tcp":
        parts = urlsplit(rendezvous)
        try:
            host, number = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"rendezvous {rendezvous!r}: {error}") from error
        if not host or not number or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
            raise ValueError(f"rendezvous {rendezvous!r} needs a host and a port: tcp://host:port")
        return _at_port(host, number, rank, size, timeout)
    if scheme == "file":
        return _in_file(path_of(rendezvous, "file", _FILE), rank, size, timeout)
    raise ValueError(f"rendezvous {rendezvous!r} is not env://, tcp://host:port, file:///path or a Store")


def _run_scope() -> str:
    """A key prefix for this run, from torchrun's run id and restart count: a store may outlive the run."""
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"{run}.{restart}/" if run or restart else ""


def rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """`rank` and `size`, by default RANK and WORLD_SIZE of the environment. Raises ValueError."""
    rank = _number("rank", "RANK", rank)
    size = _number("size", "WORLD_SIZE", size)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} is out of range for size {size}: ranks are 0 to size - 1")
    return rank, size


def _number_of(store: dist.Store) -> int:
    """A number for this store, unique in this process: `id` values are reused after a store is freed."""
    with _lock:
        return _numbers.setdefault(store, next(_next_number))


def _number(what: str, variable: str, given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(f"{what} is not given and {variable} is not in the environment")
    if not text.isdigit():
        raise ValueError(f"{variable}={text!r} is not a number")
    return int(text)


def _in_file(path: Path, rank: int, size: int, timeout: float) -> MeetingPlace:
    """A FileStore at `path`. Raises HoldfastError if the file cannot be opened, `Mismatch` if it is cut off."""
    try:  # a FileStore itself would retry for five minutes
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
            content = _read(file, path, timeout)
    except OSError as error:
        raise HoldfastError(
            f"the ranks cannot meet in {path}: {error.strerror}; name a file that every rank may make and write"
        ) from error
    if not is_whole(content):  # a FileStore reads on at its end for ever, with the GIL
        raise Mismatch(
            f"file {path} ends amid what a process was writing when it was killed: it is left over from an earlier "
            f"run; rm {path}, or name another file"
        )
    return MeetingPlace(rank, size, dist.FileStore(str(path), -1), f"file:{path}", f"file {path}", path)


def _read(file: BinaryIO, path: Path, timeout: float) -> bytes:
    """The content, once no FileStore is writing to the file: its lock ends with the process that writes."""
    deadline = time.monotonic() + timeout
    while (content := _native.read_unlocked(file.fileno())) is None:
        if time.monotonic() >= deadline:
            raise HoldfastError(
                f"the ranks cannot meet in {path}: another process has been writing to it for {timeout:.3g} s; "
                "end it, or name another file"
            )
        time.sleep(0.001)
    return content


def is_whole(content: bytes) -> bool:
    """Whether a FileStore's file ends with an entry: a key and a value, each behind its length (4 bytes)."""
    at = texts = 0
    while at < len(content):
        at += 4 + int.from_bytes(content[at : at + 4], sys.byteorder)
        texts += 1
    return at == len(content) and texts % 2 == 0


def _at_port(host: str, port: int, rank: int, size: int, timeout: float) -> MeetingPlace:
    """A TCPStore at host:port. Rank 0 serves it, unless torchrun's agent or a store of this process does already."""
    address = f"{host}:{port}"
    key = f"tcp:{address}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return MeetingPlace(rank, size, tcp.dial(host, port, timeout), key, address)
    if rank != 0:
        return MeetingPlace(rank, size, tcp.dial(host, port, timeout, 0), key, address, by_rank_0=True)
    try:
        store = tcp.serve(host, port, timeout, _interface(host))
        return MeetingPlace(rank, size, store, key, address, served=True, by_rank_0=True)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            hint = "; name an address of its machine" if error.errno == errno.EADDRNOTAVAIL else ""
            raise HoldfastError(f"rank 0 cannot serve the rendezvous at {address}: {error.strerror}{hint}") from error
    except dist.DistError as error:
        raise HoldfastError(f"rank 0 cannot serve the rendezvous at {address}: {error}") from error
    try:  # torch's own store, if this process has begun a group there
        return MeetingPlace(rank, size, tcp.dial(host, port, min(timeout, _OWN_PORT_SECONDS)), key, address)
    except StoreSilent as error:
        raise HoldfastError(
            f"rank 0 cannot serve the rendezvous at {address}: the port is in use, by something that is not a store of "
            "torch's; choose another port"
        ) from error


def _interface(host: str) -> str:
    """The address where rank 0 listens: `host`, or all interfaces if `host` is this machine's name and a loopback.

    Debian maps the machine's name to loopback in /etc/hosts; other machines resolve it to another address.
    """
    if host == "localhost" or host not in (socket.gethostname(), socket.getfqdn()):
        return host
    try:
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
            return host
    except (OSError, ValueError):
        return host
    log.warning(
        "%s is a loopback address on this machine, and another one elsewhere: the rendezvous listens on all "
        "interfaces; name an address of this machine to choose one",
        host,
    )
    return "0.0.0.0"
