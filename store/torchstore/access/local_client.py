"""`LocalClient`: a process's side of a store. Its calls are coroutines; the work is done in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, PeerFailed, RegionGone, again
from holdfast.comms.memory_plane import memory
from holdfast.comms.system import forks
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.control.client import RpcClient
from holdfast.ft.control.errors import RemoteError
from holdfast.store.torchstore.access.contents import INLINE_BYTES, Draft, draft, inline_block
from holdfast.store.torchstore.access.memory_access import MemoryAccess
from holdfast.store.torchstore.access.reading import ValueReadPlan, plan
from holdfast.store.torchstore.access.request import Request
from holdfast.store.torchstore.discovery.announcement import Announcement
from holdfast.store.torchstore.errors import NoSuchKey, NotInitialized
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
from holdfast.store.torchstore.service.server import FRAME_BYTES, JOB
from holdfast.store.torchstore.strategies import strategy_of
from holdfast.store.torchstore.tensor_slice import TensorSlice

CALL_SECONDS = 30.0
SLOW_TOUCH = 50e6
"""Bytes a second at which the server gets new memory in any case."""

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

    def __init__(self, announcement: Announcement) -> None:
        """Connect. Raises `NotInitialized` if the store has ended."""
        self.store_name = announcement.store_name
        self._me = this_process()
        identity = f"{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self._rpc = RpcClient(
                announcement.address, key=announcement.key, job=JOB, identity=identity, limit=FRAME_BYTES
            )
        except PeerFailed as error:
            raise NotInitialized(self.store_name, f"it has ended ({error})") from error
        try:
            about = self._call("describe", None, Description)
            self.strategy = strategy_of(about)
            self._volumes = about.volumes
            self._access = MemoryAccess(memory(about.plane))
        except BaseException:
            self._rpc.close()
            raise
        forks.refuse_in_children(self, f"the connection to store {self.store_name!r}", ("store_name",))

    @property
    def connected(self) -> bool:
        """Whether the store still holds its end of the connection."""
        number = self._rpc.fileno()
        if number < 0:
            return False
        poll = select.poll()
        poll.register(number, select.POLLRDHUP)
        return not poll.poll(0)

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
        await in_thread(self._put, entries)

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
        return (await in_thread(self._get, {key: request}, {key: inplace_tensor}))[key]

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
        return await in_thread(self._get, requests, inplace)

    async def keys(self, prefix: str | None = None) -> list[str]:
        """All keys; with a prefix those that begin with its parts: "a.b" finds "a.b" and "a.b.c", not "a.bc"."""
        return await in_thread(self._call, "keys", ListKeys(prefix), list[str])

    async def delete(self, key: str) -> None:
        """Delete a key. Raises `NoSuchKey`, also for one of which some shards are missing."""
        await in_thread(self._call, "delete", Delete((key,), False), None)

    async def delete_batch(self, keys: list[str]) -> None:
        """Delete keys; those that are not there are ignored."""
        if not isinstance(keys, list):
            raise TypeError(f"delete_batch takes a list of keys, not {type(keys).__name__}")
        if keys:
            await in_thread(self._call, "delete", Delete(tuple(keys), True), None)

    async def exists(self, key: str) -> bool:
        """Whether a key has a value, complete with all its shards."""
        return await in_thread(self._call, "has", key, bool)

    def end_store(self) -> None:
        """Begin to end the store for all processes."""
        self._call("end", None, None)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._rpc.close()
        self._access.close()

    # -- in a thread

    @torch.no_grad()
    def _put(self, entries: Mapping[str, Any]) -> None:
        volume = self._volume()
        drafts = _drafts(entries)
        tensors = [tensor for each in drafts.values() for tensor in each.tensors]
        large = [tensor for tensor in tensors if tensor.nbytes > INLINE_BYTES]
        given = Allocated(0, (), {})
        if large:
            sizes = tuple(tensor.nbytes for tensor in large)
            given = self._call("allocate", Allocate(self._me, sizes), Allocated, sum(sizes) / SLOW_TOUCH)
        try:
            written = iter(self._access.write(given.chunks, given.locations, large))
            blocks = iter([next(written) if each.nbytes > INLINE_BYTES else inline_block(each) for each in tensors])
            contents = {key: each.make([next(blocks) for _ in each.tensors]) for key, each in drafts.items()}
            self._call("commit", Commit(given.ticket, volume, contents), None)
        except BaseException:
            self._release(given.ticket)
            raise

    @torch.no_grad()
    def _get(self, requests: Mapping[str, Request], inplace: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        found = self._call("locate", Locate(self._me, tuple(requests)), Located)
        try:
            plans = _plans(requests, inplace, found)
            self._access.read(found.chunks, [copy for each in plans.values() for copy in each.copies])
        finally:
            self._release(found.lease)
        return {key: each.finish() for key, each in plans.items()}

    def _volume(self) -> str:
        volume = self.strategy.get_client_id()
        if self._volumes is not None and volume not in self._volumes:
            there = f"{self._volumes[0]!r} to {self._volumes[-1]!r}"
            raise KeyError(f"store {self.store_name!r} has no storage volume {volume!r} for this process, only {there}")
        return volume

    def _release(self, number: int) -> None:
        if number:
            with contextlib.suppress(HoldfastError):  # a store that has ended needs no release
                self._call("release", Release(number), None)

    def _call(self, method: str, message: object, answer: type[T] | None, longer: float = 0.0) -> T:
        """Call the server, for up to `CALL_SECONDS` and `longer`; what its handlers raise is raised here."""
        body = encode(message)
        try:
            data = self._rpc.call(method, body, CALL_SECONDS + longer)
        except RemoteError as error:
            raise _local_error(error) from None
        except PeerFailed as error:
            raise NotInitialized(self.store_name, f"it was shut down, or its process has ended ({error})") from error
        return decode(data, answer)  # type: ignore[arg-type]


def _drafts(entries: Mapping[str, Any]) -> dict[str, Draft]:
    """The drafts of all values, or one error with everything that is wrong."""
    drafts, wrong = {}, []
    for key, value in entries.items():
        try:
            if not isinstance(key, str):
                raise TypeError(f"a key is text, not {type(key).__name__}")
            drafts[key] = draft(key, value)
        except (HoldfastError, TypeError, ValueError) as error:
            wrong.append(error)
    _raise_together(wrong)
    return drafts


def _plans(
    requests: Mapping[str, Request], inplace: Mapping[str, torch.Tensor | None], found: Located
) -> dict[str, ValueReadPlan]:
    """The plans of all reads, or one error with everything that is wrong."""
    plans, wrong = {}, []
    for key, request in requests.items():
        try:
            plans[key] = plan(request, inplace[key], found.contents[key])
        except HoldfastError as error:
            wrong.append(error)
    _raise_together(wrong)
    return plans


def _raise_together(wrong: Sequence[Exception]) -> None:
    if len(wrong) == 1:
        raise again(wrong[0])
    if wrong:
        raise Mismatch(f"{len(wrong)} keys are wrong, nothing was done: " + "; ".join(map(str, wrong)))


def _local_error(error: RemoteError) -> Exception:
    """The error of the server's handler, as this process's own."""
    for kind in (Mismatch, CorruptData, RegionGone):
        if error.kind == kind.__name__:
            return kind(error.message)
    if error.kind == NoSuchKey.__name__:
        return NoSuchKey(error.message)
    return error
