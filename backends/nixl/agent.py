"""NIXL's agent as the plane uses it: registers memory, reads that of others, and raises holdfast's errors.

Nothing here is thread-safe: the plane holds a lock around each call.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.backends.ucx.worker import Transports
from holdfast.comms.errors import BackendUnavailable, OpTimeout, RegionGone
from holdfast.comms.system import forks
from holdfast.comms.system.cpu_wait import Wait
from holdfast.comms.system.environment import set_meanwhile

_FIRST_SECONDS, _SLEEP_SECONDS = 0.00001, 0.0001
"""Each check of a transfer follows a sleep: it takes the lock of UCX's worker, which the progress thread needs.

Without the pause, reads took 1.3 times the processor time or more. The first ten are short: a small read takes 0.1 ms.
"""
_FIRST = 10
_WAIT = Wait(spins=10, yields=0, sleep_seconds=_SLEEP_SECONDS)

_UNREACHABLE = "NIXL cannot reach the process that exposed this region any more"

_agents: weakref.WeakSet[NixlAgent] = weakref.WeakSet()


@forks.run_in_children
def _keep_all() -> None:
    """Keep all agents alive in a forked child: destroying one would spoil memory that the parent still uses.

    That includes agents that the parent has dropped and the collector has yet to find. NIXL's UCX ended the parent with
    a segmentation fault.
    """
    forks.never_destroy(list(_agents))


def _settings(over: Transports) -> dict[str, str]:
    """The variables that choose the transports of NIXL's UCX, and silence it."""
    quiet = {name: os.environ.get(name, "fatal") for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL")}
    return {"UCX_TLS": over.tls, **{f"UCX_{name}": value for name, value in over.options.items()}, **quiet}


class NixlAgent:
    """An agent with NIXL's UCX backend, and a thread of NIXL's that answers for it.

    Raises `BackendUnavailable` if NIXL does not load.
    """

    def __init__(self, over: Transports) -> None:
        _agents.add(self)
        self.name = secrets.token_hex(6)
        with set_meanwhile(partial(_settings, over)):
            try:
                nixl: Any = importlib.import_module("nixl._api")
            except (ImportError, OSError) as error:
                raise BackendUnavailable("nixl", f"NIXL does not load: {error}") from error
            try:
                self._api: Any = nixl.nixl_agent(
                    self.name, nixl.nixl_agent_config(enable_prog_thread=True, backends=[])
                )
                self._api.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            except Exception as error:
                raise BackendUnavailable(
                    "nixl", f"the UCX backend of NIXL does not start over {over.tls}: {error}"
                ) from error

    def register(self, address: int, nbytes: int) -> Any:
        return self._api.register_memory([(address, nbytes, 0, "")], "DRAM")

    def deregister(self, registered: Any) -> None:
        self._api.deregister_memory(registered)

    def describe(self, *memories: tuple[int, int]) -> bytes:
        """The metadata with which another agent can reach these registered memories (address, size)."""
        descriptors = self._api.get_reg_descs([(*memory, 0, "") for memory in memories], "DRAM")
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
        """Drop the connection to another agent, unless NIXL has dropped it already."""
        with suppress(Exception):
            self._api.remove_remote_agent(name)

    def prepare(self, name: str, there: int, here: int, nbytes: int) -> Any:
        """Prepare to copy registered memory of agent `name` here, any number of times. Raises `RegionGone`."""
        local, remote = (self._api.get_xfer_descs([(address, nbytes, 0)], "DRAM") for address in (here, there))
        try:
            return self._api.initialize_xfer("READ", local, remote, name)
        except Exception as error:
            raise RegionGone(_UNREACHABLE) from error

    def run(self, transfer: Any, deadline: float, check: Callable[[], None], memory: object) -> None:
        """Copy what was prepared. Raises `RegionGone`, `OpTimeout`, and what `check` does.

        A transfer that has not ended may still be carried out: it is kept, with the `memory` that it writes to.
        """
        api, state, failure, checks = self._api, "PROC", None, 0

        def ended() -> bool:
            nonlocal state, failure, checks
            time.sleep(_FIRST_SECONDS if checks < _FIRST else _SLEEP_SECONDS)
            checks += 1
            try:
                state = api.check_xfer_state(transfer)
            except Exception as error:
                state, failure = "ERR", error
            return state != "PROC"

        try:
            state = api.transfer(transfer)
        except Exception as error:
            state, failure = "ERR", error
        if state == "PROC":
            try:
                _WAIT.until(ended, check, deadline, lambda seconds: OpTimeout("memory read", 0, seconds))
            except (RegionGone, OpTimeout):
                forks.never_destroy((transfer, memory))
                raise
        if state != "DONE":
            check()
            raise RegionGone(_UNREACHABLE) from failure
