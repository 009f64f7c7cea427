"""The process side of a store: answers its clients' calls in a thread of its own, and owns the memory.

The process that initialises a store runs it, and the store ends with that process. Clients write and read the memory
themselves; the server only says where.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.comms.errors import CorruptData, HoldfastError, again
from holdfast.comms.memory_plane import Handle, memory
from holdfast.comms.system import forks
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone
from holdfast.ft.control.rpc import AsyncRpcServer, Handler
from holdfast.store.torchstore.discovery.announcement import OpenAnnouncement
from holdfast.store.torchstore.service.directory import Directory
from holdfast.store.torchstore.service.memory import StoreMemory
from holdfast.store.torchstore.service.messages import (
    Allocate,
    Allocated,
    Commit,
    Delete,
    Description,
    ListKeys,
    Locate,
    Located,
    Release,
    decode,
    encode,
)
from holdfast.store.torchstore.service.records import Content, Location, StoredBlock, blocks_of, check_content

JOB = "torchstore"
SERVER_NAME = "the store"
FRAME_BYTES = 256 << 20
START_SECONDS = 10.0

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class _Claim:
    """Extents that a client fills (a ticket) or reads (a lease)."""

    owner: Peer
    locations: tuple[Location, ...]
    filling: bool


class StoreService:
    """The calls of a store. All run in one thread."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self._plane = memory(description.plane)
        self._memory = StoreMemory(self._plane)
        self._directory = Directory()
        self._claims: dict[int, _Claim] = {}
        self._last_claim = 0

    async def allocate(self, request: Allocate) -> Allocated:
        if not request.sizes or min(request.sizes) <= 0:
            raise CorruptData(f"extents of {request.sizes} bytes")
        self._drop_claims_of_the_dead()
        while (taken := self._memory.take(request.sizes)) is None:
            self._memory.add(await asyncio.to_thread(self._memory.allocate, request.sizes))
        locations = tuple(taken)
        return Allocated(self._claim(request.owner, locations, True), locations, self._handles(locations))

    def commit(self, request: Commit) -> None:
        claim = self._claims.get(request.ticket)
        if request.ticket and (claim is None or not claim.filling):
            raise CorruptData(f"there is no ticket {request.ticket}")
        for content in request.contents.values():
            check_content(content)
        blocks = [block for content in request.contents.values() for block in blocks_of(content)]
        self._check_places(blocks, claim)
        dropped = self._directory.put(request.volume, request.contents)
        self._memory.use(_places(blocks))
        self._memory.release(_places(dropped))
        if claim is not None:
            self.release(Release(request.ticket))

    def locate(self, request: Locate) -> Located:
        contents = self._directory.find(request.keys)
        locations = tuple(_places(block for each in contents.values() for block in _all_blocks(each)))
        self._memory.use(locations)
        lease = self._claim(request.owner, locations, False) if locations else 0
        return Located(lease, contents, self._handles(locations))

    def release(self, request: Release) -> None:
        claim = self._claims.pop(request.number, None)
        if claim is not None:
            self._memory.release(claim.locations)

    def delete(self, request: Delete) -> None:
        if not request.lenient:
            self._directory.find(request.keys)
        self._memory.release(_places(self._directory.delete(request.keys)))

    def keys(self, request: ListKeys) -> list[str]:
        return self._directory.keys(request.prefix)

    def has(self, key: str) -> bool:
        return self._directory.has(key)

    def close(self) -> None:
        self._memory.close()
        self._plane.close()

    def _check_places(self, blocks: list[StoredBlock], claim: _Claim | None) -> None:
        places = [block.at for block in blocks if block.at is not None]
        allowed = set(claim.locations) if claim is not None else set()
        if len(set(places)) != len(places) or not allowed.issuperset(places):
            raise CorruptData("blocks lie outside of the memory of their ticket, or in one place")
        for block in blocks:
            if block.at is not None and block.nbytes > self._memory.nbytes(block.at):
                raise CorruptData(f"a block of {block.nbytes} bytes does not fit into its extent")

    def _claim(self, owner: Peer, locations: tuple[Location, ...], filling: bool) -> int:
        self._last_claim += 1
        self._claims[self._last_claim] = _Claim(owner, locations, filling)
        return self._last_claim

    def _drop_claims_of_the_dead(self) -> None:
        """A client that lost its connection may still read or fill its extents; one that is gone does not."""
        dead = {owner for owner in {claim.owner for claim in self._claims.values()} if is_gone(owner)}
        for number in [number for number, claim in self._claims.items() if claim.owner in dead]:
            self.release(Release(number))

    def _handles(self, locations: Iterable[Location]) -> dict[int, Handle]:
        return {chunk: self._memory.handle(chunk) for chunk in {location.chunk for location in locations}}


class StoreServer:
    """A running store. Others find it by its announcement, which `reference` names. `close` ends both."""

    def __init__(self, store_name: str, description: Description) -> None:
        """Start it. Raises OSError if it cannot listen, `BackendUnavailable` without a memory plane."""
        self.reference = ""
        self._store_name, self._description = store_name, description
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"holdfast-torchstore-{os.getpid()}", daemon=True)
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            self.close()
            raise HoldfastError(f"the store did not start within {START_SECONDS:g} s; is the machine overloaded?")
        if self._failure is not None:
            self._thread.join()
            raise again(self._failure)
        forks.refuse_in_children(self, f"store {store_name!r}", ("reference",))

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the store, and wait until its memory is free. Idempotent."""
        if self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._ending.set)
            except RuntimeError:  # the loop was closed meanwhile
                pass
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._loop.close()
            self._started.set()

    async def _serve(self) -> None:
        key = secrets.token_bytes(32)
        service = StoreService(self._description)
        with contextlib.closing(service):
            server = AsyncRpcServer(
                key=key, job=JOB, identity=SERVER_NAME, handlers=self._handlers(service), limit=FRAME_BYTES
            )
            await server.start()
            try:
                with OpenAnnouncement(self._store_name, server.address, key) as announcement:
                    self.reference = announcement.reference
                    self._started.set()
                    await self._ending.wait()
            finally:
                await server.close()

    def _handlers(self, service: StoreService) -> dict[str, Handler]:
        def end(_: None) -> None:
            self._loop.call_soon(self._ending.set)

        async def allocate(_: str, body: bytes) -> bytes:
            return encode(await service.allocate(decode(body, Allocate)))

        return {
            "describe": _handler(lambda _: service.description, type(None)),
            "allocate": allocate,
            "commit": _handler(service.commit, Commit),
            "locate": _handler(service.locate, Locate),
            "release": _handler(service.release, Release),
            "delete": _handler(service.delete, Delete),
            "keys": _handler(service.keys, ListKeys),
            "has": _handler(service.has, str),
            "end": _handler(end, type(None)),
        }


def _handler(function: Callable[[M], object], kind: type[M]) -> Handler:
    return lambda _, body: encode(function(decode(body, kind)))


def _all_blocks(contents: Iterable[Content]) -> Iterable[StoredBlock]:
    return (block for content in contents for block in blocks_of(content))


def _places(blocks: Iterable[StoredBlock]) -> list[Location]:
    return [block.at for block in blocks if block.at is not None]
