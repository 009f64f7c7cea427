"""Transfers replicated state to newcomers, which read it from the memory of all ranks that have it.

The ranks that hold the state offer it: the location of its bytes and their checksums. The first of them adds the
description. A newcomer reads each block from a rank that has the same checksum as the first, and loads only when it has
all blocks. The other ranks wait for it, so that no rank's state changes meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.comms.memory_plane import Handle, MemoryPlane
from holdfast.ft.attempt import FAILURES
from holdfast.ft.state.fetching import BLOCK, Block, Fetcher, Source, blocks_of, digest
from holdfast.ft.state.transfer import (
    PackedState,
    PackedTensor,
    Stateful,
    StateNotGiven,
    check_names,
    load,
    pack,
    reason_of,
    unpack,
)
from holdfast.ft.step_protocol import Decision

Told = Callable[[], None]


class _Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A contiguous range of bytes: its region, and the checksums of its blocks."""

    handle: Handle
    digests: list[bytes]


class _Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank's offer to newcomers. Only the first rank with the state adds `description` and `pieces`.

    `refusal` says why the rank's state cannot be sent; "" if it can.
    """

    done: int
    chunks: list[_Chunk]
    description: bytes = b""
    pieces: list[PackedTensor] = []
    refusal: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Offer)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a transfer on a newcomer: the state after `done` steps is loaded.

    `moved` are bytes by source rank, `kept` the bytes that an earlier transfer had brought, `lost` the reasons why
    ranks were lost as sources, `unlike` the ranks that differ from the first in their state."""

    done: int
    moved: Mapping[int, int]
    kept: int
    lost: Mapping[int, str]
    unlike: tuple[int, ...]


def offer(
    comm: Communicator,
    plane: MemoryPlane,
    decision: Decision,
    attached: Mapping[str, Stateful],
    done: int,
    before_chunk: Told,
    patience: float,
    on_refusal: Callable[[str], None],
) -> None:
    """Offer the state after `done` steps to the newcomers; returns when all of them have it.

    If the state cannot be sent, they are refused, and `on_refusal` is called with the reason. Raises the error that
    ends the epoch.
    """
    with contextlib.ExitStack() as exposed:
        try:
            packed = pack(attached, torch.device("cpu"))
            chunks = []
            for chunk in packed.chunks:
                before_chunk()
                region = exposed.enter_context(plane.expose(chunk))
                chunks.append(_Chunk(region.handle, [digest(block) for block in blocks_of(chunk)]))
            said = (packed.description, packed.pieces) if comm.rank == decision.source else ()
            offered = _Offer(done, chunks, *said)
        except FAILURES:
            raise
        except Exception as error:
            offered = _Offer(done, [], refusal=reason_of(error))
        comm.all_gather_object(_encode(offered))
        if offered.refusal:
            on_refusal(offered.refusal)
        comm.barrier(timeout=patience)


def pull(
    comm: Communicator,
    plane: MemoryPlane,
    decision: Decision,
    attached: Mapping[str, Stateful],
    fetcher: Fetcher,
    *,
    timeout: float,
    over: Callable[[], HoldfastError | None],
    before_chunk: Told,
    before_load: Told,
) -> Pulled:
    """Read the state and load it into everything attached. Call `arrived` once that is recorded.

    Raises `Mismatch` if other things are attached at the source; `CorruptData` for an invalid offer; `StateNotGiven` if
    the source's state cannot be sent; what `Fetcher.fetch` raises. Nothing is loaded then.
    """
    offers = [_decoded(raw) for raw in comm.all_gather_object(b"")]
    first = offers[decision.source]
    if first is None:
        raise CorruptData(f"rank {decision.source} offers no state")
    if first.refusal:
        raise StateNotGiven(decision.source, first.refusal)
    chunks = [torch.empty(chunk.handle.nbytes, dtype=torch.uint8, device="cpu") for chunk in first.chunks]
    blocks = []
    agreeing: set[int] = set()
    for number, chunk in enumerate(chunks):
        for place, into in enumerate(blocks_of(chunk)):
            wanted = first.chunks[number].digests[place]
            sources = []
            for rank, given in enumerate(offers):
                if given is not None and _has(given, number, place, wanted, chunk.numel()):
                    sources.append(Source(rank, given.chunks[number].handle, place * BLOCK))
            agreeing.update(source.rank for source in sources)
            blocks.append(Block(wanted, into, tuple(sources)))
    fetched = fetcher.fetch(plane, blocks, timeout=timeout, over=over, before=before_chunk)
    state = unpack(PackedState(first.description, first.pieces, chunks))
    check_names(state, attached)
    before_load()
    fetcher.forget()  # users may write into the arrived tensors from here on
    load(state, attached)
    unlike = tuple(r for r, given in enumerate(offers) if given is not None and blocks and r not in agreeing)
    return Pulled(first.done, fetched.moved, fetched.kept, fetched.lost, unlike)


def arrived(comm: Communicator, patience: float) -> None:
    """Let all ranks continue: every newcomer has the state. Collective; `offer` ends with the same barrier."""
    comm.barrier(timeout=patience)


def _has(given: _Offer, number: int, place: int, wanted: bytes, nbytes: int) -> bool:
    if number >= len(given.chunks) or given.chunks[number].handle.nbytes != nbytes:
        return False
    digests = given.chunks[number].digests
    return place < len(digests) and digests[place] == wanted


def _decoded(raw: bytes) -> _Offer | None:
    if not raw:
        return None
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise CorruptData(f"not an offer of state: {error}") from error
