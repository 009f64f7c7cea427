"""Transfers replicated state to newcomers: from the memory of all ranks that have it, or from one over a communicator.

The ranks that hold the state offer it: the location of its bytes and their checksums. The first of them adds the
description. A newcomer reads each block from a rank that has the same checksum as the first, and loads only when it has
all blocks. If no memory plane reaches all ranks, only the first makes an offer, and then sends the bytes.

Small tensors share chunks, so that a model of many small parameters needs few messages. The other ranks wait for the
newcomers, so that no rank's state changes meanwhile. If the first rank dies, the epoch fails and the next one tries
again from another. If its state cannot be sent, the newcomers get the reason and end; it goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError, Mismatch
from holdfast.comms.memory_plane import Handle, MemoryPlane
from holdfast.ft.state.aliases import check_agreement, groups_sharing_memory
from holdfast.ft.state.codec import decode_state, encode_state
from holdfast.ft.state.fetching import BLOCK, Block, Fetch, Fetched, Fetcher, Source, blocks_of, digest
from holdfast.ft.step_protocol import FAILURES, Decision

CHUNK = 16 << 20
"""The most bytes of a chunk that small tensors share; a larger tensor is a chunk of its own."""
ALIGNMENT = 16


class StateNotGiven(HoldfastError):
    """Rank `rank`, which holds the state of the job, cannot give it to newcomers, for `reason`."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(
            f"rank {rank} cannot give its state to newcomers: {reason}; let state_dict() of what is attached return "
            "only what can travel"
        )


class Stateful(Protocol):
    """An object that can be attached to a session: a model, an optimizer, a scheduler, a data loader ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class PackedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's place: its dtype and shape, and byte `offset` of chunk `chunk`."""

    dtype: str
    shape: list[int]
    chunk: int
    offset: int


class _Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A contiguous range of bytes: its length, the checksums of its blocks, and its region (None: it is sent)."""

    nbytes: int
    digests: list[bytes]
    handle: Handle | None


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

    `unlike` are the ranks that differ from the first in their state."""

    done: int
    fetched: Fetched
    unlike: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """One transfer of the state of everything `attached`, as `decision` says. Every rank calls `offer` or `pull`.

    `plane` reaches the memory of all ranks; None: the bytes go over the communicator. `timeout` (seconds) bounds one
    message, `patience` the wait for newcomers. `reach(name)` is called at fault points.
    """

    comm: Communicator
    plane: MemoryPlane | None
    decision: Decision
    attached: Mapping[str, Stateful]
    timeout: float
    patience: float
    reach: Callable[[str], None]

    def offer(self, done: int, on_refusal: Callable[[str], None]) -> None:
        """Offer the state after `done` steps to the newcomers; returns when all of them have it.

        If the state cannot be sent, they are refused, and `on_refusal` is called with the reason. Raises the error that
        ends the epoch.
        """
        comm, first = self.comm, self.comm.rank == self.decision.source
        packed = PackedState(b"", [], [])
        offered: _Offer | None = None
        with contextlib.ExitStack() as exposed:
            if first:
                self.reach("sync.before_header")
            if first or self.plane is not None:
                try:
                    packed = pack(self.attached, comm.device if self.plane is None else torch.device("cpu"))
                    chunks = [self._chunk(chunk, exposed) for chunk in packed.chunks]
                    offered = _Offer(done, chunks, *((packed.description, packed.pieces) if first else ()))
                except FAILURES:
                    raise
                except Exception as error:
                    offered = _Offer(done, [], refusal=reason_of(error))
            comm.all_gather_object(b"" if offered is None else _encode(offered))
            if offered is not None and offered.refusal:
                on_refusal(offered.refusal)
            elif first and self.plane is None:
                for chunk in packed.chunks:
                    self.reach("sync.before_chunk")
                    self._give(chunk)
            self.arrived()

    def pull(self, fetcher: Fetcher, fetch: Fetch) -> Pulled:
        """Read the state and load it into everything attached. Call `arrived` once that is recorded.

        Raises `Mismatch` if other things are attached at the source; `CorruptData` for an invalid offer or other bytes
        than were offered; `StateNotGiven` if the source's state cannot be sent; what `fetch` raises. Nothing is loaded
        then.
        """
        offers = [_decoded(raw) for raw in self.comm.all_gather_object(b"")]
        first = offers[self.decision.source]
        if first is None:
            raise CorruptData(f"rank {self.decision.source} offers no state")
        if first.refusal:
            raise StateNotGiven(self.decision.source, first.refusal)
        device = self.comm.device if self.plane is None else torch.device("cpu")
        chunks = [torch.empty(chunk.nbytes, dtype=torch.uint8, device=device) for chunk in first.chunks]
        agreeing = {self.decision.source}
        if self.plane is None:
            fetched = self._take(chunks, first)
        else:
            blocks = list(_blocks(chunks, first, offers))
            agreeing |= {source.rank for block in blocks for source in block.sources}
            fetched = fetch(self.plane, blocks)
        state = unpack(PackedState(first.description, first.pieces, chunks))
        check_names(state, self.attached)
        self.reach("sync.before_load")
        fetcher.forget()  # users may write into the arrived tensors from here on
        load(state, self.attached)
        offering = [rank for rank, given in enumerate(offers) if given is not None]
        return Pulled(first.done, fetched, tuple(rank for rank in offering if chunks and rank not in agreeing))

    def arrived(self) -> None:
        """Let all ranks continue: every newcomer has the state. Collective; `offer` ends with the same barrier."""
        self.comm.barrier(timeout=self.patience)

    def _chunk(self, chunk: torch.Tensor, exposed: contextlib.ExitStack) -> _Chunk:
        handle = None
        if self.plane is not None:
            self.reach("sync.before_chunk")
            handle = exposed.enter_context(self.plane.expose(chunk)).handle
        return _Chunk(chunk.nbytes, [digest(block) for block in blocks_of(chunk)], handle)

    @property
    def _to_all(self) -> bool:
        return len(self.decision.receivers) == self.comm.size - 1

    def _give(self, chunk: torch.Tensor) -> None:
        if self._to_all:
            self.comm.broadcast(chunk, self.comm.rank, timeout=self.timeout)
            return
        for rank in self.decision.receivers:
            self.comm.send(chunk, rank, timeout=self.timeout)

    def _take(self, chunks: Sequence[torch.Tensor], first: _Offer) -> Fetched:
        source = self.decision.source
        for number, (chunk, offered) in enumerate(zip(chunks, first.chunks, strict=True)):
            self.reach("sync.before_chunk")
            if self._to_all:
                self.comm.broadcast(chunk, source, timeout=self.timeout)
            else:
                self.comm.recv(chunk, source, timeout=self.timeout)
            if [digest(block) for block in blocks_of(chunk)] != offered.digests:
                raise CorruptData(f"chunk {number} of a state ({chunk.nbytes} bytes) arrived with another checksum")
        return Fetched({source: sum(chunk.nbytes for chunk in chunks)})


def _blocks(chunks: Sequence[torch.Tensor], first: _Offer, offers: Sequence[_Offer | None]) -> Iterable[Block]:
    """The blocks of all chunks, each with the ranks that offer the same bytes as the first."""
    for number, chunk in enumerate(chunks):
        wanted, pieces = first.chunks[number].digests, blocks_of(chunk)
        if len(wanted) != len(pieces):
            raise CorruptData(f"{len(wanted)} checksums for the {len(pieces)} blocks of a chunk of state")
        alike = [
            (rank, given.chunks[number])
            for rank, given in enumerate(offers)
            if given is not None and number < len(given.chunks) and given.chunks[number].nbytes == chunk.nbytes
        ]
        for place, (into, checksum) in enumerate(zip(pieces, wanted, strict=True)):
            sources = [
                Source(rank, theirs.handle, place * BLOCK)
                for rank, theirs in alike
                if theirs.handle is not None and theirs.digests[place : place + 1] == [checksum]
            ]
            yield Block(checksum, into, tuple(sources))


def _decoded(raw: bytes) -> _Offer | None:
    if not raw:
        return None
    try:
        return _decoder.decode(raw)
    except UNDECODABLE as error:
        raise CorruptData(f"not an offer of state: {error}") from error


def reason_of(error: Exception) -> str:
    """The text of the error for which state cannot be sent."""
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class PackedState:
    """A state as bytes: its description, the place of each tensor, and the chunks."""

    description: bytes
    pieces: list[PackedTensor]
    chunks: list[torch.Tensor]


def unpack(packed: PackedState) -> Any:
    """The state, each tensor in memory of its own. Raises `CorruptData` if its parts do not fit together."""
    return decode_state(packed.description, [_unpack(piece, packed.chunks) for piece in packed.pieces])


def check_names(state: Mapping[str, Any], attached: Mapping[str, Stateful]) -> None:
    """Raise `Mismatch` if the names in `state` differ from those attached here."""
    if state.keys() != attached.keys():
        raise Mismatch(
            f"attached here: {', '.join(sorted(attached)) or 'nothing'}; where the state comes from: "
            f"{', '.join(sorted(state)) or 'nothing'}; attach the same on every rank"
        )


def load(state: Mapping[str, Any], attached: Mapping[str, Stateful]) -> None:
    """Load the state of each attached thing.

    Raises `Mismatch`, before anything is loaded, if weights that are tied here differ in `state`: a module would keep
    the last one.
    """
    for name, thing in attached.items():
        if isinstance(thing, torch.nn.Module):
            _check_tied(name, thing.state_dict(), state[name])
    for name, thing in attached.items():
        thing.load_state_dict(state[name])


def _check_tied(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    plain = {key: each for key, each in here.items() if type(each) in (torch.Tensor, torch.nn.Parameter)}
    sources = {key: there[key] for key in plain if isinstance(there, Mapping) and type(there.get(key)) is torch.Tensor}
    targets = {
        key: plain[key].detach()
        for key, source in sources.items()
        if (plain[key].dtype, plain[key].shape) == (source.dtype, source.shape) and plain[key].device.type != "meta"
    }
    for group in groups_sharing_memory(targets):
        check_agreement({key: targets[key] for key in group}, sources, f"{name!r}")


def pack(attached: Mapping[str, Stateful], device: torch.device) -> PackedState:
    """The state of everything attached, as bytes on `device`. A chunk may be the memory of a tensor itself.

    Raises TypeError for state that cannot be sent.
    """
    description, tensors = encode_state({name: thing.state_dict() for name, thing in attached.items()})
    pieces: list[PackedTensor] = []
    contents: list[list[torch.Tensor]] = []
    open_chunk, filled = -1, 0
    for tensor in tensors:
        raw = _bytes_of(tensor).to(device)
        if raw.numel() >= CHUNK:
            pieces.append(_piece(tensor, len(contents), 0))
            contents.append([raw])
            continue
        padding = -filled % ALIGNMENT
        if open_chunk < 0 or filled + padding + raw.numel() > CHUNK:
            contents.append([])
            open_chunk, filled, padding = len(contents) - 1, 0, 0
        if padding:
            contents[open_chunk].append(torch.zeros(padding, dtype=torch.uint8, device=device))
        pieces.append(_piece(tensor, open_chunk, filled + padding))
        contents[open_chunk].append(raw)
        filled += padding + raw.numel()
    return PackedState(description, pieces, [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in contents])


def _piece(tensor: torch.Tensor, chunk: int, offset: int) -> PackedTensor:
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), chunk, offset)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a tensor of at most one element counts as contiguous whatever its strides
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _unpack(piece: PackedTensor, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype, None)
    if not isinstance(dtype, torch.dtype) or any(length < 0 for length in piece.shape):
        raise CorruptData(f"no tensor is {piece.dtype} of shape {piece.shape}")
    count = 1
    for length in piece.shape:
        count *= length
    nbytes = count * dtype.itemsize
    if not (0 <= piece.chunk < len(chunks) and 0 <= piece.offset <= chunks[piece.chunk].numel() - nbytes):
        raise CorruptData("a tensor of a state lies outside of its chunk")
    whole = chunks[piece.chunk]
    raw = whole[piece.offset : piece.offset + nbytes]
    if not nbytes:
        return torch.empty(piece.shape, dtype=dtype, device=raw.device)
    if raw.numel() < whole.numel():  # some callers read the whole storage of a tensor (torch.set_rng_state)
        raw = raw.clone()
    return raw.view(dtype).reshape(piece.shape)
