"""A UCX context with one worker: it sends, receives, reads and writes, and must be progressed.

A worker is not thread-safe: its owner holds a lock around its calls. `ProgressThread` progresses it while no thread is
in an op: over TCP nothing else does.

Ctrl-C may raise as soon as a call has begun a request, and nobody learns its number then. So the memory of a request is
kept before the call, and until the request has ended or the worker is gone: else UCX would write to memory that others
use. For the same reason a number is forgotten before its request is freed: a second time would break UCX.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.libucp import Libucp, UcxError, library
from holdfast.comms.errors import BackendUnavailable, HoldfastError, PeerFailed, ResourceExhausted
from holdfast.comms.system import forks
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.system.local_causes import check_shared_memory, out_of_descriptors
from holdfast.comms.system.waiting import yield_cpu

ONE_HOST = "posix,cma,self"
"""Shared memory for messages, and the kernel's copies between processes for large payloads."""
MANY_HOSTS = "tcp,self"

Endpoint = Any
"""An `ucp_ep_h`."""
Begun = TypeVar("Begun", bound=tuple[Any, ...])
"""A request, and what belongs to it."""
Failed = Callable[[int, str], None]
"""failed(key, why): the connection of an endpoint made with `key` broke."""

_SHARED_MEMORY = frozenset(["posix", "sysv", "xpmem", "cma", "knem", "sm", "shm", "mm"])
_SHM_BYTES = 3 << 20
"""What must be free in /dev/shm before a worker is made: with less, UCX makes one that reaches no peer."""
_SHM_HINT = "give more (`docker run --shm-size=1g`), or set UCX_TLS=tcp,self"
_LACKING = frozenset(
    [
        libucp.ERR_NO_RESOURCE,
        libucp.ERR_NO_MEMORY,
        libucp.ERR_NO_DEVICE,
        libucp.ERR_SHMEM_SEGMENT,
        libucp.ERR_EXCEEDS_LIMIT,
    ]
)
"""The statuses with which UCX fails if this process lacks a resource."""
_HERE = {"RNDV_SCHEME": "get_zcopy", "POSIX_RX_BUFS_GROW": "300"}
"""One chunk of buffers in /dev/shm: 2.5 MB a worker, where UCX's default of 512 buffers takes 4.3 MB."""
_TCP_OPTIONS = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k", "TCP_CONN_NB": "y"}
"""Bytes that one send or receive of a socket moves: with UCX's 8 KiB, large payloads take three times as long.

And connecting in the background: else making an endpoint to a host that is cut off blocks for minutes.
"""
_CLOSE_SECONDS = 0.2
_PAUSE_MILLISECONDS = 2
_IDLE_MILLISECONDS = 500
"""The longest sleep: another part of the process may close `stop`, which then wakes nobody."""
_EAGER_SECONDS = 0.0003
TURNS = 1024
"""Calls of UCX until a thread looks at its deadline again: a worker may have something to do as long as it lives."""
_LOST = (
    "another part of this process closed descriptors that it had not opened (os.closerange?); close only your own, or "
    "do so in a process that executes a new program"
)
_log = logging.getLogger("holdfast.ucx")


@dataclass(frozen=True, slots=True)
class Transports:
    """The transports that UCX may use, as in UCX_TLS, and the options that go with them.

    `local`: shared memory alone, so no op needs progress by the target. `emulated`: TCP may be among them, over which
    UCX would only emulate the reads by which a large message arrives: see `onesided`.
    """

    tls: str
    options: Mapping[str, str]
    local: bool
    emulated: bool

    @staticmethod
    def choose(one_host: bool, loopback: bool = False) -> Transports:
        """The user's transports, if UCX_TLS is set; else a choice by whether all peers are on this host.

        `loopback`: no other host will ever connect, so TCP listens on loopback unless UCX_NET_DEVICES says otherwise.
        """
        tls = os.environ.get("UCX_TLS") or (ONE_HOST if one_host else MANY_HOSTS)
        names = set(tls.split(","))
        local = names <= _SHARED_MEMORY | {"self"}
        options = {
            name: value for name, value in (_HERE if local else _TCP_OPTIONS).items() if f"UCX_{name}" not in os.environ
        }
        if loopback and not local and "UCX_NET_DEVICES" not in os.environ:
            options["NET_DEVICES"] = "lo"
        return Transports(tls, options, local, bool(names & {"tcp", "all"}) or tls.startswith("^"))


_in_use = 0
"""The number of workers of this process."""
_inherited = False
"""Whether this process was forked from one that had workers."""


@forks.run_in_children
def _begin_child() -> None:
    global _in_use, _inherited
    _in_use, _inherited = 0, _inherited or _in_use > 0


def explain(error: UcxError, rank: int, over: Transports) -> HoldfastError:
    """The error to raise if no endpoint to `rank` can be made."""
    if error.status in _LACKING:
        return ResourceExhausted("what UCX needs", f"it to reach rank {rank}", f"and UCX says: {error}")
    if error.status == libucp.ERR_UNREACHABLE:
        reason = f"no transport of {over.tls} reaches rank {rank} from here"
        return BackendUnavailable("ucx", reason, "check UCX_TLS, UCX_NET_DEVICES and the free space of /dev/shm")
    return PeerFailed((rank,), f"UCX cannot connect to it: {error}")


def _check_devices(tls: str) -> None:
    """Refuse names of network devices that this host lacks: UCX would make a worker that reaches no peer."""
    asked = os.environ.get("UCX_NET_DEVICES", "all")
    if asked == "all" or set(tls.split(",")) <= _SHARED_MEMORY | {"self"}:
        return
    here = {entry.name for kind in ("net", "infiniband") for entry in Path(f"/sys/class/{kind}").glob("*")}
    names = {name.partition(":")[0] for name in asked.lstrip("^").split(",")}
    if not names & here and not any(set(name) & set("*?[~") for name in names):
        raise ResourceExhausted(
            "network devices", f"one of UCX_NET_DEVICES={asked}", f"and this host has {', '.join(sorted(here))}"
        )


@contextlib.contextmanager
def _reraise_local_cause() -> Iterator[None]:
    """Raise UCX's failures in this block as lack of a resource in this process, where they are."""
    try:
        yield
    except UcxError as error:
        if (cause := out_of_descriptors("a UCX worker")) is not None:
            raise cause from error
        if error.status in _LACKING:
            raise ResourceExhausted("what UCX needs", "it for a worker", f"and UCX says: {error}", _SHM_HINT) from error
        raise


def _count(more: int) -> None:
    global _in_use
    _in_use += more


def _check_fork(over: Transports) -> None:
    """Refuse TCP in a forked child: UCX's thread, which serves all workers of a process, does not exist there."""
    if not over.local and _inherited:
        raise BackendUnavailable(
            "ucx",
            "this process was forked from one that was using UCX, whose threads it lacks",
            "fork before the first use of ucx, or start processes by spawn",
        )


def _check_resources(over: Transports) -> None:
    """Raise `ResourceExhausted` if no network device is available, or not the shared memory of a worker."""
    _check_devices(over.tls)
    if over.local:
        check_shared_memory(_SHM_BYTES, "a UCX worker", _SHM_HINT)


class UcxWorker:
    """A context and its worker. `address` is what peers connect to.

    `reports_failures` says whether broken connections are reported, to `failed`: no transport over shared memory can.
    """

    def __init__(self, features: int, over: Transports, failed: Failed) -> None:
        self.lib: Libucp = library()
        self._ffi, self._call = self.lib.ffi, self.lib.call
        _check_fork(over)
        _check_resources(over)
        self.over = over
        self.reports_failures = not (_SHARED_MEMORY | {"all"}) & set(over.tls.split(","))
        self._failed = failed
        self._on_failure = self._ffi.callback("ucp_err_handler_cb_t", self._endpoint_failed)
        self._endpoints: list[Endpoint] = []
        self.event_fd: OwnedDescriptor | None = None
        self._kept: dict[int, object] = {}
        resolve = {"RESOLVE_REMOTE_EP_ID": "y"} if features & libucp.FEATURE_AM else {}
        options = {"TLS": over.tls, **over.options, **resolve}
        with _reraise_local_cause():
            self._context = self._make_context(features | libucp.FEATURE_WAKEUP, options)
        self.handle: Any = self._ffi.NULL
        _count(+1)
        try:
            with _reraise_local_cause():
                self.handle = self._make_worker()
            self.address = self._own_address()
            fd = self._ffi.new("int *")
            self.lib.check(self._call.ucp_worker_get_efd(self.handle, fd), "asking for the worker's descriptor")
            self.event_fd = OwnedDescriptor(int(fd[0]))
        except BaseException:
            self.close()
            raise
        self._progress = self._call.ucp_worker_progress
        self.plain = self._ffi.new("ucp_request_param_t *")

    def _make_context(self, features: int, options: Mapping[str, str]) -> Any:
        ffi, call = self._ffi, self._call
        config = ffi.new("ucp_config_t **")
        self.lib.check(call.ucp_config_read(ffi.NULL, ffi.NULL, config), "reading its configuration")
        try:
            for name, value in options.items():
                self.lib.check(call.ucp_config_modify(config[0], name.encode(), value.encode()), f"setting {name}")
            params = ffi.new("ucp_params_t *", {"field_mask": 1, "features": features})
            context = ffi.new("ucp_context_h *")
            status = call.ucp_init_version(*libucp.API, params, config[0], context)
            self.lib.check(status, f"opening the transports {self.over.tls}")
        finally:
            call.ucp_config_release(config[0])
        return context[0]

    def _make_worker(self) -> Any:
        params = self._ffi.new("ucp_worker_params_t *")
        params.field_mask = 1 << 0 | 1 << 5
        params.thread_mode = libucp.THREADS_SERIALIZED
        params.flags = libucp.WORKER_IGNORE_REQUEST_LEAK
        worker = self._ffi.new("ucp_worker_h *")
        self.lib.check(self._call.ucp_worker_create(self._context, params, worker), "making a worker")
        return worker[0]

    def _own_address(self) -> bytes:
        address, length = self._ffi.new("void **"), self._ffi.new("size_t *")
        status = self._call.ucp_worker_get_address(self.handle, address, length)
        self.lib.check(status, "asking for the worker's address")
        try:
            return bytes(self._ffi.buffer(address[0], length[0]))
        finally:
            self._call.ucp_worker_release_address(self.handle, address[0])

    def connect(self, address: bytes, key: int) -> Endpoint:
        """An endpoint to the worker at `address`. Raises `UcxError`; a broken `address` may crash the process."""
        ffi = self._ffi
        kept = ffi.from_buffer(address)
        params = ffi.new("ucp_ep_params_t *")
        params.field_mask, params.address = 1 << 0, kept
        if self.reports_failures:
            params.field_mask |= 1 << 1 | 1 << 2
            params.err_mode = 1
            params.err_handler.cb = self._on_failure
            params.err_handler.arg = ffi.cast("void *", key)
        endpoint = ffi.new("ucp_ep_h *")
        self.lib.check(self._call.ucp_ep_create(self.handle, params, endpoint), "connecting to a peer")
        self._endpoints.append(endpoint[0])
        return endpoint[0]

    def _endpoint_failed(self, key: Any, _endpoint: Any, status: int) -> None:
        self._failed(int(self._ffi.cast("intptr_t", key)), self.lib.text(status))

    @property
    def lost_descriptors(self) -> bool:
        """Whether another part of this process has closed UCX's descriptors: then no call of UCX is safe."""
        return self.event_fd is not None and not self.event_fd.ours

    def check_descriptors(self) -> None:
        """Raise if UCX has lost its descriptors."""
        if self.lost_descriptors:
            raise HoldfastError(f"ucx cannot go on: {_LOST}")

    def progress(self) -> int:
        """Progress the worker; 0 if there was nothing to do."""
        return int(self._progress(self.handle))

    def drain(self, turns: int = TURNS) -> bool:
        """Progress until there is nothing to do, for at most so many calls; whether there was something."""
        progress, handle = self._progress, self.handle
        for turn in range(turns):
            if not progress(handle):
                return turn > 0
        return True

    def arm(self) -> bool:
        """True if there is nothing to do; `event_fd` becomes readable when there is."""
        status = self._call.ucp_worker_arm(self.handle)
        if status == libucp.ERR_BUSY:
            return False
        self.lib.check(status, "going to sleep")
        return True

    def status(self, request: int) -> int:
        """The status of a request; frees it once that is not IN_PROGRESS."""
        if request <= 0:
            return request
        status = int(self._call.ucp_request_check_status(request))
        if status != libucp.IN_PROGRESS:
            self._call.ucp_request_free(request)
        return status

    def take_ended(self, begun: list[Begun]) -> list[tuple[Begun, int]]:
        """Take those whose request has ended out of `begun`, and free it; each with its status."""
        ended = []
        for each in list(begun):
            status = int(self._call.ucp_request_check_status(each[0]))
            if status != libucp.IN_PROGRESS:
                ended.append((each, status))
                begun.remove(each)
                self._call.ucp_request_free(each[0])
        return ended

    def finish(self, request: int, seconds: float) -> bool:
        """Progress until `request` is done, for at most `seconds`; free it either way. False if it is under way."""
        if request <= 0:
            return True
        limit = time.monotonic() + seconds
        while self._call.ucp_request_check_status(request) == libucp.IN_PROGRESS:
            if time.monotonic() > limit:
                self.drain()
                break
            self.progress()
        done = bool(self._call.ucp_request_check_status(request) != libucp.IN_PROGRESS)
        self._call.ucp_request_free(request)
        return done

    def flush(self, endpoints: Iterable[Endpoint], seconds: float) -> None:
        """Wait until everything sent over these endpoints has left this process, for at most `seconds`."""
        limit = time.monotonic() + seconds
        for request in [self._call.ucp_ep_flush_nbx(endpoint, self.plain) for endpoint in endpoints]:
            self.finish(request, limit - time.monotonic())

    def keep(self, memory: object) -> None:
        """Keep memory that UCX may access until `release`, or until it is destroyed with this worker."""
        self._kept[id(memory)] = memory

    def release(self, memory: object) -> None:
        """Keep memory no longer: UCX has ended what it was for."""
        self._kept.pop(id(memory), None)

    def give_up(self, request: int, memory: object) -> None:
        """Stop waiting for a request, which may still be carried out and use `memory`."""
        self.keep(memory)
        self._call.ucp_request_free(request)

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close an endpoint, whatever state it is in."""
        self._endpoints.remove(endpoint)
        params = self._ffi.new(
            "ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_FLAGS, "flags": libucp.CLOSE_FORCE}
        )
        self.finish(self._call.ucp_ep_close_nbx(endpoint, params), _CLOSE_SECONDS)

    def close(self) -> None:
        """Release everything; requests under way end here. Does not wait for peers."""
        if self.handle and self.lost_descriptors:
            _log.warning("a UCX worker is left behind: %s", _LOST)  # UCX would end the process
            self.handle = self._context = self._ffi.NULL
            _count(-1)
        if self.handle:
            if self.reports_failures:
                for endpoint in list(self._endpoints):
                    self.disconnect(endpoint)
            self._endpoints.clear()
            self._call.ucp_worker_destroy(self.handle)
            self.handle = self._ffi.NULL
        if self._context:
            self._call.ucp_cleanup(self._context)
            _count(-1)
            self._context = self._ffi.NULL


class ProgressThread:
    """Progresses `worker` under `lock` whenever there is work and the lock is free. Asleep otherwise.

    An `eager` one stays awake for a third of a millisecond after work: a rank that answers a request then gets the next
    one without a wake-up.
    """

    def __init__(self, worker: UcxWorker, lock: threading.RLock, eager: bool = False) -> None:
        self._worker, self._lock, self._eager = worker, lock, eager
        self._stop, self._stopping = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC)), False
        self._events = select.poll()
        self._events.register(self._stop, select.POLLIN)
        assert worker.event_fd is not None
        self._events.register(worker.event_fd, select.POLLIN)
        self._pause = select.poll()
        self._pause.register(self._stop, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="holdfast-ucx-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping and not self._worker.lost_descriptors:
            if self._work():
                self._events.poll(_IDLE_MILLISECONDS)
            else:
                self._pause.poll(_PAUSE_MILLISECONDS)

    def _work(self) -> bool:
        """True if no work is left; False if the worker is in use, or this thread must end."""
        lock = self._lock
        until = 0.0
        while not self._stopping:
            if not lock.acquire(blocking=False):
                return False
            try:
                moved = self._worker.drain()
                if moved and self._eager:
                    until = time.monotonic() + _EAGER_SECONDS
                elif (not until or time.monotonic() > until) and self._worker.arm():
                    return True
            finally:
                lock.release()
            if until:
                yield_cpu()
        return False

    def close(self) -> None:
        self._stopping = True
        self._stop.wake()
        self._thread.join()
        self._stop.close()
