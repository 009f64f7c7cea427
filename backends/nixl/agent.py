"""NIXL's agent as the plane uses it: registers memory, moves blocks by a deadline, and raises holdfast's errors.

Nothing here is thread-safe: the plane holds a lock around each call.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.backends.ucx.worker import Transports
from holdfast.comms.errors import BackendUnavailable, OpTimeout, RegionGone
from holdfast.comms.system import forks
from holdfast.comms.system.cpu_wait import Wait

_LOCAL_WAIT = Wait(spins=200, yields=20, sleep_seconds=0.0001)
_REMOTE_WAIT = Wait(spins=10, yields=0, sleep_seconds=0.0001)
_SLEEP_SECONDS = 0.0001
"""Across hosts each check of a transfer, too, is followed by a sleep: it takes the lock of UCX's worker, which the
progress thread needs to move the bytes. Without the pause, reads took 1.3 times the processor time or more.
"""

_setting = threading.Lock()
_agents: weakref.WeakSet[NixlAgent] = weakref.WeakSet()


@forks.run_in_children
def _keep_all() -> None:
    """Keep all agents alive in a forked child: destroying one would spoil memory that the parent still uses.

    That includes agents that the parent has dropped and the collector has yet to find. NIXL's UCX ended the parent with
    a segmentation fault.
    """
    forks.never_destroy(list(_agents))


@dataclass(frozen=True, slots=True)
class Registered:
    """Memory registered with NIXL."""

    address: int
    nbytes: int
    descriptors: Any


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily: the only way to choose the transports of NIXL's UCX, and to silence it."""
    with _setting:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


Transfer = Any
"""A transfer between a local and a remote range, which may be posted any number of times: NIXL's handle."""


class NixlAgent:
    """An agent with NIXL's UCX backend. Raises `BackendUnavailable` if NIXL does not load.

    `local`: it moves memory only between processes of this host, by the kernel; no owner takes part, and no transfer
    outlives its call. Otherwise each agent has a thread of NIXL's that answers for it.
    """

    def __init__(self) -> None:
        over = Transports.choose(one_host=True).connecting_in_background()
        self.local, self.tls = over.local, over.tls
        self._wait = _LOCAL_WAIT if over.local else _REMOTE_WAIT
        _agents.add(self)
        self.name = secrets.token_hex(6)
        quiet = {name: os.environ.get(name, "fatal") for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL")}
        options = {} if over.local else {f"UCX_{name}": value for name, value in over.options.items()}
        with _environment({"UCX_TLS": over.tls, **options, **quiet}):
            try:
                nixl: Any = importlib.import_module("nixl._api")
            except (ImportError, OSError) as error:
                raise BackendUnavailable("nixl", f"NIXL does not load: {error}") from error
            mode = "none" if over.local else "peer"
            try:
                self._api: Any = nixl.nixl_agent(
                    self.name, nixl.nixl_agent_config(enable_prog_thread=not over.local, backends=[])
                )
                self._api.create_backend("UCX", {"ucx_error_handling_mode": mode})
            except Exception as error:
                raise BackendUnavailable(
                    "nixl", f"the UCX backend of NIXL does not start over {over.tls}: {error}"
                ) from error

    def register(self, address: int, nbytes: int) -> Registered:
        ranges = [(address, nbytes, 0, "")]
        return Registered(address, nbytes, self._api.register_memory(ranges, "DRAM"))

    def deregister(self, memory: Registered) -> None:
        self._api.deregister_memory(memory.descriptors)

    def describe(self, *memories: Registered) -> bytes:
        """The metadata with which another agent can reach these memories."""
        ranges = [(memory.address, memory.nbytes, 0, "") for memory in memories]
        descriptors = self._api.get_reg_descs(ranges, "DRAM")
        return bytes(self._api.get_partial_agent_metadata(descriptors, True, ["UCX"]))

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Load another agent's metadata. Raises `RegionGone` if it is not that of agent `name`."""
        try:
            found = self._api.add_remote_agent(metadata)
        except Exception as error:
            raise RegionGone(f"NIXL cannot reach the process that exposed this region: {error}") from error
        if found not in (name, name.encode()):
            raise RegionGone(
                f"the region is of NIXL agent {name!r}, and {found!r} answers at its address: that process is gone"
            )

    def forget(self, name: str) -> None:
        """Drop the connection to another agent."""
        try:
            self._api.remove_remote_agent(name)
        except Exception:
            pass  # NIXL has dropped it already

    def prepare(self, kind: Literal["READ", "WRITE"], here: int, there: int, nbytes: int, name: str) -> Transfer:
        """Prepare a transfer between registered ranges."""
        local = self._api.get_xfer_descs([(here, nbytes, 0)], "DRAM")
        remote = self._api.get_xfer_descs([(there, nbytes, 0)], "DRAM")
        try:
            return self._api.initialize_xfer(kind, local, remote, name)
        except Exception as error:
            raise RegionGone(f"NIXL cannot reach the process that exposed this region any more: {error}") from error

    def run(self, transfer: Transfer, deadline: float, op: str, check: Callable[[], None], memory: object) -> None:
        """Post a transfer and wait for it. Raises `RegionGone`, `OpTimeout`, what `check` raises.

        A transfer that has not ended may still be carried out: it is kept, with the `memory` that it uses.
        """
        last, failure = "PROC", None

        def ended() -> bool:
            nonlocal last, failure
            if not self.local:
                time.sleep(_SLEEP_SECONDS)
            try:
                last = self._api.check_xfer_state(transfer)
            except Exception as error:
                last, failure = "ERR", error
            return last != "PROC"

        try:
            last = self._api.transfer(transfer)
        except Exception as error:
            last, failure = "ERR", error
        if last == "PROC":
            try:
                self._wait.until(ended, check, deadline, lambda seconds: OpTimeout(op, 0, seconds))
            except (RegionGone, OpTimeout):
                self._give_up(transfer, memory)
                raise
        if last != "DONE":
            check()
            raise RegionGone("NIXL cannot reach the process that exposed this region any more") from failure

    def _give_up(self, transfer: Transfer, memory: object) -> None:
        if self.local:  # then it has failed, and UCX does not report it
            try:
                self.release(transfer)
                return
            except Exception:
                pass
        forks.never_destroy((transfer, memory))

    def release(self, transfer: Transfer) -> None:
        self._api.release_xfer_handle(transfer)
