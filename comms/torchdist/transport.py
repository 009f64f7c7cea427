"""`HoldfastTransport`: torch 2.15's one-sided transport (`torch.distributed._transport`) over a memory plane.

    from torch.distributed._transport import new_transport
    transport = new_transport("holdfast", "cpu", plane="shm")

The entry point `torch.distributed.transports` names it. A region's handle is all that a peer needs, so `bind` and
`connect` only check that both ends use the same plane. A transfer from memory whose process has died raises
`RegionGone`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms.errors import UNDECODABLE, CorruptData, Mismatch, OpTimeout, RegionGone
from holdfast.comms.memory_plane import Handle, Region
from holdfast.comms.memory_plane import memory as open_plane
from holdfast.comms.quantities import seconds_or, time_left
from holdfast.comms.torchdist.works import TorchWork
from holdfast.comms.work import Work

Tensor = torch.Tensor

_Base: Any = importlib.import_module("torch.distributed._transport").Transport

_URL = b"holdfast-plane 1 "
_SECONDS = 30.0
"""The timeout of a transfer without one of its own."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RemoteMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A range of a region of another process, as its `serialize` describes it. It grants access to that memory."""

    handle: bytes
    offset: _Count
    length: _Count
    version: Literal[1] = 1

    def serialize(self) -> bytes:
        """The bytes to send to a peer that may access the memory."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def deserialize(cls, data: bytes) -> RemoteMemory:
        """Decode what `serialize` gave. Raises `CorruptData`."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except UNDECODABLE as error:
            raise CorruptData(f"a descriptor of remote memory cannot be read: {error}") from error
        Handle.decode(found.handle)
        return found


class LocalView:
    """A range of registered memory, to read from."""

    def __init__(self, owner: RegisteredMemory, offset: int, length: int) -> None:
        self.owner, self.offset, self.length = owner, offset, length

    def size(self) -> int:
        """The length in bytes."""
        return self.length

    def bytes(self) -> Tensor:
        """The memory of the range. Raises `RegionGone` once the memory is unregistered."""
        self.owner.check()
        flat = self.owner.tensor.view(-1).view(torch.uint8)
        return flat[self.offset : self.offset + self.length]


class MutableLocalView(LocalView):
    """A range of registered memory, to write into."""

    writable: Literal[True] = True


class RegisteredMemory:
    """A contiguous tensor that peers may read and write, until it is unregistered."""

    def __init__(self, tensor: Tensor, region: Region) -> None:
        self.tensor, self._region = tensor, region
        self._open = True

    def check(self) -> None:
        """Raise `RegionGone` once the memory is unregistered."""
        if not self._open:
            raise RegionGone("its memory is unregistered; register the tensor again")

    def to_view(self, offset: int | None = None, length: int | None = None) -> LocalView:
        """A view to read from, of `length` bytes from `offset` on. Raises ValueError beyond the tensor."""
        return LocalView(self, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> MutableLocalView:
        """As `to_view`; it may be written into."""
        return MutableLocalView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> RemoteMemory:
        """The descriptor for peers, of the whole tensor."""
        self.check()
        return RemoteMemory(self._region.handle.encode(), 0, self.tensor.nbytes)

    def unregister(self) -> None:
        """End the access of peers. Idempotent."""
        if self._open:
            self._open = False
            self._region.close()

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.check()
        begin, whole = offset or 0, self.tensor.nbytes
        size = whole - begin if length is None else length
        if begin < 0 or size < 0 or begin + size > whole:
            raise ValueError(f"bytes {begin} to {begin + size} are not within the tensor's {whole} bytes")
        return begin, size


class HoldfastTransport(_Base):  # type: ignore[misc]  # a class of torch 2.15
    """One endpoint. `plane` names the memory plane ("auto": the fastest here); from any thread."""

    def __init__(self, device: torch.device | str | None = None, plane: str = "auto") -> None:
        super().__init__(device)
        self._plane, self._connected, self._closed = open_plane(plane), False, False
        self._registered: list[RegisteredMemory] = []
        self._pending: list[Work] = []

    @staticmethod
    def supported() -> bool:
        """Whether the transport can be used in this process: yes, over the plane that is there."""
        return True

    def bind(self, *, timeout: float | None = None) -> bytes:
        """The connection URL: the plane's name."""
        self._check_open()
        return _URL + self._plane.name.encode()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connect to a bound peer. Raises `CorruptData`, and `Mismatch` for a peer with another plane."""
        self._check_open()
        if not peer_url.startswith(_URL):
            raise CorruptData(f"{peer_url[:60]!r} is not a connection URL of this transport")
        theirs = peer_url.removeprefix(_URL).decode(errors="replace")
        if theirs != self._plane.name:
            raise Mismatch(f"the peer's plane is {theirs[:60]!r}, this one's {self._plane.name!r}; pass both the same")
        self._connected = True
        return 0

    def connected(self) -> bool:
        """Whether `connect` succeeded and the endpoint is open."""
        return self._connected and not self._closed

    def register_memory(self, tensor: Tensor, *, timeout: float | None = None) -> RegisteredMemory:
        """Expose a contiguous tensor. Each registration has a lifetime of its own."""
        self._check_open()
        self._check_device(tensor.device)
        if not tensor.is_contiguous():
            raise ValueError("the tensor is not contiguous; pass tensor.contiguous()")
        registered = RegisteredMemory(tensor, self._plane.expose(tensor, writable=True))
        self._registered.append(registered)
        return registered

    def unregister_memory(self, memory: RegisteredMemory, *, timeout: float | None = None) -> None:
        """End the access of peers to a tensor. Idempotent."""
        memory.unregister()
        self._registered = [each for each in self._registered if each is not memory]

    def write(
        self,
        local_buffer: LocalView,
        remote_buffer: RemoteMemory,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | dist.Work:
        """Copy a local range to the beginning of a remote one. Raises ValueError if that is shorter."""
        return self._transfer(self._plane.write, local_buffer, remote_buffer, async_op, timeout)

    def read(
        self,
        local_buffer: MutableLocalView,
        remote_buffer: RemoteMemory,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | dist.Work:
        """Fill a local range from the beginning of a remote one. Raises ValueError if that is shorter."""
        if not isinstance(local_buffer, MutableLocalView):
            raise ValueError("a read needs a mutable view; call to_mutable_view()")
        return self._transfer(self._plane.read, local_buffer, remote_buffer, async_op, timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for pending transfers, then release all. Idempotent. Raises `OpTimeout`; then close again."""
        self._closed = True
        limit = seconds_or(timeout, _SECONDS)
        left = time_left(limit)
        while self._pending:
            with contextlib.suppress(Exception):  # a transfer that failed has told its caller
                self._pending[-1].wait(left())
            if not self._pending[-1].done():
                raise OpTimeout("close", 0, limit)
            self._pending.pop()
        self._close_cuda_streams()
        while self._registered:
            self._registered.pop().unregister()
        self._plane.close()

    async def close_async(self, *, timeout: float | None = None) -> None:
        """As `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close, timeout=timeout)

    def _transfer(
        self,
        copy: Callable[..., Work],
        local: LocalView,
        remote: RemoteMemory,
        async_op: bool,
        timeout: float | None,
    ) -> int | dist.Work:
        self._check_open()
        if not self._connected:
            raise Mismatch("the endpoint is not connected; call connect() with the peer's URL first")
        if local.size() > remote.length:
            raise ValueError(f"the local range has {local.size()} bytes, the remote one {remote.length}")
        limit = seconds_or(timeout, _SECONDS)
        work = copy(Handle.decode(remote.handle), local.bytes(), remote.offset, timeout=limit)
        if not async_op:
            work.wait()
            return 0
        self._pending = [each for each in self._pending if not each.done()] + [work]
        return TorchWork([work], [], limit, 0)

    def _check_open(self) -> None:
        if self._closed:
            raise RegionGone("the transport is closed; make another")
