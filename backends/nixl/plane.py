"""The memory plane of NIXL: reads memory of a process on another host where it lies.

On one host (the default) it is that of the host. With UCX_TLS set to transports that cross hosts, for example
"tcp,self", NIXL reads, also between processes of one host: a thread of its own answers for the owner, which may be busy
but not stopped. It reads the owner's `region_table` like any other memory: a reader that finds the region's generation
there after its copy has copied from that very region. Bytes pass through memory of the plane, so those of a read that
timed out never reach the user's.

NIXL has no atomics with which the owner's `close` could wait for a writer on another host: writing there is
`Unsupported`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import secrets
import threading
import time
import weakref
import zlib
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from msgspec.structs import asdict

from holdfast.backends.common.host_plane import BlockCopy, Withdraw
from holdfast.backends.common.region_table import TableAddress, forged, open_table
from holdfast.backends.ucx.memory_plane import REMEMBERED, NetworkPlane, RemoteAddress
from holdfast.backends.ucx.worker import Transports
from holdfast.comms.errors import BackendUnavailable, OpTimeout, RegionGone
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided.shared_pages import HeldPages
from holdfast.comms.system import forks
from holdfast.comms.system.environment import set_meanwhile
from holdfast.comms.system.waiting import Wait
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.transport.liveness import RegionOwner, region_closed

BLOCK_BYTES = 4 << 20
_WORD = 8
"""Bytes of a generation, before those of a block, in the memory through which they pass."""
_MOST_METADATA_BYTES = 1 << 16
_FIRST_SECONDS, _SLEEP_SECONDS = 0.00001, 0.0001
"""Each check of a transfer follows a sleep: it takes the lock of UCX's worker, which the progress thread needs.

Without the pause, reads took 1.3 times the processor time or more. The first ten are short: a small read takes 0.1 ms.
"""
_FIRST = 10
_WAIT = Wait(spins=10, yields=0, sleep_seconds=_SLEEP_SECONDS)

_UNREACHABLE = "NIXL cannot reach the process that exposed this region any more"

_agents: weakref.WeakSet[Any] = weakref.WeakSet()
"""NIXL's own agents. One may outlive its plane: until the collector runs, or in the traceback of an error."""
_forked = False
"""Whether this process was forked beside an agent of its parent: UCX waits for its thread, which is missing here."""


@forks.run_in_children
def _keep_all() -> None:
    """Keep all agents alive in a forked child: destroying one would spoil memory that the parent still uses.

    That includes agents that the parent has dropped and the collector has yet to find. A child that destroyed one took
    its sockets out of the set of events that both processes share, and NIXL's UCX aborted the child, and later the
    parent.
    """
    global _forked
    kept = list(_agents)
    _forked = _forked or bool(kept)
    forks.never_destroy(kept)


def _settings(over: Transports) -> dict[str, str]:
    """The variables that choose the transports of NIXL's UCX, and silence it."""
    quiet = {name: os.environ.get(name, "fatal") for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL")}
    return {"UCX_TLS": over.tls, **{f"UCX_{name}": value for name, value in over.options.items()}, **quiet}


class NixlAddress(RemoteAddress, frozen=True, array_like=True):
    """The address of a region, in under 512 bytes, with the place of its memory.

    `metadata` is NIXL's, of the agent `peer` with these two memories; it compresses well. "" on one host.
    """

    start: int
    metadata: bytes

    def unpacked(self) -> bytes:
        """The metadata as NIXL takes it. Raises `CorruptData`."""
        unpacker = zlib.decompressobj()
        try:
            metadata = unpacker.decompress(self.metadata, _MOST_METADATA_BYTES)
        except zlib.error as error:
            raise forged(error) from error
        if not unpacker.eof:
            raise forged("what describes its agent is too long")
        return metadata


class _RemoteRegion(RegionOwner):
    """A region of another process, and whether that lives."""

    def __init__(self, address: NixlAddress) -> None:
        super().__init__(address.owner)
        self.address = address
        self.transfer: Any = None
        """Reads the generation in its row. NIXL takes as long to prepare a transfer as to carry it out."""

    def close(self) -> None:
        self.transfer = None  # while NIXL still knows the other agent
        super().close()

    def look(self) -> None:
        """Raise `RegionGone` if the process or its table is gone: a transfer to missing memory never ends."""
        self.check()
        if self.here:
            with open_table("nixl", self.address):
                pass


class NixlAgent:
    """An agent with NIXL's UCX backend, and a thread of NIXL's that answers for it.

    Raises `BackendUnavailable` if NIXL does not load, or in a process that was forked beside an agent.
    """

    def __init__(self, over: Transports) -> None:
        if _forked:
            hint = "fork before NIXL is used, or close its planes first, or start a new interpreter"
            raise BackendUnavailable("nixl", "this process was forked from one that was using NIXL", hint)
        self.name, self._over, self.lock = secrets.token_hex(6), over, threading.RLock()
        self._registered: list[Any] = []
        self._stage: torch.Tensor | None = None
        self._found: dict[Handle, _RemoteRegion] = {}
        with set_meanwhile(partial(_settings, over)):
            try:
                nixl: Any = importlib.import_module("nixl._api")
            except (ImportError, OSError) as error:
                raise BackendUnavailable("nixl", f"NIXL does not load: {error}") from error
            try:
                settings = nixl.nixl_agent_config(enable_prog_thread=True, backends=[])
                self._api: Any = nixl.nixl_agent(self.name, settings)
                _agents.add(self._api.agent)
                self._api.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            except Exception as error:
                reason = f"the UCX backend of NIXL does not start over {over.tls}: {error}"
                raise BackendUnavailable("nixl", reason) from error

    def register(self, address: int, nbytes: int) -> Any:
        return self._api.register_memory([(address, nbytes, 0, "")], "DRAM")

    def offer(self, table: tuple[int, int], memory: tuple[int, int]) -> tuple[bytes, Withdraw]:
        """Register memory (address, size), and the table of this process.

        Returns the compressed metadata with which other agents reach both, and what to call when the region is closed.
        """
        with self.lock:
            if not self._registered:
                self._registered.append(self.register(*table))
            memories = [table, memory] if memory[1] else [table]
            registered = self.register(*memory) if memory[1] else None
            descriptors = self._api.get_reg_descs([(*each, 0, "") for each in memories], "DRAM")
            metadata = zlib.compress(self._api.get_partial_agent_metadata(descriptors, True, ["UCX"]), 9)

        def withdraw() -> None:
            with self.lock:
                if self._api is not None:
                    self._api.deregister_memory(registered)

        return metadata, withdraw if registered is not None else lambda: None

    def move(self, block: BlockCopy) -> None:
        """Read a block, and then its region's generation."""
        region = self._found.get(block.handle) or self._find(block.handle)
        try:
            region.look()
            self._read(region, block)
        except (RegionGone, OpTimeout):
            self._forget(region)
            raise

    def _read(self, region: _RemoteRegion, block: BlockCopy) -> None:
        address = region.address
        if self._stage is None:
            self._stage = torch.empty(_WORD + BLOCK_BYTES, dtype=torch.uint8, device="cpu")
            self._registered.append(self.register(self._stage.data_ptr(), self._stage.nbytes))
        word = self._stage.data_ptr()
        try:
            if block.nbytes:
                self._run(
                    self._prepare(address, address.start + block.offset, word + _WORD, block.nbytes), region, block
                )
            if region.transfer is None:
                region.transfer = self._prepare(address, address.row, word, _WORD)
            self._run(region.transfer, region, block)
        except BaseException:  # Ctrl-C, too
            self._stage = None  # a transfer may still write to it
            for known in self._found.values():
                known.transfer = None
            raise
        if ctypes.c_uint64.from_address(word).value != address.generation:
            raise region_closed(region.pid)
        ctypes.memmove(block.address, word + _WORD, block.nbytes)

    def _prepare(self, address: NixlAddress, there: int, here: int, nbytes: int) -> Any:
        """Prepare to copy registered memory of a region's owner here, any number of times. Raises `RegionGone`."""
        local, remote = (self._api.get_xfer_descs([(at, nbytes, 0)], "DRAM") for at in (here, there))
        try:
            return self._api.initialize_xfer("READ", local, remote, address.peer.decode())
        except Exception as error:
            raise RegionGone(_UNREACHABLE) from error.with_traceback(None)

    def _run(self, transfer: Any, region: _RemoteRegion, block: BlockCopy) -> None:
        """Copy what was prepared, to the stage. Raises `RegionGone`, `OpTimeout`.

        A transfer that has not ended may still be carried out: it is kept, with the memory that it writes to.
        """
        state, failure, checks = "PROC", None, 0

        def step(call: Any) -> bool:
            """Whether the transfer has ended."""
            nonlocal state, failure
            try:
                state = call(transfer)
            except Exception as error:
                state, failure = "ERR", error.with_traceback(None)  # it would keep the agent
            return state != "PROC"

        def ended() -> bool:
            nonlocal checks
            time.sleep(_FIRST_SECONDS if checks < _FIRST else _SLEEP_SECONDS)
            checks += 1
            return step(self._api.check_xfer_state)

        try:
            if not step(self._api.transfer):
                _WAIT.until(ended, region.look, block.deadline, lambda seconds: OpTimeout("memory read", 0, seconds))
        except BaseException:
            forks.never_destroy((transfer, self._stage))
            raise
        if state != "DONE":
            region.look()
            raise RegionGone(_UNREACHABLE) from failure

    def _find(self, handle: Handle) -> _RemoteRegion:
        address = NixlAddress.decode(handle.address)
        address.check_reachable(handle, self._over)
        metadata = address.unpacked()
        if len(self._found) >= REMEMBERED:
            for other in list(self._found.values()):
                self._forget(other)
        region = _RemoteRegion(address)
        try:
            if address.peer != self.name.encode():
                self._add_peer(metadata, address.peer.decode(errors="replace"))
        except BaseException:
            region.close()
            raise
        self._found[handle] = region
        return region

    def _add_peer(self, metadata: bytes, name: str) -> None:
        """Load another agent's metadata. Raises `RegionGone` if it is not that of agent `name`."""
        try:
            found = self._api.add_remote_agent(metadata)
        except Exception as error:
            why = f"NIXL cannot reach the process that exposed this region: {error}"
            raise RegionGone(why) from error.with_traceback(None)
        if found not in (name, name.encode()):
            raise RegionGone(
                f"the region is of NIXL agent {name!r}, and {found!r} answers at its address: that process is gone"
            )

    def _forget(self, region: _RemoteRegion) -> None:
        """Drop the connection to a region's owner, unless NIXL has dropped it already, and its cached regions."""
        peer = region.address.peer
        for handle, known in self._found.copy().items():
            if known.address.peer == peer:
                del self._found[handle]
                known.close()
        if peer != self.name.encode():
            with suppress(Exception):
                self._api.remove_remote_agent(peer.decode())

    def close(self) -> None:
        """End the agent and its thread, which a later fork would lack."""
        with self.lock:
            for region in list(self._found.values()):
                self._forget(region)
            self._stage = None
            while self._registered:
                self._api.deregister_memory(self._registered.pop())
            left = weakref.ref(self._api.agent) if self._api is not None else lambda: None
            self._api = None
            if left() is not None:  # the traceback of an error refers to it, in a circle
                gc.collect()


class NixlPlane(NetworkPlane):
    """See the module."""

    name = "nixl"
    beyond_host: ClassVar[str] = (
        "to read, set UCX_TLS=tcp,self (or what your network has) for both processes; to write, let its owner read, or "
        "use ucx"
    )
    address = NixlAddress
    access = NixlAgent
    block_bytes = BLOCK_BYTES
    writes = False

    def _offer(self, place: TableAddress, memory: ExposedMemory, writable: bool) -> tuple[bytes, Withdraw]:
        withdraw: Withdraw = lambda: None  # noqa: E731
        peer, metadata = b"", b""
        if not self._over.local:
            agent: NixlAgent = self._access()
            peer = agent.name.encode()
            metadata, deregister = agent.offer(self._own_table().memory, (memory.address, memory.nbytes))
            pages = HeldPages(memory.held)  # the network knows these, not the address

            def withdraw_both() -> None:
                deregister()
                pages.release()

            withdraw = withdraw_both
        address = NixlAddress(**asdict(place), nbytes=memory.nbytes, peer=peer, start=memory.address, metadata=metadata)
        return address.encode(), withdraw
