"""The address in a handle of the nixl plane, in under 512 bytes: NIXL's own metadata compresses well."""

from __future__ import annotations

import zlib

import msgspec

from holdfast.backends.common import region_table
from holdfast.backends.common.block_copy import sealed, unsealed
from holdfast.comms.errors import CorruptData

_MOST_BYTES = 1 << 16


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address of a region: its place in the owner's table, the table, the memory, and how to connect.

    `metadata` is NIXL's, compressed, of the agent `agent` with these two memories.
    """

    place: bytes
    table: int
    memory: int
    nbytes: int
    writable: bool
    agent: str
    metadata: bytes

    def encode(self) -> bytes:
        return sealed(msgspec.msgpack.encode(self))

    @staticmethod
    def decode(data: bytes) -> tuple[NixlAddress, region_table.TableAddress, bytes]:
        """Decode an address; returns it, its place in the table, and NIXL's metadata.

        Raises `CorruptData` for anything but what `encode` made: NIXL would trust it.
        """
        body = unsealed(data)
        try:
            address = _addresses.decode(body)
            unpacker = zlib.decompressobj()
            metadata = unpacker.decompress(address.metadata, _MOST_BYTES)
        except (msgspec.DecodeError, UnicodeDecodeError, zlib.error) as error:
            raise CorruptData(f"not the address of a region: {error}") from error
        if not unpacker.eof:
            raise CorruptData("not the address of a region: what describes its agent is too long")
        return address, region_table.TableAddress.decode(address.place), metadata


_addresses = msgspec.msgpack.Decoder(NixlAddress)


def packed(metadata: bytes) -> bytes:
    """Compress NIXL's metadata for an address."""
    return zlib.compress(metadata, 9)
