"""The calls between clients and the process of a store, as msgpack. Decoding is strict, and runs no code."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.torchstore.service.records import Content, Location


class ServiceMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Description(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The strategy of a store and the names of its volumes, for a client.

    `strategy` is the module and the name of a class. `volumes` is None if any name will do.
    """

    strategy: tuple[str, str]
    transport: str
    volumes: tuple[str, ...] | None
    plane: str


class Allocate(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A wish for memory to fill."""

    owner: Peer
    sizes: tuple[int, ...]


class Allocated(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Extents for one `Commit`, and the handles of their chunks."""

    ticket: int
    locations: tuple[Location, ...]
    chunks: dict[int, Handle]


class Commit(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Contents to put under keys. `ticket` 0: they need no memory."""

    ticket: int
    volume: str
    contents: dict[str, Content]


class Locate(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A wish to read keys."""

    owner: Peer
    keys: tuple[str, ...]


class Located(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The contents of keys, which stay as they are until `Release` of the lease. Lease 0: nothing to release."""

    lease: int
    contents: dict[str, tuple[Content, ...]]
    chunks: dict[int, Handle]


class Release(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of a ticket or a lease."""

    number: int


class Delete(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Keys to delete. Not `lenient`: all must be there, and complete."""

    keys: tuple[str, ...]
    lenient: bool


class ListKeys(ServiceMessage, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A wish for the keys with a prefix."""

    prefix: str | None


M = TypeVar("M")


def encode(message: object) -> bytes:
    """The bytes of a message, or of a plain value."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """The message in `data`. Raises `CorruptData` if it is none of this kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptData(f"not a message {kind.__name__} of a store: {error}") from error
