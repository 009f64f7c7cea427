"""Serves torch's TCPStore on one interface only, and connects to one within a time limit."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.comms.errors import HoldfastError
from holdfast.comms.rendezvous.meeting_store import StoreSilent
from holdfast.comms.system import forks
from holdfast.comms.system.environment import own_address
from holdfast.comms.system.signal_safety import shared_lock
from holdfast.comms.system.waiting import run_interruptible
from holdfast.comms.transport.base import Peer

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024

_END_SECONDS = 0.5
"""How long to wait for an abandoned call: if it returned during interpreter exit, the process would abort."""

_ERRORS = 2
"""torch's level of a log that has errors but no warnings."""

_lock = shared_lock()
_served: weakref.WeakValueDictionary[tuple[str, int], dist.TCPStore] = weakref.WeakValueDictionary()


@forks.run_in_children
def _begin_child() -> None:
    """Forget the parent's served stores: their threads do not exist in a forked child."""
    for store in _served.values():
        forks.never_destroy(store)
    _served.clear()


def serve(host: str, port: int, timeout: float, interface: str | None = None) -> dist.TCPStore:
    """Serve a store at one interface (default: `host`); return the existing one while it is still referenced.

    A group that torch makes in this process at the same port shares the server. Port 0 is a free port, the same for all
    users in this process. Raises OSError if `host` is not an address of this machine, or the port is in use.
    """
    place = (host, port)
    with _lock:
        _stop_reverse_lookups()
        store = _served.get(place)
        if store is None:
            listener = _listen(interface or host, port)
            store = _served[place] = dist.TCPStore(
                host,
                listener.getsockname()[1],
                is_master=True,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        return store


def address_for(peers: Sequence[Peer]) -> str:
    """Where `peers` reach this process: loopback on one host, else what HOLDFAST_HOST or HOLDFAST_INTERFACE says.

    Without that it is what this host's name stands for.
    """
    if len({peer.host for peer in peers}) <= 1:
        return LOOPBACK
    try:
        return own_address() or socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise HoldfastError(
            f"this host's name has no address ({error}), and the other ranks are on other hosts; set "
            "HOLDFAST_INTERFACE to an address that they reach"
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    """Listen at the first address of `host` that can be bound."""
    problem: OSError | None = None
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            problem = problem or error
    raise problem or OSError(f"{host} has no address")


def dial(
    host: str,
    port: int,
    timeout: float,
    serving_rank: int | None = None,
    check_abort: Callable[[], None] = lambda: None,
    answer_seconds: float | None = None,
) -> dist.TCPStore:
    """Connect a client to the store at host:port, which `serving_rank` serves.

    Raises `StoreSilent`, which names that rank, and what `check_abort` raises meanwhile. torch limits only the connect,
    and waits for the first answer forever; here that wait ends, too. With `answer_seconds`, each later call raises
    torch's error after so long without an answer. The client must not be used after that: it would take a late answer
    for the answer to its next request.
    """
    with _lock:
        _stop_reverse_lookups()
    patience = max(timeout, answer_seconds or 0.0) + 0.25  # if no process listens, torch gives up first
    began, ended = time.monotonic(), threading.Event()
    missing = () if serving_rank is None else (serving_rank,)

    def connect() -> dist.TCPStore:
        limit = timedelta(seconds=max(timeout, 0.001))
        try:
            return dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        finally:
            ended.set()

    def check() -> None:
        check_abort()
        waited = time.monotonic() - began
        if waited >= patience:
            raise StoreSilent(f"{host}:{port}", waited, missing)

    with contextlib.ExitStack() as copies:
        before = _sockets_to(port, copies)
        try:
            store = run_interruptible(connect, check, every=0.02, delays_exit=False)
        except dist.DistError as error:
            raise StoreSilent(f"{host}:{port}", time.monotonic() - began, missing) from error
        except BaseException:
            for inode, each in _sockets_to(port, copies).items():
                if inode not in before:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)  # ends the abandoned call
            ended.wait(_END_SECONDS)
            raise
        if answer_seconds is not None:
            limit = struct.pack("ll", int(answer_seconds), 0)
            for inode, each in _sockets_to(port, copies).items():
                if inode not in before:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return store


@functools.cache
def _stop_reverse_lookups() -> None:
    """Let torch log addresses instead of names in this process.

    To log them, torch asks for the name of each address that it connects to or accepts. A name server that loses a
    packet delays that by 5 s, and the thread that serves the store is then silent to all. torch stops asking once a
    lookup has failed, and this one fails: it is made in a thread that asks no name server.
    """
    libc = ctypes.CDLL(None)
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    try:
        level = ctypes.c_int.in_dll(libc10, "FLAGS_caffe2_log_level")
    except ValueError:
        level = ctypes.c_int()  # a torch that was built with glog warns once

    def connect() -> None:
        libc.__res_init()
        libc.__res_state()[1] = 0  # `retry`: how often each name server is asked
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    before, level.value = level.value, max(level.value, _ERRORS)  # torch warns that the lookup failed
    try:
        run_interruptible(connect, lambda: None)
    finally:
        level.value = before


def _sockets_to(port: int, copies: contextlib.ExitStack) -> dict[int, socket.socket]:
    """Duplicate this process's sockets that are connected to any host's `port`, by inode, until `copies` ends."""
    found: dict[int, socket.socket] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with contextlib.ExitStack() as unless_kept:  # a copy that stays open would keep the other end waiting
                each = unless_kept.enter_context(socket.socket(fileno=os.dup(int(entry.name))))
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername()[1] == port:
                    found[os.fstat(each.fileno()).st_ino] = each
                    copies.enter_context(unless_kept.pop_all())
    return found
