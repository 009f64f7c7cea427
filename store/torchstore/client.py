"""`LocalClient`: a process's side of a store. Its calls are coroutines; the work is done in a thread."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from holdfast.comms import memory_plane
from holdfast.comms.errors import HoldfastError, OpTimeout
from holdfast.comms.system import forks
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.registers import RegisterAway
from holdfast.store.data.packing import pack
from holdfast.store.errors import NotInitialized
from holdfast.store.torchstore import record
from holdfast.store.torchstore.home import StoreAddress
from holdfast.store.torchstore.record import Deleted, Directory, KeyPart, StoreRecord
from holdfast.store.torchstore.strategy import strategy_of
from holdfast.store.torchstore.transport import Request, TensorSlice
from holdfast.store.torchstore.values import OpenPart, blocks_of, read_values

INLINE_BYTES = 1024
"""A part of up to this many bytes travels in the directory itself."""
GRANT_SECONDS = 30.0
SLOW_TOUCH = 50e6
"""Bytes a second at which the owner gets new memory, in any case."""

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call in a thread. If this coroutine is cancelled, it ends once the call has: no copy goes on behind it."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()
        raise


class LocalClient:
    """A connection to a store. Thread-safe. `strategy` says into which volume this process puts values."""

    def __init__(self, address: StoreAddress) -> None:
        """Connect. Raises `NotInitialized` if the store has ended."""
        self.store_name, self._address = address.store_name, address
        self._me = this_process()
        try:
            self._record = address.open_record()
        except HoldfastError as error:
            raise self._ended(error) from error
        try:
            about = self._there(self._record.cell.read)[1]
            self.strategy, self._volumes = strategy_of(about), about.volumes
            self._plane = memory_plane.memory()
        except BaseException:
            self._record.close()
            raise
        self._mapped: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._claim = 0
        """The claim on memory for the next put; 0 for none, or while a put fills it."""
        forks.refuse_in_children(self, f"the connection to store {self.store_name!r}", ("store_name",))

    @property
    def connected(self) -> bool:
        """Whether the store has not ended."""
        return self._address.running

    async def put(self, key: str, value: Any) -> None:
        """Store a tensor, a DTensor's shard, or an object. Raises what `put_batch` does."""
        await self.put_batch({key: value})

    async def put_batch(self, entries: dict[str, Any]) -> None:
        """Store values under their keys; all become visible at once.

        Raises ValueError without entries, KeyError if the strategy finds no volume for this process, `Unsupported` or
        `ObjectRefused` for values that cannot be stored, `Mismatch` for keys that hold something of another kind.
        """
        if not isinstance(entries, dict) or not entries:
            raise ValueError("put_batch takes a dict with at least one key")
        await in_thread(self._there, lambda: self._put(entries))

    async def get(
        self,
        key: str,
        inplace_tensor: torch.Tensor | None = None,
        tensor_slice_spec: TensorSlice | None = None,
    ) -> Any:
        """The value of a key; a slice of it, if one is asked for. `inplace_tensor` is filled, and returned.

        Raises `NoSuchKey` (a KeyError), `NoSuchSlice`, `Mismatch`, and what `Request.from_any` raises.
        """
        request = Request.from_any(key, inplace_tensor, tensor_slice_spec)
        return (await in_thread(self._there, lambda: self._get({key: request}, {key: inplace_tensor})))[key]

    async def get_batch(self, keys: list[str] | dict[str, torch.Tensor | None]) -> dict[str, Any]:
        """The values of keys; a dict names tensors to fill. All or nothing; errors as for `get`."""
        if not isinstance(keys, list | dict):
            raise TypeError(f"get_batch takes a list of keys or a dict, not {type(keys).__name__}")
        if not keys:
            raise ValueError("get_batch takes at least one key")
        if len(set(keys)) < len(keys):
            raise ValueError("get_batch keys must be unique")
        inplace = keys if isinstance(keys, dict) else dict.fromkeys(keys)
        requests = {key: Request.from_any(key, tensor) for key, tensor in inplace.items()}
        return await in_thread(self._there, lambda: self._get(requests, inplace))

    async def keys(self, prefix: str | None = None) -> list[str]:
        """All keys; with a prefix those that begin with its parts: "a.b" finds "a.b" and "a.b.c", not "a.bc"."""
        return await in_thread(self._there, lambda: self._record.read(lambda now: now.keys(prefix)))

    async def delete(self, key: str) -> None:
        """Delete a key. Raises `NoSuchKey`, also for one of which some shards are missing."""
        deleted = Deleted((key,))
        await in_thread(self._there, lambda: self._record.commit(deleted, lambda now: now.find([key])))

    async def delete_batch(self, keys: list[str]) -> None:
        """Delete keys; those that are not there are ignored."""
        if not isinstance(keys, list):
            raise TypeError(f"delete_batch takes a list of keys, not {type(keys).__name__}")
        if keys:
            await in_thread(self._there, lambda: self._record.commit(Deleted(tuple(keys)), lambda _: None))

    async def exists(self, key: str) -> bool:
        """Whether a key has a value, complete with all its shards."""
        return await in_thread(self._there, lambda: self._record.read(lambda now: now.has(key)))

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._release(self._swap_claim(0))
        for each in (self._record, self._plane):
            each.close()

    # -- in a thread

    @torch.no_grad()
    def _put(self, entries: Mapping[str, Any]) -> None:
        volume = self._volume()
        forms, blocks = blocks_of(entries)
        claim = grant = 0

        def allocate(nbytes: int) -> torch.Tensor:
            nonlocal claim, grant
            if nbytes <= INLINE_BYTES:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            claim = self._swap_claim(0) or secrets.randbits(62)
            grant = self._granted(claim, nbytes)
            return self._map(grant)

        def claim_next(now: StoreRecord, used: Set[int]) -> StoreRecord:
            return record.claim(now, claim, self._me, packed.nbytes, used, ahead=True) if claim else now

        try:
            packed = pack(blocks, b"", allocate)
            inline = b"" if grant else packed.memory[: packed.nbytes].numpy().tobytes()
            kinds = tuple(dict.fromkeys(forms.values()))
            numbers = {form: number for number, form in enumerate(kinds)}
            keys = {key: numbers[form] for key, form in forms.items()}
            part = KeyPart(volume, kinds, keys, packed.digest, packed.manifest_at, packed.nbytes, grant, inline)
            self._record.commit(part, lambda now: now.check(part), claim_next)
            claim = self._swap_claim(claim) if claim else 0
        finally:
            self._release(claim)

    @torch.no_grad()
    def _get(self, requests: Mapping[str, Request], inplace: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        claim, found = secrets.randbits(62), dict[str, tuple[KeyPart, ...]]()

        def leased(now: StoreRecord, directory: Directory) -> StoreRecord:
            nonlocal found
            found = directory.find(requests)
            grants = {part.grant for parts in found.values() for part in parts if part.grant}
            return record.lease(now, claim, self._me, grants)

        try:
            self._record.update(leased)
            opened = {id(part): OpenPart.of(part, self._memory(part)) for parts in found.values() for part in parts}
            values = read_values(requests, found, opened)
        finally:
            self._release(claim)
        return {key: value if inplace[key] is None else inplace[key] for key, value in values.items()}

    def _granted(self, claim: int, nbytes: int) -> int:
        """The grant of a claim, which is made anew unless its memory suits.

        Raises `OpTimeout` if there is none in time.
        """
        deadline, anew = time.monotonic() + _limit(nbytes), False
        try:
            at, now = self._record.cell.read()
            while True:
                mine, left = now.claim_of(claim), deadline - time.monotonic()
                if mine is None or not now.suits(mine, nbytes):
                    if anew:
                        raise HoldfastError(f"the owner of store {self.store_name!r} has no memory for {nbytes} bytes")
                    anew = True
                    at, now = self._record.update(
                        lambda now, found: record.claim(now, claim, self._me, nbytes, found.grants)
                    )
                elif mine.grants:
                    return mine.grants[0]
                elif left <= 0:
                    raise OpTimeout(f"a put of {nbytes} bytes into store {self.store_name!r}", 0, _limit(nbytes))
                else:
                    at, now = self._record.cell.wait(at, min(left, 1.0)) or self._there(self._record.cell.read)
        except BaseException:
            self._release(claim)
            raise

    def _memory(self, part: KeyPart) -> torch.Tensor:
        """The bytes of a part, where they lie."""
        return self._map(part.grant) if part.grant else torch.frombuffer(bytearray(part.inline), dtype=torch.uint8)

    def _map(self, grant: int) -> torch.Tensor:
        """A grant that this process claims, mapped for writing."""
        now = self._record.cell.newest()[1]
        slab = now.slab_of(grant)
        if (mapped := self._mapped.get(slab.first)) is None:
            for gone in self._mapped.keys() - {each.first for each in now.slabs}:
                self._mapped.pop(gone, None)
            mapped = self._mapped[slab.first] = self._plane.map_writable(slab.handle)
        offset = (grant - slab.first) * slab.size
        return mapped[offset : offset + slab.size]

    def _volume(self) -> str:
        volume = self.strategy.get_client_id()
        if self._volumes is not None and volume not in self._volumes:
            there = f"{self._volumes[0]!r} to {self._volumes[-1]!r}"
            raise KeyError(f"store {self.store_name!r} has no storage volume {volume!r} for this process, only {there}")
        return volume

    def _swap_claim(self, claim: int) -> int:
        """The claim that was kept for the next put, if any, in place of which this one is kept."""
        with self._lock:
            kept, self._claim = self._claim, claim
        return kept

    def _release(self, claim: int) -> None:
        with suppress(HoldfastError):  # a store that has ended needs no release
            if claim:
                self._record.cell.change(partial(record.release, ids={claim}))

    def _there(self, question: Callable[[], T]) -> T:
        """The answer to a question, unless the store has ended: `NotInitialized` then."""
        if not self.connected:
            raise self._ended("it is gone")
        try:
            return question()
        except RegisterAway as error:
            raise self._ended(error) from error

    def _ended(self, why: object) -> NotInitialized:
        return NotInitialized(self.store_name, f"it was shut down, or its process has ended ({why})")


def _limit(nbytes: int) -> float:
    return GRANT_SECONDS + nbytes / SLOW_TOUCH
